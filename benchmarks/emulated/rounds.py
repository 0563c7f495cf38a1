"""Runs contestants in alternating rounds on one rank's emulated device, and times their steps.

A step ends when every device is done: a barrier separates steps, for all systems alike. A run
during which any device fell behind its speed is thrown away and repeated.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

import gpumix
from emulated.contestants import ByPlan, Contestant
from emulated.setting import Setting
from emulated.systems import Gpumix, System
from gpumix.engine.comm.step_recorder import RecordedStep
from gpumix.hardware.device import DeviceRuntime, open_device
from gpumix.schema.profile.profile import Profile
from gpumix.train.processes.local_launcher import RankAddress

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
    """What is measured: each contestant in every round. `recorded`: of those by a plan, one step
    more in detail."""

    setting: Setting
    contestants: tuple[Contestant, ...]
    rounds: int
    steps: int
    recorded: bool = False


@dataclass(frozen=True)
class Outcome:
    """What one rank brings home; `recordings` by contestant."""

    runs: tuple[Run, ...]
    recordings: dict[str, RecordedStep]


def work(seat: RankAddress, study: Study) -> Outcome:
    """One rank's part: all contestants in every round."""
    with joined(seat):
        bench = Bench(seat.rank, study.setting, study.steps)
        runs = []
        for number in range(study.rounds):
            shift = number % len(study.contestants)
            for contestant in (*study.contestants[shift:], *study.contestants[:shift]):
                runs.append(bench.repeated(contestant, number))
        planned = [c for c in study.contestants if isinstance(c, ByPlan)] if study.recorded else []
        return Outcome(tuple(runs), {c.name: bench.recording(c) for c in planned})


def profiled(seat: RankAddress, setting: Setting) -> Profile:
    """One rank's part of measuring the model on these devices."""
    with joined(seat):
        return profile_of(setting)


@contextmanager
def joined(seat: RankAddress, backend: str = "gloo") -> Iterator[None]:
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
        global_batch_size=setting.global_batch,
        cluster=setting.cluster,
        budget_s=PROFILE_BUDGET_S,
        progress=lambda line: None,
    )


class Bench:
    """One rank's device and what runs on it."""

    def __init__(self, rank: int, setting: Setting, steps: int) -> None:
        self.rank = rank
        self.setting = setting
        self.steps = steps

    def repeated(self, contestant: Contestant, number: int) -> Run:
        """The first run without overruns; where all had some, the one with the fewest."""
        tried: list[Run] = []
        while not tried or (tried[-1].overruns and len(tried) < TRIES):
            tried.append(self._run(contestant, number))
            self._tell(tried[-1])
        best = min(tried, key=lambda run: run.overruns)
        return replace(best, spoiled=len(tried) - 1)

    def recording(self, contestant: ByPlan) -> RecordedStep:
        """One step in detail."""
        start = contestant.start(self.setting)
        with open_device(self.setting.class_of(self.rank), 0) as runtime:
            system = start(runtime)
            assert isinstance(system, Gpumix)
            for step in range(2):  # the first one allocates
                runtime.idle()
                recording = system.recorded_step(contestant.batch(self.setting, step, self.rank))
            del system
        return recording

    def _run(self, contestant: Contestant, number: int) -> Run:
        gc.collect()
        start = contestant.start(self.setting)
        with open_device(self.setting.class_of(self.rank), 0) as runtime:
            runtime.reset_peak()
            system = start(runtime)
            del start  # it holds a model that is sharded now
            step = partial(one_step, system, contestant, self.setting, self.rank, runtime)
            warm = [step(number) for number in range(WARM_UP_STEPS)]
            before, cpu, wall = runtime.overruns, time.process_time(), time.perf_counter()
            last = WARM_UP_STEPS + self.steps
            timed = [step(number) for number in range(WARM_UP_STEPS, last)]
            cpu_share = (time.process_time() - cpu) / (time.perf_counter() - wall)
            overruns, peak = runtime.overruns - before, runtime.peak_bytes()
            del system, step
        dist.barrier()
        return Run(
            system=contestant.name,
            round=number,
            step_s=tuple(seconds for seconds, _ in timed),
            losses=tuple(_summed([loss for _, loss in (*warm, *timed)])),
            overruns=int(_summed([overruns])[0]),
            peak_bytes=peak,
            cpu_share=cpu_share,
        )

    def _tell(self, run: Run) -> None:
        if self.rank == 0:
            line = f"round {run.round + 1}, {run.system}: {median(run.step_s):.3f} s a step"
            if run.overruns:
                line += f", spoiled by {run.overruns} overruns"
            print(line, file=sys.stderr, flush=True)


def one_step(
    system: System,
    contestant: Contestant,
    setting: Setting,
    rank: int,
    runtime: DeviceRuntime,
    step: int,
) -> tuple[float, float]:
    """Seconds until every device is done, and this rank's part of the loss. Collective."""
    batch = contestant.batch(setting, step, rank)
    dist.barrier()
    runtime.idle()
    begun = time.perf_counter()
    loss = system.step(batch).item()
    runtime.synchronize()
    dist.barrier()
    return time.perf_counter() - begun, loss


def _summed(values: Sequence[float]) -> list[float]:
    """Each value summed over ranks."""
    table = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(table)
    return table.tolist()
