"""A complete check in this process: with its own child processes, or as a process of torchrun."""

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
from gpumix.check.facts.cluster import RankFacts, Survey
from gpumix.check.finding import Finding, has_error
from gpumix.check.judge import evaluate_survey
from gpumix.check.probes.probe import ProbeSettings, RankProbe
from gpumix.check.probes.requests import SLACK_S, RankClients
from gpumix.check.probes.worker import (
    KILLED_S,
    PRELOAD,
    STORE_PREFIX,
    ProbeFactory,
    TaskServer,
    next_task,
)
from gpumix.check.survey import HELLO_S, Say, Surveyor
from gpumix.engine.rank_group import STORE_ERRORS
from gpumix.hardware.discovery.discover import discover_cluster
from gpumix.hardware.host.environment import TorchrunPlace, torchrun_place
from gpumix.schema.cluster.cluster import Cluster, Device, DeviceClass
from gpumix.schema.errors import GpumixError
from gpumix.schema.job.job import Job
from gpumix.schema.reading.allowed_code import check_allowed
from gpumix.schema.reading.read import read_job
from gpumix.train.processes.local_launcher import RankAddress, loopback_store, warm_up
from gpumix.train.processes.runner import LocalRunner
from gpumix.train.processes.store import connect_store
from gpumix.train.processes.torchrun_runner import (
    NO_DEVICE,
    TorchrunRunner,
    discover_own_device,
    make_rank_address,
)
from gpumix.train.rank_setup.context import mask_paths

LIMIT_S = 50.0  # for a complete check, plus a few seconds for processes to end
MEET_S = 20.0  # limit for reaching the store
LATE_START_S = HELLO_S + SLACK_S  # margin for torchrun's rank 0 starting after other ranks


@dataclass(frozen=True)
class _CheckInputs:
    """Inputs of one process.

    Attributes:
        make: factory of the probe in ranks' processes.
    """

    job: Job | None
    folder: Path
    deadline: float
    make: ProbeFactory
    debug: bool

    def make_server(
        self, seat: RankAddress, device_class: DeviceClass, store: dist.Store
    ) -> TaskServer:
        """Return the attendant of a rank."""
        setting = ProbeSettings(device_class, self.job, self.folder, self.debug)
        hello = _make_rank_facts(seat, device_class, self.job)
        return TaskServer(seat, setting, store, hello=hello, make=self.make)


@dataclass(frozen=True)
class CheckOutcome:
    """The outcome of a check.

    Attributes:
        findings: None in processes other than the reporting process.
        failed: whether an error was found; equal in all processes.
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
    make: ProbeFactory = RankProbe,
    debug: bool = False,
) -> CheckOutcome:
    """Check the cluster of a job, or without a job the discovered devices.

    Args:
        allowed: code callable by the job; see `check_allowed`.
        leaving: closed after the outcome or an error is printed. torchrun ends all processes once a
            process exits with an error, so the other ranks leave only after `leaving` is closed.
        make: factory of the probe in ranks' processes.
        debug: whether processes print tracebacks.
    """
    deadline = time.monotonic() + LIMIT_S
    folder = Path.cwd() if path is None else path.absolute().parent

    def given() -> _CheckInputs:
        job = None if path is None else read_job(path, overrides)
        if job is not None and path is not None:
            check_allowed(job, path, allowed, overrides)
        return _CheckInputs(job, folder, deadline, make, debug)

    place = torchrun_place()
    if place is None:
        found = evaluate_survey(_survey_this_host(given(), say))
        return CheckOutcome(found, has_error(found))
    if place.rank == 0:
        return _run_first_rank(place, given, deadline, say, leaving)
    return CheckOutcome(None, _run_other_rank(place, given, deadline + LATE_START_S))


def _survey_this_host(given: _CheckInputs, say: Say) -> Survey:
    """Survey this host, with one attendant per device."""
    warm_up(preload=PRELOAD)
    job = given.job
    wanted = None if job is None or job.cluster == "auto" else job.cluster
    cluster = wanted or discover_cluster()
    devices = LocalRunner().devices(cluster)
    with loopback_store() as (store, port), ExitStack() as stack:
        for rank, device in enumerate(devices):
            seat = RankAddress(rank, len(devices), device, port)
            device_class = cluster.class_named(device.device_class)
            _start(stack, given.make_server(seat, device_class, store.clone()), given.deadline)
        crew = RankClients(store, len(devices), given.deadline)
        stack.callback(crew.dismiss, range(len(devices)), failed=False)
        return Surveyor(crew, job, say).survey()


def _run_first_rank(
    place: TorchrunPlace,
    read: Callable[[], _CheckInputs],
    deadline: float,
    say: Say,
    leaving: ExitStack,
) -> CheckOutcome:
    """Run torchrun's rank 0: serve its own rank and survey all ranks. The other ranks leave with
    rank 0's result, because torchrun waits minutes if one host fails and another does not."""
    store = connect_store(make_rank_address(place, NO_DEVICE), MEET_S)
    crew = RankClients(store, place.world, deadline)
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
        _start(
            stack, given.make_server(make_rank_address(place, device), device_class, own), deadline
        )
        stack.callback(crew.dismiss, [place.rank], failed=False)
        findings = evaluate_survey(Surveyor(crew, given.job, say).survey())
    failed = has_error(findings)
    return CheckOutcome(findings, failed)


def _run_other_rank(place: TorchrunPlace, read: Callable[[], _CheckInputs], until: float) -> bool:
    """Run another rank of torchrun; return True if the check failed. Rank 0 reports errors of this
    rank."""
    store = connect_store(make_rank_address(place, NO_DEVICE), MEET_S)
    words = dist.PrefixStore(f"{STORE_PREFIX}/{place.rank}", store)
    failed = True
    with suppress(*STORE_ERRORS):
        try:
            given = read()
            device, device_class = _device(place, given.job)
        except GpumixError as error:
            words.set("hello", _make_failed_facts(place.rank, error).model_dump_json())
            next_task(words, 0, until)  # the only task sent is the end task
        else:
            failed = given.make_server(make_rank_address(place, device), device_class, store).serve(
                until
            )
        words.set("gone", "{}")
    return failed


def _make_failed_facts(rank: int, error: GpumixError) -> RankFacts:
    trouble = f"{error.what}: {error.why}" if error.why else error.what
    host, version = socket.gethostname(), gpumix.__version__
    return RankFacts(rank=rank, host=host, gpumix=version, trouble=trouble, fix=error.fix)


def _start(stack: ExitStack, attendant: TaskServer, deadline: float) -> None:
    """Serve in a thread ending before the store closes."""
    thread = threading.Thread(
        target=attendant.serve, args=(deadline,), name="gpumix-check", daemon=True
    )
    thread.start()
    stack.callback(thread.join, KILLED_S)
    stack.callback(attendant.end)


def _device(place: TorchrunPlace, job: Job | None) -> tuple[Device, DeviceClass]:
    """Return the device of a torchrun process: named by the job, or discovered."""
    if job is None or not isinstance(job.cluster, Cluster):
        return discover_own_device(place)
    runner = TorchrunRunner(place)
    cluster = runner.cluster(job.cluster)
    device = runner.own_device(cluster)
    return device, cluster.class_named(device.device_class)


def _make_rank_facts(seat: RankAddress, device_class: DeviceClass, job: Job | None) -> RankFacts:
    """Return a rank's facts about itself and its device."""
    told = "" if job is None else json.dumps(mask_paths(job.model_dump()))
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
