"""How long stages wait for each other, against theory; and whether layers are split well.

Emulated devices of one class in a row train a Llama whose stages take equally long, by plans of
every schedule. Measured is the part of all devices' time in which one waits for another. Theory, of
p stages and m micro-batches:

* `gpipe`, `1f1b`: (p-1) / (m+p-1) (GPipe, arXiv 1811.06965; PipeDream-Flush, arXiv 2006.09503);
  `eager-1f1b` too, which lets more wait only for messages to arrive (Zhuang et al., arXiv
  2211.05322);
* `interleaved`, v stages on each device: (p-1) / (v m + p-1) (Narayanan et al., arXiv 2104.04473,
  who tell it as (p-1) / v m of the time without bubbles);
* `zero-bubble`: (p-1) (F + B - W) idle seconds beside m (F + B + W) busy ones, where F is a
  forward, B the gradients of activations, W those of weights (ZB-H1, Qi et al., arXiv 2401.10241);
  F, B and W are those of the profile.

Then unlike devices take the layers as `staged` splits them, in two stages and in three, in turns
with all other splits of the same devices, order and micro-batches; after the first round those go
on that took at most `NEAR` times as long as the best.

    python benchmarks/stages_bubble.py [--json] [--steps 2] [--rounds 3]

Figures: `plans`, `worst_bubble_gap` (the largest difference of measured and theoretical share),
`splits`, `splits_in_three` (stages), `worst_vs_best_split` (the planner's step / that of the best
split, medians of rounds, the worst of the clusters), `worst_prediction_error` (of the step times of
all of these plans, as a fraction), `overruns` (must be 0 to count). The exit code is 1 if they do
not count, or one is beyond `LIMITS`. Takes seven minutes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise

from common import make_parser, print_counted
from emulated.even_stages import ROUNDS, EvenStages
from emulated.turns import Turns, job_file, llama, take_turns
from gpumix.cost.predict import predict
from gpumix.planner.common.strategy import get_prediction
from gpumix.schema.plan.plan import Plan, Schedule
from gpumix.schema.plan.stage import Mode
from gpumix.schema.profile.profile import Profile
from gpumix.train.controller import JobController

WIDTH, LENGTH = 128, 64
LAYERS, BATCH, DEVICES = 8, 8, 4
SHAPES = ((4, 4), (4, 8), (2, 4))  # stages, micro-batches
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "eager-1f1b", "interleaved", "zero-bubble")
EQUAL = [{"class": "equal", "emulate": "1 GFLOP/s", "memory": "512 MiB", "count": DEVICES}]

FAST = {"class": "fast", "emulate": "2.5 GFLOP/s", "memory": "512 MiB"}
MIDDLE = {"class": "middle", "emulate": "1.6 GFLOP/s", "memory": "512 MiB"}
SLOW = {"class": "slow", "emulate": "1 GFLOP/s", "memory": "512 MiB"}
MIXTURES = (  # devices, layers, stages at least
    ([FAST, SLOW], 7, 2),
    ([FAST | {"count": 2}, SLOW], 6, 2),
    ([FAST, MIDDLE, SLOW], 6, 3),
)
SPACE = {
    "zero_stages": 0,
    "gradient_checkpointing": False,
    "pipeline_schedules": "1f1b",
    "tensor_parallel_size": 1,
    "leave_out": False,
}
NEAR = 1.25
LIMITS = {"worst_bubble_gap": 0.05, "worst_vs_best_split": 1.05}


@dataclass(frozen=True)
class Found:
    """A plan, what it took, and for bubbles the share that theory says."""

    label: str
    plan: Plan
    turns: Turns
    theory: float = 0.0

    @property
    def gap(self) -> float:
        return abs(self.turns.idle_share - self.theory)

    @property
    def prediction_error(self) -> float:
        return get_prediction(self.plan).step_s / self.turns.step_s - 1


def main() -> int:
    arguments = _arguments()
    begun = time.perf_counter()
    bubbles = list(equal_stages(arguments.steps))
    contests = [
        all_splits(cluster, layers, least, arguments.steps, arguments.rounds)
        for cluster, layers, least in MIXTURES
    ]
    every = [*bubbles, *(found for contest in contests for found in contest)]
    return print_counted(
        {
            "plans": len(bubbles),
            "worst_bubble_gap": max(found.gap for found in bubbles),
            "splits": sum(map(len, contests)),
            "splits_in_three": sum(
                len(found.plan.stages) == 3 for contest in contests for found in contest
            ),
            "worst_vs_best_split": max(map(against_best, contests)),
            "worst_prediction_error": max(abs(found.prediction_error) for found in every),
            "overruns": sum(found.turns.overruns for found in every),
            "seconds": round(time.perf_counter() - begun, 1),
        },
        as_json=arguments.json,
        limits=LIMITS,
    )


def equal_stages(steps: int) -> Iterator[Found]:
    """Every schedule in each of `SHAPES`."""
    config = llama(width=WIDTH, layers=LAYERS)
    with job_file(config, LENGTH, cluster=EQUAL, global_batch_size=BATCH) as path:
        pipeline = JobController.of_file(path, [], debug=True)
        profile = pipeline.profile()
        for stages, count in SHAPES:
            for schedule in SCHEDULES:
                label = f"{stages} stages, {count} micro-batches, {schedule}"
                way = EvenStages(stages, BATCH, BATCH // count, schedule, Mode(recompute=False))
                plan = way.plan(profile, profile.cluster.in_rank_order()[:stages])
                turns: dict[str, Turns] = {}
                take_turns(pipeline, {label: plan}, turns, steps)
                theory = bubble(profile, stages, count, schedule)
                found = Found(label, plan, turns[label], theory)
                yield found
                print(
                    f"{label:<40} {_ms(found.turns.step_s)} a step, predicted "
                    f"{found.prediction_error:+.1%}; idle {found.turns.idle_share:.1%}, theory "
                    f"{theory:.1%}",
                    flush=True,
                )


def bubble(profile: Profile, stages: int, count: int, schedule: Schedule) -> float:
    """The part of the devices' time that theory says is idle."""
    waiting, busy = float(stages - 1), float(count)
    if schedule == "interleaved":
        busy *= ROUNDS
    if schedule == "zero-bubble":
        (times,) = (profile.classes[0].units[kind] for kind in set(profile.model.kind_of_call))
        size = BATCH / count
        assert times.inputs is not None and times.weights is not None
        curves = (times.forward, times.inputs, times.weights)
        forward, inputs, weights = (dict(zip(c.sizes, c.values))[size] for c in curves)
        waiting *= forward + inputs - weights
        busy *= forward + inputs + weights
    return waiting / (busy + waiting)


def all_splits(
    cluster: list[dict[str, object]], layers: int, least: int, steps: int, rounds: int
) -> list[Found]:
    """The planner's split of the layers first, then all others; `least` is of stages."""
    config, batch = llama(width=WIDTH, layers=layers), {"global_batch_size": BATCH}
    space = SPACE | {"min_pipeline_stages": least}
    with job_file(config, LENGTH, cluster=cluster, techniques=space, **batch) as path:
        pipeline = JobController.of_file(path, [], debug=True)
        profile = pipeline.profile()
        chosen = pipeline.plan(profile, "staged")
        plans = {split_of(chosen): chosen}
        plans |= {split_of(plan): plan for plan in others(profile, chosen)}
        turns: dict[str, Turns] = {}
        going = dict(plans)
        for _ in range(rounds):
            take_turns(pipeline, going, turns, steps)
            best = min(turns[split].step_s for split in going)
            going = {s: p for s, p in going.items() if turns[s].step_s <= NEAR * best}
    found = [Found(split, plan, turns[split]) for split, plan in plans.items()]
    for one in found:
        mark = "the planner's" if one.plan is chosen else ""
        print(
            f"{one.label:<40} {_ms(one.turns.step_s)} a step, predicted "
            f"{one.prediction_error:+.1%}, of {len(one.turns.trials)} rounds {mark}",
            flush=True,
        )
    return found


def others(profile: Profile, plan: Plan) -> Iterator[Plan]:
    """The same devices with all other splits of the layers."""
    model, calls = profile.model, len(profile.model.calls)
    chosen = tuple(len(stage.units) for stage in plan.stages)
    for inner in combinations(range(1, calls), len(plan.stages) - 1):
        ends = list(pairwise((0, *inner, calls)))
        if tuple(end - begin for begin, end in ends) == chosen:
            continue
        stages = []
        for (begin, end), stage in zip(ends, plan.stages):
            needs = model.needs_of(begin, end)
            units = model.calls[begin:end]
            update = {"units": units, "takes": needs.outputs, "root": needs.root}
            stages.append(stage.model_copy(update=update))
        other = plan.model_copy(update={"stages": tuple(stages), "reasons": None})
        yield other.model_copy(update={"prediction": predict(profile, other)})


def split_of(plan: Plan) -> str:
    return " | ".join(
        f"{len(s.units)} on {' + '.join(w.device for w in s.workers)}" for s in plan.stages
    )


def against_best(contest: list[Found]) -> float:
    """The step of the planner's split, which is the first, / that of the best one."""
    return contest[0].turns.step_s / min(found.turns.step_s for found in contest)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:6.0f} ms"


def _arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=2, help="measured steps of each plan")
    parser.add_argument("--rounds", type=int, default=3, help="of the splits")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
