"""Cephalo's measurements: its own worked example, and every strategy on mixtures of its GPUs.

The example is GPT-2.7B in fp16 with 64 samples of 512 tokens on one A6000, two L4 and one P40,
under their cost model. Then, for each model, precision and sequence length, each pair and each
triple of the types of GPU that were measured makes one case; cases take turns at 4, 8, 16, 32 and
64 devices and at equal and unequal counts of the types, so every run tries the same ones. All
strategies are judged by gpumix' cost model, over links that take no time, in the space of all
techniques that their files have measurements for.

    python benchmarks/planner_cephalo.py [--json] [--only gpt_2.7b ...] [--every 1]

Figures: `example_ms_per_layer` (published: 342.3), `example_search_s`, `example_search_ratio` (the
6 s that their search took by publication / ours), `cases`, `cases_lost` (another strategy is faster
than `optimal`, or fits where it does not), `cases_refused` (nothing fits), for each rival
`plans_of_...` and `median_step_ratio_...` (its step / that of `optimal`), and
`median_search_ratio`: seconds of Cephalo's dynamic programme / of `optimal` in the same space,
ZeRO-3 with recompute; the median of the medians at each number of devices, `search_ratio_4` and so
on.

The programme runs as published, on the whole batch, but in numpy: what is published as 6 s takes a
hundredth of a second here, so at few devices `optimal` is hardly faster; the ratio grows with the
third power of the batch. At 32 devices the programme takes a quarter of a minute and at 64 some
minutes, so it is run in one case of `EXACT_EVERY` there; in the others its batch is divided as the
strategy sees fit, and its plan counts for the step time only. All cases take about eight minutes on
one core.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from common import Figures, make_parser, print_figures
from gpumix.cost.predict import predict
from gpumix.planner.baselines import cephalo as programme
from gpumix.planner.common.strategy import PlanRequest, Strategy, get_prediction
from gpumix.planner.data_parallel.search import plan_one_stage
from gpumix.planner.plan import STRATEGIES
from gpumix.schema.errors import InputError, NoFeasiblePlanError
from gpumix.schema.job.search_space import EVERYTHING, Space
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile
from published import NotHereError, cephalo

EXAMPLE = cephalo.Setting("gpt_2.7b", "fp16")
EXAMPLE_GPUS = {"a6000": 1, "l4": 2, "p40": 1}
EXAMPLE_BATCH, EXAMPLE_ROUNDS = 64, 9
PUBLISHED_MS, PUBLISHED_S = 342.3, 6.0
PUBLISHED = {"a6000": ((34, 34),), "l4": ((13, 13), (12, 6)), "p40": ((5, 5),)}

DEVICES = (4, 8, 16, 32, 64)
SAMPLES_A_DEVICE = 16  # as in the example
EXACT_EVERY = {4: 1, 8: 1, 16: 1, 32: 12, 64: 120}
RIVALS = ("cephalo", "poplar", "proportional", "even")
ALIKE = 1e-9


@dataclass(frozen=True)
class Case:
    """One mixture, and the batch that it is to train."""

    number: int
    setting: cephalo.Setting
    counts: tuple[tuple[str, int], ...]

    @property
    def devices(self) -> int:
        return sum(count for _, count in self.counts)

    @property
    def exact(self) -> bool:
        """Whether Cephalo's programme runs on the whole batch: of the cases of so many devices
        every so many-th."""
        return self.number // len(DEVICES) % EXACT_EVERY[self.devices] == 0

    def request(self, space: Space = EVERYTHING) -> PlanRequest:
        return PlanRequest(global_batch=SAMPLES_A_DEVICE * self.devices, space=space)

    def profile(self) -> Profile:
        return cephalo.profile(self.setting, dict(self.counts))

    def __str__(self) -> str:
        mixture = " + ".join(f"{count} {gpu}" for gpu, count in self.counts)
        return f"{self.setting.name}: {mixture}"


@dataclass(frozen=True)
class Answer:
    """What a strategy found, if anything, and how long it took."""

    step_s: float | None
    search_s: float


@dataclass(frozen=True)
class Outcome:
    """All strategies in one case."""

    case: Case
    answers: dict[str, Answer]
    search_ratio: float | None  # None: Cephalo's programme did not run on the whole batch

    @property
    def refused(self) -> bool:
        return all(answer.step_s is None for answer in self.answers.values())

    @property
    def best_s(self) -> float:
        """The step of `optimal`."""
        return self.answers["optimal"].step_s or float("inf")

    @property
    def lost(self) -> bool:
        rivals = [self.answers[name].step_s or float("inf") for name in RIVALS]
        return self.best_s > min(rivals) * (1 + ALIKE)


def main() -> None:
    arguments = _arguments()
    try:
        ms, search_s = example(show=print if not arguments.json else None)
        every = list(cases(arguments.only))[:: arguments.every]
        outcomes = []
        for case in every:
            outcomes.append(outcome(case))
            if not arguments.json or outcomes[-1].lost:
                print(_line(outcomes[-1]), flush=True)
    except NotHereError as error:
        print(error)
        return
    found: Figures = {
        "example_ms_per_layer": ms,
        "example_search_s": search_s,
        "example_search_ratio": PUBLISHED_S / search_s,
    }
    print_figures(found | figures(outcomes), as_json=arguments.json)


def example(*, show: Callable[[str], object] | None = None) -> tuple[float, float]:
    """Milliseconds a layer of our plan by their cost model, and seconds to find it."""
    setting = cephalo.summed(cephalo.profile(EXAMPLE, EXAMPLE_GPUS))
    request = PlanRequest(global_batch=EXAMPLE_BATCH, space=EVERYTHING)
    plan, taken = plan_one_stage(setting, request), []
    for _ in range(EXAMPLE_ROUNDS):
        begun = time.perf_counter()
        plan = plan_one_stage(setting, request)
        taken.append(time.perf_counter() - begun)
    ms = layer_ms(setting, get_prediction(plan).step_s)
    if show:
        theirs = layer_ms(setting, predict(setting, as_published(plan)).step_s)
        ours = ", ".join(f"{w.device} {w.samples} by {w.micro_batch}" for w in plan.workers)
        show(f"example: {ours}: {ms:.1f} ms a layer, found in {median(taken) * 1e3:.1f} ms")
        show(
            f"their plan costs {theirs:.1f} ms; published: {PUBLISHED_MS} ms, found in "
            f"{PUBLISHED_S:.0f} s"
        )
    return ms, median(taken)


def layer_ms(setting: Profile, step_s: float) -> float:
    """A layer of their cost model, which has no extra time for one of the micro-batches."""
    return 1e3 * (step_s / len(setting.model.calls) - cephalo.EXTRA_S)


def as_published(plan: Plan) -> Plan:
    """The published samples and micro-batches in the place of ours."""
    given = {name: iter(parts) for name, parts in PUBLISHED.items()}
    workers = []
    for worker in plan.workers:
        samples, size = next(given[worker.device_class])
        changed = {"samples": samples, "micro_batch": size, "state_share": 0.25}
        workers.append(worker.model_copy(update=changed))
    stage = plan.stages[0].model_copy(update={"workers": tuple(workers)})
    return plan.model_copy(update={"stages": (stage,)})


def cases(only: list[str] | None = None) -> Iterator[Case]:
    """Every pair and triple of types in every setting, once."""
    number = 0
    for setting, gpus in cephalo.settings().items():
        for kinds in (2, 3):
            for some in combinations(gpus, kinds):
                devices = DEVICES[number % len(DEVICES)]
                equal = number // len(DEVICES) % 2 == 0
                if not only or setting.model in only:
                    counts = tuple(zip(some, _split(devices, kinds, equal=equal)))
                    yield Case(number, setting, counts)
                number += 1


def _split(devices: int, kinds: int, *, equal: bool) -> list[int]:
    """Counts that add up: as equal as can be, or each about half of the one before."""
    if equal:
        each, rest = divmod(devices, kinds)
        return [each + (k < rest) for k in range(kinds)]
    parts = [max(1, devices >> (k + 1)) for k in range(kinds)]
    parts[0] += devices - sum(parts)
    return parts


def outcome(case: Case) -> Outcome:
    """All strategies in one case."""
    profile = case.profile()
    strategies = {"optimal": plan_one_stage, **{name: STRATEGIES[name] for name in RIVALS}}
    if case.exact:
        strategies["cephalo"] = programme.plan_at_factor
    answers = {
        name: answer(profile, case.request(), strategy) for name, strategy in strategies.items()
    }
    ratio = None
    if case.exact and answers["cephalo"].step_s is not None:
        ratio = answers["cephalo"].search_s / answers["optimal"].search_s
    return Outcome(case, answers, ratio)


def answer(profile: Profile, request: PlanRequest, strategy: Strategy) -> Answer:
    """What a strategy finds."""
    begun = time.perf_counter()
    try:
        step: float | None = get_prediction(strategy(profile, request)).step_s
    except (InputError, NoFeasiblePlanError):
        step = None
    return Answer(step, time.perf_counter() - begun)


def figures(outcomes: list[Outcome]) -> Figures:
    """The result, flat."""
    counted = [o for o in outcomes if not o.refused]
    found: Figures = {
        "cases": len(counted),
        "cases_lost": sum(o.lost for o in counted),
        "cases_refused": len(outcomes) - len(counted),
    }
    ratios = {
        devices: [o.search_ratio for o in counted if o.case.devices == devices and o.search_ratio]
        for devices in DEVICES
    }
    medians = {devices: median(some) for devices, some in ratios.items() if some}
    found["median_search_ratio"] = median(medians.values()) if medians else 0.0
    for devices, ratio in medians.items():
        found[f"search_ratio_{devices}"] = round(ratio, 2)
    for name in RIVALS:
        steps = [o.answers[name].step_s for o in counted]
        slower = [s / o.best_s for s, o in zip(steps, counted) if s is not None]
        found[f"plans_of_{name}"] = len(slower)
        found[f"median_step_ratio_{name}"] = round(median(slower), 4) if slower else 0.0
    return found


def _line(outcome: Outcome) -> str:
    found = ", ".join(
        f"{name} {f'{a.step_s:.3f} s' if a.step_s else 'none'} ({a.search_s * 1e3:.0f} ms)"
        for name, a in outcome.answers.items()
    )
    return f"{'LOST ' if outcome.lost else ''}{outcome.case}: {found}"


def _arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", help="models")
    parser.add_argument("--every", type=int, default=1, help="one case in so many")
    return parser.parse_args()


if __name__ == "__main__":
    main()
