"""Runs systems in alternating rounds on one rank's emulated device, and times their steps.

A step ends when every device is done: a barrier separates steps, for all systems alike. A run
during which any device fell behind its speed is thrown away and repeated.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist

import gpumix
from emulated import systems
from emulated.setting import Setting
from emulated.systems import System
from gpumix.hardware.runtime import DeviceRuntime, open_device
from gpumix.spec.plan import Plan
from gpumix.spec.profile import Profile
from gpumix.train.launch import Seat

WARM_UP_STEPS = 1
TRIES = 4
TIMEOUT_S = 300.0
PROFILE_BUDGET_S = 30.0


@dataclass(frozen=True)
class Run:
    """One system in one round, as one rank saw it; losses and overruns are those of all ranks.

    Attributes:
        step_s: seconds of each step, those of the warm-up left out.
        losses: of all steps.
        overruns: in the measured steps, over all ranks.
        spoiled: runs before this one that were thrown away.
        cpu_share: this process's CPU time over wall-clock time in the measured steps.
    """

    system: str
    round: int
    step_s: tuple[float, ...]
    losses: tuple[float, ...]
    overruns: int
    spoiled: int
    peak_bytes: int | None
    cpu_share: float


@dataclass(frozen=True)
class Study:
    """What is measured: systems by name in every round, each device alone once."""

    setting: Setting
    systems: tuple[str, ...]
    rounds: int
    steps: int
    alone: bool = False
    early_stop: bool = True


@dataclass(frozen=True)
class Outcome:
    """What one rank brings home; `alone_step_s` is of its own device by itself."""

    runs: tuple[Run, ...]
    profile: Profile
    plan: Plan
    alone: Run | None


def work(seat: Seat, study: Study) -> Outcome:
    """One rank's part: profile once, plan, then all systems in every round."""
    with joined(seat):
        profile = profile_of(study.setting)
        plan = gpumix.plan(profile, study.setting.global_batch)
        bench = _Bench(seat.rank, study, plan)
        alone = bench.repeated("alone", 0) if study.alone else None
        runs = []
        for number in range(study.rounds):
            shift = number % len(study.systems)
            for name in (*study.systems[shift:], *study.systems[:shift]):
                runs.append(bench.repeated(name, number))
        return Outcome(tuple(runs), profile, plan, alone)


@contextmanager
def joined(seat: Seat) -> Iterator[None]:
    """The default process group of all ranks."""
    limit = timedelta(seconds=TIMEOUT_S)
    store = dist.TCPStore(
        seat.host, seat.port, is_master=False, wait_for_workers=False, timeout=limit
    )
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(seat.run, store),
        rank=seat.rank,
        world_size=seat.world,
        timeout=limit,
    )
    yield
    dist.destroy_process_group()


def profile_of(setting: Setting) -> Profile:
    """Measure the model on these devices, as a user's own program does. Collective."""
    return gpumix.profile(
        setting.build,
        lambda samples: setting.rows(0, samples),
        sequence_length=setting.sequence,
        global_batch=setting.global_batch,
        cluster=setting.cluster,
        budget_s=PROFILE_BUDGET_S,
        progress=lambda line: None,
    )


class _Bench:
    """One rank's device and what runs on it."""

    def __init__(self, rank: int, study: Study, plan: Plan) -> None:
        self.rank = rank
        self.study = study
        self.plan = plan

    def repeated(self, name: str, number: int) -> Run:
        """The first run without overruns; the last one if all had some."""
        for spoiled in range(TRIES):
            run = self._run(name, number, spoiled)
            self._tell(run)
            if run.overruns == 0:
                break
        return run

    def _run(self, name: str, number: int, spoiled: int) -> Run:
        setting, steps = self.study.setting, self.study.steps
        gc.collect()
        with open_device(setting.class_of(self.rank), 0) as runtime:
            runtime.reset_peak()
            system = self._system(name, runtime)
            barrier = (lambda: None) if name == "alone" else dist.barrier
            timed = [
                _timed_step(system, setting.batch(step, system.samples, self.rank), runtime, barrier)
                for step in range(WARM_UP_STEPS)
            ]
            before, cpu, wall = runtime.overruns, time.process_time(), time.perf_counter()
            timed += [
                _timed_step(system, setting.batch(step, system.samples, self.rank), runtime, barrier)
                for step in range(WARM_UP_STEPS, WARM_UP_STEPS + steps)
            ]
            cpu_share = (time.process_time() - cpu) / (time.perf_counter() - wall)
            overruns, peak = runtime.overruns - before, runtime.peak_bytes()
            del system
        dist.barrier()
        return Run(
            system=name,
            round=number,
            step_s=tuple(seconds for seconds, _ in timed[WARM_UP_STEPS:]),
            losses=tuple(_summed([loss for _, loss in timed])),
            overruns=int(_summed([overruns])[0]),
            spoiled=spoiled,
            peak_bytes=peak,
            cpu_share=cpu_share,
        )

    def _system(self, name: str, runtime: DeviceRuntime) -> System:
        setting, early_stop = self.study.setting, self.study.early_stop
        if name == "ddp even":
            return systems.ddp(setting, runtime, early_stop=early_stop)
        if name == "fsdp2 even":
            model = setting.build()
            return systems.fsdp(model, setting, setting.even(), early_stop=early_stop)
        if name == "fsdp2 proportional":
            model = setting.build()
            return systems.fsdp(model, setting, setting.proportional(), early_stop=early_stop)
        if name == "gpumix":
            return systems.Gpumix(setting.build(), self.plan)
        if name == "alone":
            return systems.alone(setting, self.rank, early_stop=early_stop)
        raise ValueError(f"there is no system '{name}'")

    def _tell(self, run: Run) -> None:
        if self.rank == 0:
            line = f"round {run.round + 1}, {run.system}: {median(run.step_s):.3f} s a step"
            if run.overruns:
                line += f", spoiled by {run.overruns} overruns"
            print(line, file=sys.stderr, flush=True)


def _timed_step(
    system: System,
    batch: systems.Batch,
    runtime: DeviceRuntime,
    barrier: Callable[[], object],
) -> tuple[float, float]:
    """Seconds from a standing start until every device is done, and this rank's part of the loss."""
    barrier()
    runtime.idle()
    begun = time.perf_counter()
    loss = system.step(batch).item()
    runtime.synchronize()
    barrier()
    return time.perf_counter() - begun, loss


def _summed(values: Sequence[float]) -> list[float]:
    """Each value summed over ranks."""
    table = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(table)
    return table.tolist()
