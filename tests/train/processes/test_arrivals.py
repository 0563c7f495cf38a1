"""Ranks that torchrun starts, again and again, on one store."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpumix.hardware.host.environment import TorchrunPlace
from gpumix.schema.cluster.cluster import Cluster, Device, DeviceClass
from gpumix.schema.errors import InputError, TrainingError
from gpumix.train.processes.torchrun_runner import (
    Arrival,
    TorchrunRunner,
    _has_same_agent,
    assign_devices,
    exchange_arrivals,
    exchange_devices,
    identify_agent,
)
from gpumix.train.run_log import run_files
from helpers.errors import raises


class Board:
    """A store that keeps what earlier starts have said."""

    def __init__(self) -> None:
        self.said: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.said[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.said[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.said for key in keys)


def start(store: Board, world: int, timeout_s: float = 20.0) -> list[tuple[str, list[Arrival]]]:
    with ThreadPoolExecutor(world) as ranks:
        return list(
            ranks.map(
                lambda rank: exchange_arrivals(
                    store, rank, world, Arrival("host", rank, f"a{world}"), timeout_s=timeout_s
                ),
                range(world),
            )
        )


def test_all_ranks_of_a_start_have_one_word_which_no_other_start_has():
    store, words = Board(), set()
    for world in (4, 3, 3, 2, 4, 1):
        told = start(store, world)
        assert len({word for word, _ in told}) == 1
        for _, arrivals in told:
            assert arrivals == [Arrival("host", rank, f"a{world}") for rank in range(world)]
        words.add(told[0][0])
    assert len(words) == 6


@pytest.mark.parametrize("rank, late", [(0, "1, 2"), (1, "0, 2")])
def test_who_does_not_come_is_named(rank, late):
    with raises(TrainingError, code="ranks-not-started", what=(late, 0)):
        exchange_arrivals(Board(), rank, 3, Arrival("host", rank, "agent"), timeout_s=0.2)


def test_what_an_earlier_start_said_is_not_taken_for_this_one():
    store = Board()
    start(store, 3)
    with raises(TrainingError, code="ranks-not-started"):
        exchange_arrivals(store, 1, 3, Arrival("host", 1, "agent"), timeout_s=0.2)


def test_an_output_is_of_the_run_whose_agents_are_there(tmp_path):
    assert not _has_same_agent(tmp_path, ["a", "b"])
    (tmp_path / run_files.AGENTS).write_text(json.dumps(["b", "c"]))
    assert _has_same_agent(tmp_path, ["a", "b"])
    assert not _has_same_agent(tmp_path, ["a", "d"])
    (tmp_path / run_files.AGENTS).write_text("{")
    assert not _has_same_agent(tmp_path, ["a", "b"])
    assert identify_agent() == identify_agent()


def cluster(*hosts: str) -> Cluster:
    return Cluster(
        classes=(DeviceClass(name="card", accelerator="cpu", memory_bytes=1),),
        devices=tuple(
            Device(id=f"d{n}", device_class="card", host=host) for n, host in enumerate(hosts)
        ),
    )


def place(*, rank: int, world: int, local_rank: int = 0, one_host: bool = False) -> TorchrunPlace:
    return TorchrunPlace(
        rank=rank,
        world=world,
        local_rank=local_rank,
        master_address="127.0.0.1",
        master_port=1,
        agent_has_store=True,
        elastic=False,
        one_host=one_host,
    )


def ids(devices: tuple[Device, ...]) -> list[str]:
    return [device.id for device in devices]


def test_fewer_ranks_have_the_devices_of_their_hosts():
    arrivals = [Arrival("b", 1, ""), Arrival("a", 0, ""), Arrival("b", 0, "")]
    assert ids(assign_devices(cluster("a", "a", "b", "b"), arrivals)) == ["d3", "d0", "d2"]


def test_as_many_ranks_too_whatever_the_order_of_their_hosts():
    """torch numbers hosts by addresses, of which 10.0.0.10 comes before 10.0.0.9."""
    hosts = cluster("a", "a", "b")
    arrivals = [Arrival("b", 0, "", "10.0.0.10"), Arrival("a", 0, ""), Arrival("a", 1, "")]
    assert ids(assign_devices(hosts, arrivals)) == ["d2", "d0", "d1"]
    runner = TorchrunRunner(place(rank=0, world=3))
    runner._arrived = ("word", arrivals)
    assert ids(runner.devices(runner.cluster(hosts))) == ["d2", "d0", "d1"]


def test_two_agents_of_one_host_have_all_of_its_devices():
    arrivals = [Arrival("a", 0, "one"), Arrival("a", 0, "two"), Arrival("a", 1, "two")]
    assert ids(assign_devices(cluster("a", "a", "a"), arrivals)) == ["d0", "d1", "d2"]


@pytest.mark.parametrize("named", ["a", "vm"])
def test_hosts_that_the_cluster_only_invents_have_its_devices_in_turn(named):
    """The host on which all of them are emulated may have the name of one."""
    arrivals = [Arrival(named, 0, ""), Arrival(named, 1, ""), Arrival(named, 2, "")]
    assert ids(assign_devices(cluster("a", "a", "b"), arrivals)) == ["d0", "d1", "d2"]


def test_who_asks_nobody_has_the_device_of_its_own_host():
    here = socket.gethostname()
    hosts = cluster("elsewhere", here, here)
    runner = TorchrunRunner(place(rank=1, world=3, local_rank=1))
    assert runner.own_device(hosts).id == "d2"
    alone = TorchrunRunner(place(rank=1, world=3, local_rank=1, one_host=True))
    assert alone.own_device(hosts).id == "d1"
    assert runner.own_device(cluster("x", "y", "z")).id == "d1"


def test_on_hosts_that_the_cluster_does_not_know_they_have_the_first_ones():
    arrivals = [Arrival("vm", 0, ""), Arrival("vm", 0, "")]
    assert ids(assign_devices(cluster("localhost", "localhost", "localhost"), arrivals)) == [
        "d0",
        "d1",
    ]


def test_a_rank_that_has_lost_its_device_takes_no_part():
    """The others of its host have those that are left, and the next rank speaks."""
    store, wanted = Board(), cluster("a", "a")
    owns = [None, *((device, wanted.classes[0]) for device in wanted.devices)]

    def met(rank: int) -> tuple[Cluster, tuple[Device | None, ...]]:
        return exchange_devices(store, place(rank=rank, world=3), owns[rank])

    with ThreadPoolExecutor(3) as ranks:
        for rank, (found, devices) in enumerate(ranks.map(met, range(3))):
            assert (found, devices) == (wanted, (None, *wanted.devices))
            runner = TorchrunRunner(place(rank=rank, world=3))
            runner._met, runner._connect_idle_store = devices, Board  # type: ignore[method-assign]
            assert runner.take_part(wanted, ()) is (rank > 0)
            assert runner.speaks is (rank == 1)
            assert runner.devices(wanted) == wanted.devices
            assert runner.take_part(wanted, {"d0"}) is runner.speaks is (rank == 2)


def test_a_host_with_more_ranks_than_devices_is_refused():
    with raises(InputError, code="cluster-rank-count", what=("a", 1)):
        assign_devices(cluster("a", "b", "b"), [Arrival("a", 0, ""), Arrival("a", 1, "")])
    with raises(InputError, code="cluster-rank-count", what=("a", 1)):
        uneven = [Arrival("a", 0, ""), Arrival("a", 1, ""), Arrival("b", 0, "")]
        assign_devices(cluster("a", "b", "b"), uneven)
