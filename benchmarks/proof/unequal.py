"""Stage `unequal`: two and four ranks of unlike speed on the one GPU, over gloo.

By NVIDIA's multi-process service each rank has a part of the GPU's processors and all compute at
once. Where there is none, each has its part as a green context, but ranks then take turns: that
shows whether they train right, and no speed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from gpumix.train.processes.local_launcher import loopback_store
from proof.bench import Bench
from proof.lines import Bar
from proof.models import REHEARSED, SMALL, Llama
from proof.outcome import Outcome
from proof.rank import Run
from proof.ranks import Ranks, started
from proof.service import multi_process_service

PROCESSORS = 132  # of an H100 and an H200
LARGE_CARD_BYTES = 40 * 2**30
ZERO_STAGES = (0, 1, 3)
CHECKED = {100: 1.0, 60: 100 / 60, 20: 100 / 20}
WITHIN = 0.15
ENOUGH_S = 15.0  # for the speeds of four ranks
# Little to exchange, much to compute: copies through the host do not hide what a split is worth.
PARITY = replace(SMALL, sequence=512)
FAST = Llama(width=512, layers=8, vocabulary=1024, sequence=512, mlp=1408, kv_heads=8)


@dataclass(frozen=True)
class Crew:
    """Ranks, by the parts in percent that each has of the GPU's processors, and of its memory."""

    percents: tuple[int, ...]
    fractions: tuple[float, ...]
    samples: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{len(self.percents)}_ranks"

    def shares(self) -> tuple[tuple[int, int, float], ...]:
        """Samples, micro-batches and state as unlike as speeds and memory are."""
        total = sum(self.fractions)
        return tuple(
            (samples, max(1, samples // 2), fraction / total)
            for samples, fraction in zip(self.samples, self.fractions)
        )


TWO = Crew((60, 20), (0.45, 0.25), (12, 4))
FOUR = Crew((40, 25, 15, 10), (0.3, 0.2, 0.15, 0.1), (7, 5, 3, 1))


@dataclass(frozen=True)
class Sizes:
    """How much is done: on a GPU, and in a rehearsal.

    Attributes:
        batch, micro_batch: samples of the setting in which speeds are compared.
    """

    parity: Llama = PARITY
    parity_steps: int = 2
    fast: Llama = FAST
    batch: int = 1024
    micro_batch: int = 64
    rounds: int = 3
    steps: int = 4
    unit_times: int = 30
    side: int = 4096
    products: int = 30


REHEARSED_SIZES = Sizes(REHEARSED, 2, REHEARSED, 16, 1, 1, 1, 2, 64, 2)


def run(bench: Bench) -> Outcome:
    return _Unequal(bench).run()


def _sizes(bench: Bench) -> Sizes:
    """A tenth of a small card's memory does not hold the state of the larger model."""
    if bench.rehearses:
        return REHEARSED_SIZES
    small = bench.card is not None and bench.card.memory_bytes < LARGE_CARD_BYTES
    return Sizes(parity=FAST) if small else Sizes()


class _Unequal:
    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.sizes = _sizes(bench)
        self.figures: dict[str, Any] = {}
        self._truth: list[float] = []

    def run(self) -> Outcome:
        with multi_process_service(wanted=self.bench.place == "gpu") as service:
            if not service or not self._by_service(service):
                self._without_service()
        bars = [Bar(f"{crew.name}_loss_off", most=1e-4) for crew in (TWO, FOUR)]
        bars.append(Bar("2_ranks_speedup_of_best", least=0.90, judges="gpu"))
        return Outcome(self.figures, tuple(bars))

    def _by_service(self, service: dict[str, str]) -> bool:
        """Whether the service does what it says, and all was done with it."""
        percents = (100, *TWO.percents, *FOUR.percents)
        envs = [{**service, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(p)} for p in percents]
        with started(self.bench, envs) as ranks:
            crews = self._crews(ranks)
            self._open(ranks, (0.25, *TWO.fractions, *FOUR.fractions))
            found = self.bench.measured("service", lambda: (self._check(ranks), ()))
            self.figures["service_works"] = bool(found.get("service_works"))
            if not self.figures["service_works"]:
                return False
            self._train(crews, counts=True)
        return True

    def _without_service(self) -> None:
        """Ranks take turns, each on its part of the processors: no speed counts."""
        self.figures["service_works"] = False
        percents = (100, *TWO.percents, *FOUR.percents)
        with started(self.bench, [{} for _ in percents]) as ranks:
            crews = self._crews(ranks)
            processors = [0 if p == 100 else PROCESSORS * p // 100 for p in percents]
            if self.bench.place != "gpu":
                processors = [0] * len(percents)
            self._open(ranks, (0.25, *TWO.fractions, *FOUR.fractions), processors)
            if self.bench.rehearses:
                self.bench.measured("service", lambda: (self._check(ranks), ()))
            self._train(crews, counts=False)

    @staticmethod
    def _crews(ranks: Ranks) -> tuple[Ranks, Ranks, Ranks]:
        """The process that is compared with, the two ranks, and the four."""
        one, two, four = ranks.processes[:1], ranks.processes[1:3], ranks.processes[3:]
        return Ranks(one), Ranks(two), Ranks(four)

    def _open(
        self, ranks: Ranks, fractions: Sequence[float], processors: Sequence[int] | None = None
    ) -> None:
        """Memory is divided between those that are at work at once."""
        given = [
            {
                "on_cuda": self.bench.on_cuda,
                "fraction": fraction,
                "threads": 1 if self.bench.rehearses else 3,
                "processors": own,
            }
            for fraction, own in zip(fractions, processors or [0] * len(fractions))
        ]
        told = [one["green_context"] for one in ranks.run_on_all("open", given)]
        self.figures["green_contexts"] = ", ".join(sorted(set(filter(None, told))))

    def _check(self, ranks: Ranks) -> dict[str, Any]:
        """Whether a rank alone is as slow as its part says, and two at once no slower."""
        how = {"side": self.sizes.side, "times": self.sizes.products}
        three = Ranks(ranks.processes[:3])
        alone = [Ranks([one]).all("product", **how)[0]["seconds"] for one in three.processes]
        both = [one["seconds"] for one in Ranks(three.processes[1:]).all("product", **how)]
        ratios = [seconds / alone[0] for seconds in alone]
        as_said = all(
            abs(ratio / wanted - 1) <= WITHIN
            for ratio, wanted in zip(ratios, CHECKED.values(), strict=True)
        )
        at_once = max(both) / max(alone[1:])
        return {
            "ratio_60": ratios[1],
            "ratio_20": ratios[2],
            "at_once_over_slower": at_once,
            "service_works": as_said and at_once <= 1.1,
        }

    def _train(self, crews: tuple[Ranks, Ranks, Ranks], *, counts: bool) -> None:
        alone, two, four = crews
        run = self._parity_run(TWO, 0)
        (told,) = alone.all("alone", run=asdict(run), steps=self.sizes.parity_steps)
        self._truth = told["losses"]
        alone.kill()
        self._train_crew(TWO, two, counts=counts)
        self._train_crew(FOUR, four, counts=counts)

    def _train_crew(self, crew: Crew, ranks: Ranks, *, counts: bool) -> None:
        with self._joined(ranks):
            found = self.bench.measured(f"{crew.name}_parity", lambda: self._parity(crew, ranks))
            self.figures[f"{crew.name}_loss_off"] = found.get("worst_loss_off")
            if found and (crew is TWO or self.bench.left_s > ENOUGH_S):
                found = self.bench.measured(
                    f"{crew.name}_speed", lambda: (self._speed(crew, ranks, counts=counts), ())
                )
                self.figures |= {f"{crew.name}_{key}": value for key, value in found.items()}
        ranks.kill()

    @contextmanager
    def _joined(self, ranks: Ranks) -> Iterator[None]:
        with loopback_store() as (_, port):
            world = len(ranks.processes)
            ranks.run_on_all(
                "join", [{"rank": n, "world": world, "port": port} for n in range(world)]
            )
            yield

    def _parity_run(self, crew: Crew, zero_stage: int) -> Run:
        return Run(asdict(self.sizes.parity), crew.shares(), zero_stage, "fp32")

    def _parity(self, crew: Crew, ranks: Ranks) -> tuple[dict[str, Any], Sequence[Bar]]:
        figures: dict[str, Any] = {}
        for zero_stage in ZERO_STAGES:
            run = asdict(self._parity_run(crew, zero_stage))
            made = ranks.all("prepare", name="parity", run=run, steps=self.sizes.parity_steps)
            told = ranks.all("steps", name="parity", steps=self.sizes.parity_steps)
            ranks.all("drop", name="parity")
            losses = [one["losses"] for one in told]
            off = max(abs(a / b - 1) for own in losses for a, b in zip(own, self._truth))
            figures[f"loss_off_zero_{zero_stage}"] = off
            figures["communicator"] = made[0]["communicator"]
        offs = [value for key, value in figures.items() if key.startswith("loss_off")]
        figures["worst_loss_off"] = max(offs)
        return figures, (Bar("worst_loss_off", most=1e-4),)

    def _speed(self, crew: Crew, ranks: Ranks, *, counts: bool) -> dict[str, Any]:
        """The split by what ranks measure of themselves, beside the even one, in turns."""
        sizes, world = self.sizes, len(ranks.processes)
        even = self._speed_run([sizes.batch // world] * world)
        timed = ranks.all(
            "unit", run=asdict(even), samples=sizes.micro_batch, times=sizes.unit_times
        )
        speeds = [1 / one["seconds"] for one in timed]
        split = by_speed(sizes.batch, sizes.micro_batch, speeds)
        runs = {"even": even, "by_speed": self._speed_run(split)}
        for name, run in runs.items():
            ranks.all("prepare", name=name, run=asdict(run), steps=1)
            ranks.all("steps", name=name, steps=1)  # warms up
        step_s: dict[str, list[float]] = {name: [] for name in runs}
        waiting: list[float] = []
        for number in range(sizes.rounds):
            if number and self.bench.left_s < 2.0 * sizes.steps * sum(map(max, step_s.values())):
                break
            for name in runs if number % 2 else reversed(runs):
                told = ranks.all("steps", name=name, steps=sizes.steps)
                step_s[name].append(max(one["step_s"] for one in told))
                if name == "by_speed":
                    waiting.append(statistics.mean(one["waiting_share"] for one in told))
        speedup = statistics.median(a / b for a, b in zip(step_s["even"], step_s["by_speed"]))
        best = sum(speeds) / (world * min(speeds))
        return {
            "split": split,
            "speeds": [round(speed / min(speeds), 3) for speed in speeds],
            "even_step_s": statistics.median(step_s["even"]),
            "by_speed_step_s": statistics.median(step_s["by_speed"]),
            "waiting_share": statistics.median(waiting),
            "best_speedup": best,
            "speedup_vs_even": speedup if counts else None,
            "speedup_of_best": speedup / best if counts else None,
        }

    def _speed_run(self, samples: Sequence[int]) -> Run:
        sizes = self.sizes
        dtype = "fp32" if self.bench.rehearses else "bf16"
        shares = tuple((own, min(own, sizes.micro_batch), 1 / len(samples)) for own in samples)
        return Run(asdict(sizes.fast), shares, 0, dtype)


def by_speed(samples: int, micro_batch: int, speeds: Sequence[float]) -> list[int]:
    """So many samples for each rank that all take as long, in whole micro-batches; each has one."""
    parts = samples // micro_batch
    counts = [1] * len(speeds)
    for _ in range(parts - len(speeds)):
        soonest = min(range(len(speeds)), key=lambda rank: (counts[rank] + 1) / speeds[rank])
        counts[soonest] += 1
    return [count * micro_batch for count in counts]
