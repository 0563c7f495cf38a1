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
from dataclasses import dataclass, replace
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist

import gpumix
from emulated import systems
from emulated.setting import Setting
from emulated.systems import System
from gpumix.hardware.device import DeviceRuntime, open_device
from gpumix.spec.plan import Plan
from gpumix.spec.profile import Profile
from gpumix.train.launch import Seat

GPUMIX = "gpumix"
ALONE = "alone"
DDP_EVEN = "DDP even"
FSDP_EVEN = "FSDP2 even"
FSDP_PROPORTIONAL = "FSDP2 proportional"
FSDP_KEEPS = "FSDP2 even, no recompute"

WARM_UP_STEPS = 1
TRIES = 3
TIMEOUT_S = 300.0
PROFILE_BUDGET_S = 30.0


@dataclass(frozen=True)
class Run:
    """One system in one round, as one rank saw it; losses and overruns are those of all ranks.

    Attributes:
        step_s: seconds of each step, those of the warm-up left out.
        losses: of all steps.
        overruns: in the measured steps, over all ranks.
        cpu_share: this process's CPU time over wall-clock time in the measured steps.
        spoiled: other runs that were thrown away.
    """

    system: str
    round: int
    step_s: tuple[float, ...]
    losses: tuple[float, ...]
    overruns: int
    peak_bytes: int | None
    cpu_share: float
    spoiled: int = 0


@dataclass(frozen=True)
class Study:
    """What is measured: systems by name in every round, each device alone once."""

    setting: Setting
    systems: tuple[str, ...]
    rounds: int
    steps: int
    alone: bool = False


@dataclass(frozen=True)
class Outcome:
    """What one rank brings home."""

    runs: tuple[Run, ...]
    profile: Profile
    plan: Plan


def work(seat: Seat, study: Study) -> Outcome:
    """One rank's part: profile once, plan, then all systems in every round."""
    with joined(seat):
        profile = profile_of(study.setting)
        plan = gpumix.plan(profile, study.setting.global_batch)
        bench = Bench(seat.rank, study, plan)
        runs = [bench.repeated(ALONE, 0)] if study.alone else []
        for number in range(study.rounds):
            shift = number % len(study.systems)
            for name in (*study.systems[shift:], *study.systems[:shift]):
                runs.append(bench.repeated(name, number))
        return Outcome(tuple(runs), profile, plan)


@contextmanager
def joined(seat: Seat, backend: str = "gloo") -> Iterator[None]:
    """The default process group of all ranks."""
    limit = timedelta(seconds=TIMEOUT_S)
    store = dist.TCPStore(
        seat.host, seat.port, is_master=False, wait_for_workers=False, timeout=limit
    )
    dist.init_process_group(
        backend,
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


class Bench:
    """One rank's device and what runs on it."""

    def __init__(self, rank: int, study: Study, plan: Plan) -> None:
        self.rank = rank
        self.study = study
        self.plan = plan

    def repeated(self, name: str, number: int) -> Run:
        """The first run without overruns; where all had some, the one with the fewest."""
        tried: list[Run] = []
        while not tried or (tried[-1].overruns and len(tried) < TRIES):
            tried.append(self._run(name, number))
            self._tell(tried[-1])
        best = min(tried, key=lambda run: run.overruns)
        return replace(best, spoiled=len(tried) - 1)

    def _run(self, name: str, number: int) -> Run:
        device_class = self.study.setting.class_of(self.rank)
        gc.collect()
        with open_device(device_class, 0) as runtime:
            runtime.reset_peak()
            system = self._system(name, runtime)
            barrier = _nothing if name == ALONE else dist.barrier
            warm = [self._step(system, s, runtime, barrier) for s in range(WARM_UP_STEPS)]
            before, cpu, wall = runtime.overruns, time.process_time(), time.perf_counter()
            last = WARM_UP_STEPS + self.study.steps
            timed = [self._step(system, s, runtime, barrier) for s in range(WARM_UP_STEPS, last)]
            cpu_share = (time.process_time() - cpu) / (time.perf_counter() - wall)
            overruns, peak = runtime.overruns - before, runtime.peak_bytes()
            del system
        dist.barrier()
        return Run(
            system=name,
            round=number,
            step_s=tuple(seconds for seconds, _ in timed),
            losses=tuple(_summed([loss for _, loss in (*warm, *timed)])),
            overruns=int(_summed([overruns])[0]),
            peak_bytes=peak,
            cpu_share=cpu_share,
        )

    def _step(
        self, system: System, step: int, runtime: DeviceRuntime, barrier: Callable[[], object]
    ) -> tuple[float, float]:
        """Seconds until every device is done, and this rank's part of the loss."""
        batch = self.study.setting.batch(step, system.samples, self.rank)
        barrier()
        runtime.idle()
        begun = time.perf_counter()
        loss = system.step(batch).item()
        runtime.synchronize()
        barrier()
        return time.perf_counter() - begun, loss

    def _system(self, name: str, runtime: DeviceRuntime) -> System:
        setting = self.study.setting
        if name == GPUMIX:
            return systems.Gpumix(setting.build(), self.plan)
        if name == ALONE:
            return systems.alone(setting)
        if name == DDP_EVEN:
            return systems.ddp(setting, runtime)
        samples = setting.proportional() if name == FSDP_PROPORTIONAL else setting.even()
        return systems.fsdp(setting.build(), setting, samples, recompute=name != FSDP_KEEPS)

    def _tell(self, run: Run) -> None:
        if self.rank == 0:
            line = f"round {run.round + 1}, {run.system}: {median(run.step_s):.3f} s a step"
            if run.overruns:
                line += f", spoiled by {run.overruns} overruns"
            print(line, file=sys.stderr, flush=True)


def _nothing() -> None:
    return None


def _summed(values: Sequence[float]) -> list[float]:
    """Each value summed over ranks."""
    table = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(table)
    return table.tolist()
