"""A check from its beginning to its end, in this process: by its own processes, or as one of
torchrun's."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

import gpumix
from gpumix.check.attend import KEYS, KILLED_S, PRELOAD, Attendant, Maker, next_task
from gpumix.check.crew import SLACK_S, Crew
from gpumix.check.facts import RankFacts, Survey
from gpumix.check.finding import Finding, has_error
from gpumix.check.judge import judge
from gpumix.check.probe import Probe, Setting
from gpumix.check.survey import HELLO_S, Say, Surveyor
from gpumix.engine.ranks import STORE_ERRORS
from gpumix.hardware.discover import discover
from gpumix.hardware.environment import TorchrunPlace, torchrun_place
from gpumix.spec.allowed import check_allowed
from gpumix.spec.cluster import Cluster, Device, DeviceClass
from gpumix.spec.errors import GpumixError
from gpumix.spec.job import Job
from gpumix.spec.read import read_job
from gpumix.train.context import without_paths
from gpumix.train.launch import Seat, loopback_store, warm_up
from gpumix.train.rendezvous import store_of
from gpumix.train.runner import LocalRunner
from gpumix.train.torchrun import NO_DEVICE, TorchrunRunner, own_device, seat_in

LIMIT_S = 50.0  # for all of it, with some seconds for processes to end
MEET_S = 20.0  # to reach the store
BEGUN_LATER_S = HELLO_S + SLACK_S  # that the first of torchrun's processes may begin after others


@dataclass(frozen=True)
class _Given:
    """What one process is given.

    Attributes:
        make: what the ranks' processes run.
    """

    job: Job | None
    folder: Path
    deadline: float
    make: Maker
    debug: bool

    def attendant(self, seat: Seat, device_class: DeviceClass, store: dist.Store) -> Attendant:
        """Of a rank."""
        setting = Setting(device_class, self.job, self.folder, self.debug)
        hello = _hello(seat, device_class, self.job)
        return Attendant(seat, setting, store, hello=hello, make=self.make)


@dataclass(frozen=True)
class Outcome:
    """What a check came to.

    Attributes:
        findings: None in processes that another one speaks for.
        failed: whether there is an error, the same in all processes.
    """

    findings: list[Finding] | None
    failed: bool


def check(
    path: Path | None,
    overrides: Sequence[str],
    *,
    allowed: Sequence[str],
    say: Say,
    leaving: ExitStack,
    make: Maker = Probe,
    debug: bool = False,
) -> Outcome:
    """What is wrong with the cluster that a job would run on, or with what is found without one.

    Args:
        allowed: code that the job may call; see `check_allowed`.
        leaving: closed when the outcome, or an error, has been told: torchrun ends all processes
            once one of them leaves with an error, and others leave not before this.
        make: what the ranks' processes run.
        debug: whether they print tracebacks.
    """
    deadline = time.monotonic() + LIMIT_S
    folder = Path.cwd() if path is None else path.absolute().parent

    def given() -> _Given:
        job = None if path is None else read_job(path, overrides)
        if job is not None and path is not None:
            check_allowed(job, path, allowed, overrides)
        return _Given(job, folder, deadline, make, debug)

    place = torchrun_place()
    if place is None:
        found = judge(_alone(given(), say))
        return Outcome(found, has_error(found))
    if place.rank == 0:
        return _speaker(place, given, deadline, say, leaving)
    return Outcome(None, _attend(place, given, deadline + BEGUN_LATER_S))


def _alone(given: _Given, say: Say) -> Survey:
    """On this host: an attendant for each device."""
    warm_up(preload=PRELOAD)
    job = given.job
    wanted = None if job is None or job.cluster == "auto" else job.cluster
    cluster = wanted or discover()
    devices = LocalRunner().devices(cluster)
    with loopback_store() as (store, port), ExitStack() as stack:
        for rank, device in enumerate(devices):
            seat = Seat(rank, len(devices), device, port)
            device_class = cluster.class_named(device.device_class)
            _start(stack, given.attendant(seat, device_class, store.clone()), given.deadline)
        crew = Crew(store, len(devices), given.deadline)
        stack.callback(crew.dismiss, range(len(devices)), failed=False)
        return Surveyor(crew, job, say).survey()


def _speaker(
    place: TorchrunPlace, read: Callable[[], _Given], deadline: float, say: Say, leaving: ExitStack
) -> Outcome:
    """The first of torchrun's processes: attends its own rank, and asks all. The others leave as
    it does: torchrun would wait for minutes where one host fails and another does not."""
    store = store_of(seat_in(place, NO_DEVICE), MEET_S)
    crew = Crew(store, place.world, deadline)
    failed = True

    def leave() -> None:
        others = range(1, place.world)
        crew.dismiss(others, failed=failed)
        crew.wait_for_ends(rank for rank in others if rank not in crew.lost)

    leaving.callback(leave)
    with ExitStack() as stack:
        given = read()
        device, device_class = _device(place, given.job)
        own = store.clone()  # type: ignore[attr-defined]
        _start(stack, given.attendant(seat_in(place, device), device_class, own), deadline)
        stack.callback(crew.dismiss, [place.rank], failed=False)
        findings = judge(Surveyor(crew, given.job, say).survey())
    failed = has_error(findings)
    return Outcome(findings, failed)


def _attend(place: TorchrunPlace, read: Callable[[], _Given], until: float) -> bool:
    """Another of torchrun's processes; whether the check failed. What is wrong with this one the
    first one tells."""
    store = store_of(seat_in(place, NO_DEVICE), MEET_S)
    words = dist.PrefixStore(f"{KEYS}/{place.rank}", store)
    failed = True
    with suppress(*STORE_ERRORS):
        try:
            given = read()
            device, device_class = _device(place, given.job)
        except GpumixError as error:
            words.set("hello", _in_trouble(place.rank, error).model_dump_json())
            next_task(words, 0, until)  # nothing is asked of it but to leave
        else:
            failed = given.attendant(seat_in(place, device), device_class, store).serve(until)
        words.set("gone", "{}")
    return failed


def _in_trouble(rank: int, error: GpumixError) -> RankFacts:
    why = f": {error.why}" if error.why else ""
    host = socket.gethostname()
    version = gpumix.__version__
    return RankFacts(
        rank=rank, host=host, gpumix=version, trouble=f"{error.what}{why}", fix=error.fix
    )


def _start(stack: ExitStack, attendant: Attendant, deadline: float) -> None:
    """In a thread, which ends before the store does."""
    thread = threading.Thread(
        target=attendant.serve, args=(deadline,), name="gpumix-check", daemon=True
    )
    thread.start()
    stack.callback(thread.join, KILLED_S)
    stack.callback(attendant.end)


def _device(place: TorchrunPlace, job: Job | None) -> tuple[Device, DeviceClass]:
    """The device of a process of torchrun's: that which the job names, or which is found."""
    if job is None or not isinstance(job.cluster, Cluster):
        return own_device(place)
    runner = TorchrunRunner(place)
    cluster = runner.cluster(job.cluster)
    device = runner.own_device(cluster)
    return device, cluster.class_named(device.device_class)


def _hello(seat: Seat, device_class: DeviceClass, job: Job | None) -> RankFacts:
    """What a rank says of itself and its device."""
    told = "" if job is None else json.dumps(without_paths(job.model_dump()))
    host = seat.device.host
    return RankFacts(
        rank=seat.rank,
        host=socket.gethostname() if host == "localhost" else host,
        device=seat.device.id,
        device_class=device_class.name,
        accelerator=device_class.accelerator,
        product=device_class.product,
        capability=device_class.compute_capability,
        emulated=device_class.emulated,
        memory_bytes=device_class.memory_bytes if device_class.emulated else 0,
        gpumix=gpumix.__version__,
        job=hashlib.sha256(told.encode()).hexdigest()[:12],
    )
