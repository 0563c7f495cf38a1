"""Rank of a run started and restarted by torchrun, in this process.

torchrun's agents, one per host, end all ranks when a rank fails, a host is gone or another joins,
and start as many as there are places. So a run continues if an agent of the run that last used its
output is still there.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import socket
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic import ValidationError

from gpumix.engine.comm.heartbeat import ENDED, HEARTBEAT_INTERVAL_S, SilenceDetector
from gpumix.hardware.discovery.discover import discover_cluster
from gpumix.hardware.host.environment import (
    TorchrunPlace,
    check_rendezvous_variables,
    read_start_time,
    restart_process,
    torchrun_place,
)
from gpumix.schema.cluster.cluster import Cluster, Device, DeviceClass
from gpumix.schema.errors import (
    GpumixError,
    InputError,
    OutOfMemory,
    PlanOutdated,
    RankLost,
    StoreGone,
    TrainingError,
    convert_error,
    get_first_line,
)
from gpumix.schema.files import read_text, remove, write_text_atomically
from gpumix.train.elastic.recovery import Lessons, Restart
from gpumix.train.processes.local_launcher import RankAddress
from gpumix.train.processes.runner import LocalRunner, Runner
from gpumix.train.processes.stop_signals import StopRequest
from gpumix.train.processes.tcp_connections import find_own_address, listen_for_watchers
from gpumix.train.run_log import run_files
from gpumix.train.run_log.progress import mark_failed, read_last_failure, read_last_update
from gpumix.train.run_log.summary import Summary

if TYPE_CHECKING:
    import torch.distributed as dist

MEETING_S = 120.0  # how long ranks wait for each other to start
LOOK_S = 0.02
OUTCOME, ANEW = "outcome", "begin anew"  # for ranks left out
NO_DEVICE = Device(id="none", device_class="none")  # of processes only using the store


@dataclass(frozen=True)
class Arrival:
    """Announcement of a starting rank: host, local rank, agent, address from which it reaches the
    store, process, start of the process, and port at which the process is watched."""

    host: str
    local_rank: int
    agent: str
    address: str = ""
    process: int = 0
    begun: str = ""
    port: int = 0


class TorchrunRunner(Runner):
    """Runner in this process, as a rank of torchrun."""

    decides_alone = False

    def __init__(self, place: TorchrunPlace, silence_s: float = math.inf) -> None:
        StopRequest.pending_since = place.stop_asked_at
        self.speaks = place.rank == 0
        self._place = place
        self._silence_s = silence_s
        self._runs = 0
        self._output: Path | None = None
        self._met: tuple[Device | None, ...] = ()
        self._taking: list[int] = []  # ranks taking part
        self._no_device: InputError | None = None
        self._arrived: tuple[str, list[Arrival]] | None = None
        self._watched: socket.socket | None = None

    def cluster(self, wanted: Cluster | None) -> Cluster:
        if wanted is None:
            return self._meet()
        world = self._place.world
        if len(wanted.devices) > world and self._place.elastic:
            _, arrivals = self._arrive()
            self._met = found = assign_devices(wanted, arrivals)
            return wanted.only(device.id for device in found)
        if len(wanted.devices) != world:
            raise InputError(
                f"the cluster has {len(wanted.devices)} devices, torchrun started {world} "
                "processes",
                code="cluster-rank-count",
                fix="start one process per device",
            )
        return wanted

    def devices(self, cluster: Cluster) -> tuple[Device, ...]:
        """Return the devices of the ranks taking part. Collective, once."""
        if not self._taking:
            self.take_part(cluster, ())
        found = [self._met[rank] for rank in self._taking]
        return tuple(device for device in found if device is not None)

    def own_device(self, cluster: Cluster) -> Device:
        """Return this process's device, without communication."""
        place, found = self._place, self._met[self._place.rank] if self._met else None
        if found is None and not place.one_host:
            here = [d for d in cluster.in_rank_order() if d.host == socket.gethostname()]
            if place.local_rank < len(here):
                return here[place.local_rank]
        return found or cluster.in_rank_order()[place.rank]

    def started_again(self, output: Path, newest: Callable[[], int]) -> Lessons | None:
        """Return the lessons of a run that continues; None for a new run. Collective."""
        word, _ = self._arrive()
        store = self._store(f"{word}/again")
        if self.speaks:
            may_be = self._place.has_agent or self._place.starts > 0
            there = may_be and _has_same_agent(output, self._agents())
            store.set("again", _lessons(output).at(newest()).to_text() if there else "")
        told = _wait_for_key(store, "again", "rank 0")
        return Lessons.from_text(told) if told else None

    def take_part(self, cluster: Cluster, without: Collection[str]) -> bool:
        """Leave out devices; the first rank taking part speaks for the run from here on."""
        if not self._met:
            _, arrivals = self._arrive()
            self._met = assign_devices(cluster, arrivals)
        own = self._place.rank
        self._taking = [
            rank
            for rank, device in enumerate(self._met)
            if device is not None and device.id not in without
        ]
        self.speaks = self._taking[0] == own
        if self.speaks and len(self._taking) < self._place.world:
            from gpumix.engine.rank_group import HeartbeatThread

            # Ranks left out listen to the heartbeat.
            heart = HeartbeatThread(self._connect_idle_store(), 0, runs_ahead=False)
            atexit.register(heart.stop)
        return own in self._taking

    def outcome(self) -> Summary:
        from gpumix.engine.rank_group import STORE_ERRORS, beat_of, store_gone

        name = f"rank {self._place.rank}, which takes no part"
        try:
            store = self._connect_idle_store()
            pulse = SilenceDetector(lambda _: beat_of(store, 0), 1, self._silence_s)
            while not store.check([OUTCOME]):
                silent, ended = bool(pulse.silent()), beat_of(store, 0) == ENDED
                if silent or (ended and not store.check([OUTCOME])):
                    raise TrainingError(
                        "the run " + ("has failed" if ended else "is not heard any more"),
                        code="run-ended-elsewhere",
                        where=name,
                        fix="look at what the other ranks say",
                    )
                time.sleep(HEARTBEAT_INTERVAL_S)
            told = _get_if_set(store, OUTCOME)
        except STORE_ERRORS as error:
            raise store_gone(name, get_first_line(error)) from error
        if told == ANEW:
            self._begin_anew()
        return Summary(**json.loads(told))

    def tell_outcome(self, summary: Summary) -> None:
        self._send_to_idle_ranks(json.dumps(asdict(summary)))

    def _send_to_idle_ranks(self, outcome: str) -> None:
        if self.speaks and len(self._taking) < self._place.world:
            self._connect_idle_store().set(OUTCOME, outcome)

    def _connect_idle_store(self) -> dist.Store:
        """Return the store for ranks left out."""
        word, _ = self._arrive()
        return self._store(f"{word}/apart")

    def begins(self, output: Path, lessons: Lessons | None) -> None:
        self._output = output
        write_text_atomically(output / run_files.AGENTS, json.dumps(self._agents()))
        if lessons is None:
            remove(output / run_files.LESSONS)

    def restarts_after(self, error: GpumixError) -> bool:
        """Return True for errors ending no rank. After all other errors torchrun restarts ranks, if
        so configured."""
        return isinstance(error, OutOfMemory | PlanOutdated)

    def learns(self, output: Path, lessons: Lessons) -> None:
        """Save lessons, on every rank with any: the speaking rank may be the lost rank."""
        with suppress(OSError):  # on a host not sharing the run's folder
            write_text_atomically(output / run_files.LESSONS, lessons.to_text())

    def starts_again(self, output: Path, lessons: Lessons) -> None:
        """Restart all ranks in place, unnoticed by torchrun."""
        if self.speaks:
            write_text_atomically(output / run_files.LESSONS, lessons.to_text())
        self._send_to_idle_ranks(ANEW)
        self._begin_anew()

    def _begin_anew(self) -> NoReturn:
        from gpumix.train.processes.store import leave_store

        starts = self._place.starts + 1
        leave_store(make_rank_address(self._place, NO_DEVICE), starts)
        restart_process(starts, StopRequest.pending_since)

    def run(
        self, work: Callable[..., Any], cluster: Cluster, *args: Any, saves: bool = False
    ) -> Any:
        from gpumix.train.processes.torchrun_watchdog import TorchrunWatchdog

        self._runs += 1
        word, arrivals = self._arrive()
        devices = self.devices(cluster)
        if self._no_device is not None:
            raise self._no_device
        rank = self._taking.index(self._place.rank)
        seat = replace(
            make_rank_address(self._place, devices[rank]),
            rank=rank,
            world=len(devices),
            run=f"{word}/run{self._runs}",
        )
        there = [arrivals[rank] for rank in self._taking]
        try:
            with TorchrunWatchdog(seat, there, devices, self._record_failure):
                return work(seat, *args)
        except StoreGone as error:
            raise self._blame_store_owner(error) from error

    def _blame_store_owner(self, error: StoreGone) -> TrainingError:
        """Return the rank lost with the store, if a rank had the store."""
        first = self._met[0]
        if self._place.agent_has_store or first is None:
            return error
        return convert_error(
            error,
            RankLost,
            what=f"{error.what}: rank 0 (device '{first.id}')",
            device=first.id,
            device_class=first.device_class,
        )

    def _record_failure(self, error: GpumixError) -> None:
        if self.speaks and self._output is not None:
            mark_failed(self._output, get_first_line(error))

    def _meet(self) -> Cluster:
        """Return the cluster of the devices found by all ranks, in the order of ranks."""
        own: tuple[Device, DeviceClass] | None = None
        try:
            own = discover_own_device(self._place)
        except InputError as error:
            if not self._place.restarted:
                raise
            self._no_device = error  # it had a device before the restart
        word, _ = self._arrive()
        store = self._store(f"{word}/devices")
        cluster, self._met = exchange_devices(store, self._place, own)
        return cluster

    def _arrive(self) -> tuple[str, list[Arrival]]:
        """Return the word of this start, and all arrivals. Collective, once."""
        if self._arrived is None:
            if self._place.starts:
                self._meet_anew()
            store, place = self._store("arrivals"), self._place
            address = find_own_address(place.master_address, place.master_port) or ""
            process = os.getpid()
            self._watched = listen_for_watchers(address) if address else None
            own = Arrival(
                host=socket.gethostname(),
                local_rank=place.local_rank,
                agent=identify_agent(),
                address=address,
                process=process,
                begun=read_start_time(process),
                port=self._watched.getsockname()[1] if self._watched else 0,
            )
            self._arrived = exchange_arrivals(store, place.rank, place.world, own)
            from gpumix.engine.comm.init_distributed import warn_of_open_agents

            warn_of_open_agents()
        return self._arrived

    def _meet_anew(self) -> None:
        from gpumix.train.processes.store import wait_for_restarted_store

        wait_for_restarted_store(
            make_rank_address(self._place, NO_DEVICE), self._place.starts, MEETING_S
        )

    def _agents(self) -> list[str]:
        _, arrivals = self._arrive()
        return sorted({arrival.agent for arrival in arrivals})

    def _store(self, prefix: str) -> dist.Store:
        from gpumix.train.processes.store import connect_store

        return connect_store(
            replace(make_rank_address(self._place, NO_DEVICE), run=prefix), MEETING_S
        )


def make_runner(
    *,
    debug: bool = False,
    imports: tuple[str, ...] = (),
    silence_s: float = math.inf,
    restarts: bool = False,
) -> Runner:
    """Return the runner for this process.

    Args:
        imports: modules imported by all ranks, maybe once for all.
        silence_s: a rank silent for this long is lost.
        restarts: ranks lost in training are started again.

    Raises:
        InputError: this process is one of several, and cannot find the others.
    """
    place = torchrun_place()
    if place is not None:
        return TorchrunRunner(place, silence_s)
    check_rendezvous_variables()
    return LocalRunner(debug, imports, silence_s, restarts)


def make_rank_address(place: TorchrunPlace, device: Device) -> RankAddress:
    """Return the seat of a process started by torchrun."""
    return RankAddress(
        rank=place.rank,
        world=place.world,
        device=device,
        port=place.master_port,
        host=place.master_address,
        holds_store=not place.agent_has_store and place.rank == 0,
        one_host=place.one_host,
    )


def discover_own_device(place: TorchrunPlace) -> tuple[Device, DeviceClass]:
    """Return the device of a process started by torchrun, from the devices of this host.

    Raises:
        InputError: there are more processes than devices.
    """
    mine = discover_cluster()
    if place.local_rank >= len(mine.devices):
        raise InputError(
            f"process {place.local_rank} of this host has no device of its own",
            code="process-without-device",
            where=socket.gethostname(),
            why=f"the host has {len(mine.devices)}",
            fix="give torchrun at most as many --nproc-per-node as the host has devices",
        )
    device = mine.devices[place.local_rank]
    return device, mine.class_named(device.device_class)


def exchange_devices(
    store: dist.Store, place: TorchrunPlace, own: tuple[Device, DeviceClass] | None
) -> tuple[Cluster, tuple[Device | None, ...]]:
    """Exchange devices; return the cluster, and the device of each rank, if any. Collective.

    Raises:
        InputError: two ranks share a device, or a class differs between ranks.
        TrainingError: a rank said nothing.
    """
    store.set(str(place.rank), json.dumps([value.model_dump() for value in own or ()]))
    told = [
        json.loads(_wait_for_key(store, str(rank), f"rank {rank}")) for rank in range(place.world)
    ]
    devices = tuple(Device(**one[0]) if one else None for one in told)
    # A class that differs between hosts (another driver, say) is there twice, and refused.
    classes = dict.fromkeys(DeviceClass(**one[1]) for one in told if one)
    found = tuple(device for device in devices if device is not None)
    try:
        return Cluster(classes=tuple(classes), devices=found), devices
    except ValidationError as error:
        raise InputError(
            f"the ranks' devices make no cluster: {error.errors()[0]['msg']}",
            code="devices-make-no-cluster",
            fix="start one process per device, each with a device of its own; several processes on "
            "one CPU need a `cluster` in the job with a device for each",
        ) from error


def exchange_arrivals(
    store: dist.Store, rank: int, world: int, own: Arrival, *, timeout_s: float = MEETING_S
) -> tuple[str, list[Arrival]]:
    """Return a word known only to the ranks of this start, and their arrivals. The store may have
    entries of earlier starts.

    Each rank publishes a word of its own. The first rank publishes the list of all whenever it
    changes; a rank finding its own entry there confirms, and the list is final once all have.

    Raises:
        TrainingError: ranks are missing; the message names them.
    """
    own_word = uuid.uuid4().hex
    mine = json.dumps([own_word, *astuple(own)])
    store.set(f"here/{rank}", mine)
    deadline = time.monotonic() + timeout_s
    others, repeated = range(1, world), ""
    while time.monotonic() < deadline:
        if rank == 0:
            told = [mine, *(_get_if_set(store, f"here/{other}") for other in others)]
            if all(told) and json.dumps(told) != repeated:
                repeated = json.dumps(told)
                store.set("all", repeated)
        else:
            told = json.loads(_get_if_set(store, "all") or "[]")
            if len(told) == world and told[rank] == mine:
                store.set(f"{_word(told[0])}/{rank}", "here")
        if len(told) == world and all(told) and told[rank] == mine:
            word = _word(told[0])
            if all(store.check([f"{word}/{other}"]) for other in others):
                return word, [Arrival(*json.loads(one)[1:]) for one in told]
        time.sleep(LOOK_S)
    late = [other for other in range(world) if other != rank and not store.check([f"here/{other}"])]
    raise TrainingError(
        f"rank(s) {', '.join(map(str, late)) or 'of an earlier start'} did not start within "
        f"{timeout_s:.0f} s",
        code="ranks-not-started",
        where=f"rank {rank} on {own.host}",
        fix="look at what torchrun says on their hosts",
    )


def _get_if_set(store: dist.Store, key: str) -> str:
    return str(store.get(key).decode()) if store.check([key]) else ""


def _word(told: str) -> str:
    return str(json.loads(told)[0])


def _wait_for_key(store: dist.Store, key: str, who: str) -> str:
    deadline = time.monotonic() + MEETING_S
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise TrainingError(
                f"{who} said nothing within {MEETING_S:.0f} s", code="first-rank-silent"
            )
        time.sleep(LOOK_S)
    return _get_if_set(store, key)


def identify_agent() -> str:
    """Identify the parent process: host, pid and start time, as pids are reused."""
    parent = os.getppid()
    return f"{socket.gethostname()}/{parent}/{read_start_time(parent)}"


def _lessons(output: Path) -> Lessons:
    """Return the lessons left by ranks of the last start; earlier lessons without the reason of the
    restart."""
    failed = read_last_failure(output) if _of_last_start(output, run_files.PROGRESS) else ""
    by_torchrun = Restart(failed, read_last_update(output) or time.time())
    with suppress(OSError, ValueError):
        found = Lessons.from_text(read_text(output / run_files.LESSONS))
        known = _of_last_start(output, run_files.LESSONS)
        return found if known else replace(found, restart=by_torchrun)
    return Lessons(by_torchrun)


def _of_last_start(output: Path, name: str) -> bool:
    """Return True if a file was written after the last start of the run."""
    with suppress(OSError):
        begun_at = (output / run_files.AGENTS).stat().st_mtime_ns
        return (output / name).stat().st_mtime_ns > begun_at
    return False


def _has_same_agent(output: Path, agents: Sequence[str]) -> bool:
    with suppress(OSError, ValueError, TypeError):
        noted = json.loads(read_text(output / run_files.AGENTS))
        return bool(set(noted) & set(agents))
    return False


def assign_devices(cluster: Cluster, arrivals: Sequence[Arrival]) -> tuple[Device, ...]:
    """Assign devices to ranks. If all ranks' hosts are in the cluster, by local rank on the host;
    with as many ranks as devices, all hosts must match. Otherwise in order.

    Raises:
        InputError: a host has more ranks than devices.
    """
    devices = cluster.in_rank_order()
    named, here = {device.host for device in devices}, {arrival.host for arrival in arrivals}
    if not here <= named or (len(arrivals) == len(devices) and here != named):
        return devices[: len(arrivals)]
    of_host = {host: [device for device in devices if device.host == host] for host in here}
    found: dict[int, Device] = {}
    for rank in sorted(range(len(arrivals)), key=lambda rank: (arrivals[rank].local_rank, rank)):
        host = arrivals[rank].host
        if not of_host[host]:
            there = sum(device.host == host for device in devices)
            raise InputError(
                f"host '{host}' has {there} devices in the cluster, and more processes",
                code="cluster-rank-count",
                fix="give torchrun at most as many --nproc-per-node as the host has devices",
            )
        found[rank] = of_host[host].pop(0)
    return tuple(found[rank] for rank in range(len(arrivals)))
