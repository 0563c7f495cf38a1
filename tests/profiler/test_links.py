"""What links cost: measured between the ranks that will run, and the fastest forms chosen."""

from __future__ import annotations

import time
from itertools import combinations, pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gpumix
from gpumix.engine.comm.communicator import Communicator
from gpumix.profiler import network
from gpumix.profiler.network import (
    PRODUCT_S,
    find_tensor_parallel_ranks,
    measure_links,
    product_rows,
)
from gpumix.schema.cluster.cluster import Cluster, Device, DeviceClass
from gpumix.schema.cluster.link_islands import add_found_islands
from gpumix.schema.plan.plan import Collectives
from gpumix.schema.profile.profile import Profile
from helpers.devices.sweeps import ROWS, some_batch
from helpers.extended import every_second
from helpers.processes.harness import run_ranks
from helpers.training.models import WIDTH, Regression
from helpers.virtual_clock import VirtualClock

KIB = 1024
# gloo has one form of each that takes unequal shares.
ON_GLOO = Collectives(gather="broadcast", reduce="all_to_all")


def all_ranks(kind: type[Communicator] = Communicator) -> Communicator:
    return kind(dist.group.WORLD, rank=dist.get_rank(), world=dist.get_world_size())


def curves(found):
    return {(of.operation, of.form): of.times for of in found.network}


# -- on ranks --------------------------------------------------------------------------------------


class Recorded(Communicator):
    """Keeps the cuts of the buffers that it gathers and reduces."""

    log: list[tuple[str, tuple[int, ...]]]

    def gather(self, full, shard, intervals, label):
        self.log.append(("gather", intervals.offsets))
        return super().gather(full, shard, intervals, label)

    def reduce(self, full, intervals, label, deliver):
        self.log.append(("reduce", intervals.offsets))
        return super().reduce(full, intervals, label, deliver)


def measured(largest_bytes):
    """On a rank: what was measured, and the collectives that ran for it."""
    Recorded.log = []
    comm = all_ranks(Recorded)
    found = measure_links(comm, largest_bytes=largest_bytes, progress=lambda line: None)
    return found, Recorded.log


@pytest.mark.parametrize("world", every_second([3, 2]))
def test_all_ranks_measure_every_size_together(world):
    (first, log), *others = run_ranks(measured, world, 300 * KIB)
    for other, its_log in others:
        own_clock = {"seconds_spent": first.seconds_spent}
        assert other.model_copy(update=own_clock) == first
        assert its_log == log
    assert first.collectives == ON_GLOO
    forms = {("gather", "broadcast"), ("reduce", "all_to_all")}
    forms |= {("send", "native"), ("sum", "native")}
    assert set(curves(first)) == forms
    for times in curves(first).values():
        assert times.sizes == (64 * KIB, 300 * KIB)
        assert min(times.values) > 0
    assert first.step_overhead_s > 0


@pytest.mark.parametrize("world", every_second([3, 2]))
def test_each_size_is_sent_several_times_in_unequal_shares(world):
    _, log = run_ranks(measured, world, 300 * KIB)[0]
    sent = [(operation, offsets[-1] * 4) for operation, offsets in log]
    for operation in ("gather", "reduce"):
        for size in (64 * KIB, 300 * KIB):
            near = [b for o, b in sent if o == operation and size <= b < size + 4 * world]
            assert len(near) == 1 + network.REPEATS
    for _, offsets in log:
        shares = [b - a for a, b in pairwise(offsets)]
        assert len(shares) == world
        assert 1 <= max(shares) - min(shares) <= 2


def sizes_up_to(*largest):
    found = [measured(largest_bytes)[0] for largest_bytes in largest]
    return [curves(links)["reduce", "all_to_all"].sizes for links in found]


@pytest.mark.extended
def test_sizes_grow_eightfold_and_end_with_the_largest():
    assert run_ranks(sizes_up_to, 2, 1, 100 * KIB, 128 * KIB, 600 * KIB, 2048 * KIB)[0] == [
        (64 * KIB,),
        (100 * KIB,),
        (64 * KIB, 128 * KIB),
        (64 * KIB, 600 * KIB),  # 512 is too near
        (64 * KIB, 512 * KIB, 2048 * KIB),
    ]


def agreed_s(seconds):
    """On a rank, whose runs take `seconds[rank]`, in turn."""
    clock, left = VirtualClock(), iter(seconds[dist.get_rank()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "time", SimpleNamespace(perf_counter=clock))
        found = network._time_slowest_rank(all_ranks(), lambda: clock.spend(next(left)))
    assert not list(left)
    return found


def test_the_median_of_the_slowest_rank_counts_without_the_first_run():
    seconds = [(90, 1, 1, 1, 1, 1), (0, 2, 80, 3, 4, 5), (90, 9, 3, 3, 3, 9)]
    assert run_ranks(agreed_s, 3, seconds) == pytest.approx([4.0] * 3)


def test_a_single_device_has_no_links():
    found = measure_links(
        Communicator(None, rank=0, world=1), largest_bytes=2**20, progress=pytest.fail
    )
    assert (found.network, found.step_overhead_s) == ((), 0)


# -- up to which size ------------------------------------------------------------------------------

BLOCK_BYTES = 2 * WIDTH * 2048 * 4


def wide_model():
    def block():
        into, out = nn.Linear(WIDTH, 2048, bias=False), nn.Linear(2048, WIDTH, bias=False)
        return nn.Sequential(into, nn.GELU(), out)

    return Regression([block() for _ in range(2)])


def profile(cluster) -> Profile:
    return gpumix.profile(
        wide_model,
        some_batch,
        sequence_length=ROWS,
        global_batch_size=2,
        cluster=cluster,
        progress=lambda line: None,
    )


@pytest.mark.parametrize(
    ("smallest", "largest_buffer"),
    every_second([(32 * BLOCK_BYTES, BLOCK_BYTES), (6 * BLOCK_BYTES, 6 * BLOCK_BYTES // 8)]),
    ids=["the largest unit", "an eighth of the smallest device"],
)
def test_links_are_measured_up_to_the_largest_buffer(smallest, largest_buffer):
    classes = (
        DeviceClass(name="big", accelerator="cpu", memory_bytes=64 * BLOCK_BYTES),
        DeviceClass(name="small", accelerator="cpu", memory_bytes=smallest),
    )
    devices = tuple(Device(id=f"{c.name}-0", device_class=c.name) for c in classes)
    first, second = run_ranks(profile, 2, Cluster(classes=classes, devices=devices))
    assert first.network == second.network
    for times in curves(first).values():
        assert times.sizes[-1] == largest_buffer


# -- the choice ------------------------------------------------------------------------------------


def linear(latency_s, bytes_per_s):
    return lambda size: latency_s + size / bytes_per_s


# Of NCCL: one form is better below a MB, another above; `native` takes equal shares only.
NIMBLE, STRONG, NATIVE = linear(1e-5, 1e9), linear(1e-3, 9e9), linear(0, 1e12)
GATHERS = {"list": NIMBLE, "broadcast": STRONG, "native": NATIVE}
REDUCES = {"list": STRONG, "all_to_all": NIMBLE, "native": NATIVE}
MESSAGE, SUM = linear(2e-5, 5e9), linear(3e-5, 7e9)


@pytest.fixture
def nccl(monkeypatch):
    """Two ranks whose collectives take what the tables say."""
    monkeypatch.setattr(network, "_gather_s", lambda comm, form, size: GATHERS[form](size))
    monkeypatch.setattr(network, "_reduce_s", lambda comm, form, size: REDUCES[form](size))
    monkeypatch.setattr(network, "_time_small_all_reduce", lambda comm: 3e-5)
    monkeypatch.setattr(network, "time_message", lambda line, size, agree: MESSAGE(size))
    monkeypatch.setattr(network, "_sum_s", lambda comm, size, agree: SUM(size))
    return SimpleNamespace(world=2, on_gloo=False, among=lambda ranks: None)


@pytest.mark.parametrize(
    ("largest", "best"),
    [
        (256 * KIB, Collectives(gather="list", reduce="all_to_all")),
        (8192 * KIB, Collectives(gather="broadcast", reduce="list")),
    ],
)
def test_the_form_that_is_fastest_for_the_largest_buffer_is_chosen(nccl, largest, best):
    """Not `native`, which equal shares use in any case."""
    told = []
    found = measure_links(nccl, largest_bytes=largest, progress=told.append)
    assert found.collectives == best
    assert told[0].startswith(f"all-gather by {best.gather}: ")
    assert told[1].startswith(f"reduction by {best.reduce}: ")


def test_all_forms_are_told_to_the_planner(nccl):
    found = measure_links(nccl, largest_bytes=4096 * KIB, progress=lambda line: None)
    wanted = {("gather", form): seconds for form, seconds in GATHERS.items()}
    wanted |= {("reduce", form): seconds for form, seconds in REDUCES.items()}
    wanted |= {("send", "native"): MESSAGE, ("sum", "native"): SUM}
    assert curves(found).keys() == wanted.keys()
    for key, times in curves(found).items():
        assert times.sizes == (64 * KIB, 512 * KIB, 4096 * KIB)
        assert times.values == tuple(map(wanted[key], times.sizes))
    assert found.step_overhead_s == pytest.approx(6e-5)  # losses, and the gradient norm


# -- links between each two ------------------------------------------------------------------------

SLOW_S = 0.08  # of each message from an island, or a rack, to another


class OfIslands(Communicator):
    """Messages between even and odd ranks take long, beside those of whole buffers."""

    def exchange_parts(self, sent, send_splits, receive_splits, label, *, into=None):
        partners = [n for n, size in enumerate((*send_splits, *receive_splits)) if size]
        if any((partner % self.world - self.rank) % 2 for partner in partners):
            time.sleep(SLOW_S)
        return super().exchange_parts(sent, send_splits, receive_splits, label, into=into)


def measured_pairs(hosts):
    """On a rank: what was measured where even ranks are near to each other, and odd ones."""
    return measure_links(
        all_ranks(OfIslands),
        largest_bytes=300 * KIB,
        progress=lambda line: None,
        devices=places(hosts),
        each_two=True,
        degrees={"card": (2,)},
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "what"), every_second([(["a"] * 4, "island"), (["a", "b", "c", "d"], "rack")])
)
def test_islands_and_racks_are_found_in_messages_between_each_two(hosts, what):
    """Listed in turn; and collectives inside of them are timed."""
    first, *others = run_ranks(measured_pairs, 4, hosts)
    assert all(other.pairs == first.pairs for other in others)
    assert {(p.one, p.other) for p in first.pairs} == set(combinations(range(4), 2))
    assert {p.times.sizes for p in first.pairs} == {(64 * KIB, 300 * KIB)}
    assert {d.id: getattr(d, what) for d in add_found_islands(places(hosts), first.pairs)} == {
        "d0": "0",
        "d1": "1",
        "d2": "0",
        "d3": "1",
    }
    near = {(t.operation, t.form) for t in first.network if t.group == what}
    forms = {("gather", "broadcast"), ("reduce", "all_to_all")}
    assert near == {*forms, ("gather", "native"), ("reduce", "native"), ("sum", "native")}


def test_tp_groups_are_timed_inside_an_island():
    devices = [d.model_copy(update={"island": str(n % 2)}) for n, d in enumerate(places(["a"] * 4))]
    assert find_tensor_parallel_ranks(devices, {"card": (2, 4)}) == {2: (0, 2)}


@pytest.mark.extended
@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "b"], ["a", "a", "b", "b"]])
def test_of_two_only_there_is_one_link(hosts):
    for found in run_ranks(measured_pairs, len(hosts), hosts):
        assert found.pairs == ()


# -- hosts, and computing at the same time ---------------------------------------------------------


def places(hosts, device_class="card"):
    return [Device(id=f"d{n}", device_class=device_class, host=h) for n, h in enumerate(hosts)]


def measured_on_hosts(hosts):
    """On a rank: what was measured where ranks stand on these hosts."""
    found = measure_links(
        all_ranks(), largest_bytes=300 * KIB, progress=lambda line: None, devices=places(hosts)
    )
    return {(of.operation, of.form, of.group) for of in found.network}


@pytest.mark.parametrize("hosts", every_second([["a", "b", "a"], ["a", "a", "b", "b"]]))
def test_links_inside_and_between_hosts_are_timed_apart(hosts):
    for found in run_ranks(measured_on_hosts, len(hosts), hosts):
        assert {("gather", "native", "inside"), ("reduce", "native", "inside")} < found
        assert {("sum", "native", "inside"), ("sum", "native", "all")} < found
        assert ("reduce", "native", "across") in found
        messages = {group for operation, _, group in found if operation == "send"}
        assert messages == {"inside", "across"}


@pytest.mark.parametrize(("hosts", "where"), [(["a", "a"], "inside"), (["a", "b"], "across")])
def test_one_host_or_one_device_each_has_nothing_to_tell_apart(hosts, where):
    for found in run_ranks(measured_on_hosts, len(hosts), hosts):
        assert {group for operation, _, group in found if operation != "send"} == {"all"}
        assert {group for operation, _, group in found if operation == "send"} == {where}


@pytest.mark.parametrize(
    ("flops_per_s", "started_s", "rows"),
    [(2e10, 1e-6, 192), (8e12, 1e-5, 1536), (5e13, 1e-5, 3072), (1e18, 1e-5, 4096)],
    ids=["one core", "a small GPU", "an H100", "beyond all"],
)
def test_contention_is_measured_by_a_product_that_keeps_the_device_busy(
    flops_per_s, started_s, rows
):
    def time_product(rows):
        return started_s + 2 * rows**3 / flops_per_s

    assert product_rows(time_product) == rows
    assert time_product(rows) >= PRODUCT_S or rows == 4096


def test_contention_is_measured_by_the_largest_product_with_room():
    def time_product(rows):
        if rows > 768:
            raise torch.OutOfMemoryError("no room")
        return 1e-6

    assert product_rows(time_product) == 768


def test_other_errors_of_a_product_are_raised():
    def time_product(rows):
        raise RuntimeError("no kernel")

    with pytest.raises(RuntimeError, match="no kernel"):
        product_rows(time_product)


def contention_measured(world):
    def synchronize():
        return None

    return measure_links(
        all_ranks(), largest_bytes=300 * KIB, progress=lambda line: None, synchronize=synchronize
    ).contention


def test_contention_is_a_part_and_the_same_on_all_ranks():
    first, second = run_ranks(contention_measured, 2, 2)
    assert first == second
    assert 0.0 <= first <= 1.0
