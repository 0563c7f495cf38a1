"""Runs systems in alternating rounds in the same processes, and compares them round by round.

All systems live side by side and take turns of a few steps, so what the machine does otherwise
meets all alike. A turn begins and ends at a barrier. Two clocks: wall-clock time, and the CPU time
of all ranks together, which is what counts where ranks share cores and the only one that foreign
load leaves alone, but does not see waiting.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import ceil
from statistics import median, quantiles
from typing import Literal

import torch
import torch.distributed as dist

from compared.setting import Setting
from compared.systems import Entrant, Fsdp, OnEngine, System
from emulated.rounds import joined
from gpumix.engine.comm.step_recorder import RecordedStep
from gpumix.train.processes.local_launcher import RankAddress, launch

Clock = Literal["wall", "cpu"]
WARM_UP_STEPS = 1


@dataclass(frozen=True)
class Study:
    """What is measured: every system for `steps` steps in each round.

    Ranks on CUDA have a GPU each, or share those that there are, each with its part of the memory.
    """

    setting: Setting
    entrants: tuple[Entrant, ...]
    rounds: int
    steps: int
    device: Literal["cpu", "cuda"] = "cpu"
    backend: Literal["gloo", "nccl"] = "gloo"


@dataclass(frozen=True)
class Outcome:
    """What one rank brings home: by system its turns, losses of all steps, one step in detail.

    Attributes:
        peak_bytes: by system, on GPUs alone.
        turn_s: by system and clock, seconds of one step in each round; CPU time of this rank alone.
    """

    turn_s: dict[tuple[str, Clock], tuple[float, ...]]
    losses: dict[str, tuple[float, ...]]
    recordings: dict[str, RecordedStep]
    peak_bytes: dict[str, int]


def work(seat: RankAddress, study: Study) -> Outcome:
    """One rank's part."""
    device = _device(seat, study)
    alone = seat.world == 1 and not any(isinstance(e, Fsdp) for e in study.entrants)
    with nullcontext() if alone else joined(seat, study.backend):
        return _Bench(seat.rank, study, device).run()


def _device(seat: RankAddress, study: Study) -> torch.device:
    torch.set_num_threads(1)
    if study.device == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", seat.rank % gpus)
    torch.cuda.set_device(device)
    torch.cuda.set_per_process_memory_fraction(1 / ceil(seat.world / gpus), device)
    return device


class _Bench:
    """One rank with all systems on it."""

    def __init__(self, rank: int, study: Study, device: torch.device) -> None:
        self.rank = rank
        self.study = study
        self.device = device
        self._turn_s: dict[tuple[str, Clock], list[float]] = {}
        self._losses: dict[str, list[float]] = {}
        self._peaks: dict[str, int] = {}

    def run(self) -> Outcome:
        study = self.study
        systems = {e.name: self._warmed(e) for e in study.entrants}
        names = list(systems)
        for number in range(study.rounds):
            shift = number % len(names)
            for name in (*names[shift:], *names[:shift]):
                self._turn(name, systems[name])
            self._tell(number)
        recordings = {
            name: system.recorded_step(study.setting.batch(0, self.rank))
            for name, system in systems.items()
            if isinstance(system, OnEngine)
        }
        return Outcome(
            {key: tuple(seconds) for key, seconds in self._turn_s.items()},
            {name: tuple(losses) for name, losses in self._losses.items()},
            recordings,
            self._peaks,
        )

    def _warmed(self, entrant: Entrant) -> System:
        on_gpu = self.device.type == "cuda"
        before = torch.cuda.memory_allocated() if on_gpu else 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        system = entrant.make(self.study.setting, self.device)
        self._losses[entrant.name] = []
        for step in range(WARM_UP_STEPS):
            loss = system.step(self.study.setting.batch(step, self.rank))
            self._losses[entrant.name].append(loss.item())
        if on_gpu:
            self._peaks[entrant.name] = torch.cuda.max_memory_allocated() - before
        return system

    def _turn(self, name: str, system: System) -> None:
        self._meet()
        wall, cpu = time.perf_counter(), time.process_time()
        first = len(self._losses[name])
        losses = [
            system.step(self.study.setting.batch(first + step, self.rank))
            for step in range(self.study.steps)
        ]
        self._meet()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        self._turn_s.setdefault((name, "wall"), []).append(wall / len(losses))
        self._turn_s.setdefault((name, "cpu"), []).append(cpu / len(losses))
        self._losses[name] += [loss.item() for loss in losses]

    def _meet(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if self.study.setting.world > 1:
            dist.barrier()

    def _tell(self, number: int) -> None:
        if self.rank == 0:
            took = {n: s[-1] for (n, clock), s in self._turn_s.items() if clock == "wall"}
            line = ", ".join(f"{name} {seconds:.3f}" for name, seconds in took.items())
            print(f"round {number + 1}, s a step: {line}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Ratio:
    """How much faster one system is than another: the median over rounds, and the quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ours_s: Sequence[float], theirs_s: Sequence[float]) -> Ratio:
        """Each round by itself: what slowed a round slowed both."""
        ratios = [b / a for a, b in zip(ours_s, theirs_s, strict=True)]
        low, _, high = quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
        return cls(median(ratios), low, high)

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.2f}-{self.high:.2f})"


@dataclass(frozen=True)
class Results:
    """A study and the outcome of each rank."""

    study: Study
    outcomes: tuple[Outcome, ...]

    @classmethod
    def of(cls, study: Study) -> Results:
        """Run the study, one process per rank."""
        return cls(study, tuple(launch(work, study.setting.devices, study)))

    def step_s(self, name: str, clock: Clock) -> list[float]:
        """By round: wall-clock seconds of a step, or CPU seconds of all ranks."""
        by_round = zip(*(outcome.turn_s[name, clock] for outcome in self.outcomes))
        return [max(parts) if clock == "wall" else sum(parts) for parts in by_round]

    def tokens_per_s(self, name: str, clock: Clock) -> float:
        """Of all ranks together: per second, or per second of CPU time."""
        return self.study.setting.tokens / median(self.step_s(name, clock))

    def ratio(self, ours: str, theirs: str, clock: Clock) -> Ratio:
        return Ratio.of(self.step_s(ours, clock), self.step_s(theirs, clock))

    @property
    def worst_loss_difference(self) -> float:
        """Relative, over all steps of all systems, to those of the first one."""
        means = {
            entrant.name: [
                sum(parts) / len(parts)
                for parts in zip(*(o.losses[entrant.name] for o in self.outcomes))
            ]
            for entrant in self.study.entrants
        }
        wanted = means[self.study.entrants[0].name]
        return max(abs(a / b - 1) for losses in means.values() for a, b in zip(losses, wanted))

    def peak_bytes(self, name: str) -> int | None:
        """The highest of any rank, what other systems hold left out; None if it is not known."""
        return max(
            (o.peak_bytes[name] for o in self.outcomes if name in o.peak_bytes), default=None
        )

    def recordings(self, name: str) -> list[RecordedStep]:
        """One step of the engine, by rank."""
        return [outcome.recordings[name] for outcome in self.outcomes]
