"""Whether stages pay over slow links, and whether the planner knows when.

Two hosts with two emulated devices each, 1 Gb/s between them (network namespaces, `tc tbf`). gpumix
measures devices and links there, as it would on any two hosts, and plans three times: one stage at
ZeRO-3, its state divided among all devices; `staged`; and `optimal`, with all that it may choose.
All are measured in turns, for models and batches for which the link counts more and less.

    python benchmarks/stages_slow_link.py [--json] [--steps 3] [--rounds 3]

Figures: `cases`, `picked_faster` (in all cases the plan of `optimal` is at least as fast as both
others; what is within `TIE` of each other counts as the same), `worst_prediction_error` (of the
step times of all plans, as a fraction), `staged_vs_one_stage` (one stage's step / that of `staged`,
where stages gain the most; `least_staged_vs_one_stage` where they gain the least), `overruns` (must
be 0 to count). The exit code is 1 if they do not count, or one is beyond `LIMITS`. Medians of
rounds. Needs root, for namespaces; takes five minutes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from common import make_parser, print_counted
from emulated.hosts import HOSTS, CannotEmulateError, Host, TwoHosts, two_hosts
from emulated.turns import Turns, job_file, llama, take_turns
from gpumix.planner.common.strategy import PlanRequest, get_prediction
from gpumix.planner.plan import STRATEGIES
from gpumix.schema.job.search_space import EVERYTHING
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile
from gpumix.schema.reading.read import read_job
from gpumix.schema.units import show_seconds
from gpumix.train.controller import JobController

RATE = "1gbit"
CLUSTER = {
    "classes": {
        "fast": {"emulate": "3 GFLOP/s", "memory": "512 MiB"},
        "slow": {"emulate": "1.5 GFLOP/s", "memory": "512 MiB"},
    },
    "devices": [
        {"class": name, "host": host, "count": 2} for name, host in zip(("fast", "slow"), HOSTS)
    ],
}
SPACES = {
    "one stage": (
        "optimal",
        {"zero_stages": (3,), "shardings": ("all",), "max_pipeline_stages": 1},
    ),
    "staged": ("staged", {}),
    "optimal": ("optimal", {"leave_out": True}),
}
TIE = 0.02
LIMITS = {"picked_faster": True, "worst_prediction_error": 0.1}


@dataclass(frozen=True)
class Case:
    """What is trained."""

    width: int
    layers: int
    tokens: int
    samples: int

    def __str__(self) -> str:
        return (
            f"{self.layers} layers of width {self.width}, "
            f"{self.samples} samples of {self.tokens} tokens"
        )


CASES = (Case(256, 6, 16, 8), Case(384, 4, 16, 8), Case(128, 6, 64, 12))


@dataclass(frozen=True)
class Outcome:
    """Of one case: the plans by name, and what they took."""

    case: Case
    plans: Mapping[str, Plan]
    turns: Mapping[str, Turns]

    @property
    def picked_faster(self) -> bool:
        best = min(self.turns[name].step_s for name in ("one stage", "staged"))
        return self.turns["optimal"].step_s <= best * (1 + TIE)

    @property
    def gain(self) -> float:
        """How many times as fast as one stage several are."""
        return self.turns["one stage"].step_s / self.turns["staged"].step_s

    def error(self, name: str) -> float:
        return get_prediction(self.plans[name]).step_s / self.turns[name].step_s - 1

    def lines(self) -> Iterator[str]:
        yield str(self.case)
        for name, plan in self.plans.items():
            yield (
                f"  {name:<10} {show_seconds(self.turns[name].step_s)} a step, predicted "
                f"{self.error(name):+.1%}, {self.turns[name].overruns} overruns: {in_words(plan)}"
            )


def main() -> int:
    arguments = _arguments()
    begun = time.perf_counter()
    outcomes = []
    try:
        with two_hosts(RATE) as hosts:
            for case in CASES:
                outcomes.append(outcome(case, hosts, arguments.steps, arguments.rounds))
                print(*outcomes[-1].lines(), sep="\n", flush=True)
    except CannotEmulateError as error:
        print(error, file=sys.stderr)
        return 3
    gains = [o.gain for o in outcomes]
    return print_counted(
        {
            "cases": len(outcomes),
            "picked_faster": all(o.picked_faster for o in outcomes),
            "worst_prediction_error": max(abs(o.error(name)) for o in outcomes for name in o.plans),
            "staged_vs_one_stage": max(gains),
            "least_staged_vs_one_stage": min(gains),
            "overruns": sum(turns.overruns for o in outcomes for turns in o.turns.values()),
            "seconds": round(time.perf_counter() - begun, 1),
        },
        as_json=arguments.json,
        limits=LIMITS,
    )


def outcome(case: Case, hosts: Mapping[str, Host], steps: int, rounds: int) -> Outcome:
    """Profile, plan and measure one case."""
    config, techniques = llama(width=case.width, layers=case.layers), {"tensor_parallel_size": 1}
    keys: dict[str, Any] = {"cluster": CLUSTER, "techniques": techniques}
    with job_file(config, case.tokens, global_batch_size=case.samples, **keys) as path:
        runs = TwoHosts(debug=True, hosts=hosts)
        pipeline = JobController(read_job(path, []), path.parent, runs, debug=True)
        plans = plans_of(pipeline.profile(), case.samples)
        # `optimal` may be one of the others: then both have the same measurements.
        turns: dict[str, Turns] = {}
        of_plan = {name: next(n for n in plans if alike(plans[n], plans[name])) for name in plans}
        different = {name: plan for name, plan in plans.items() if of_plan[name] == name}
        for _ in range(rounds):
            take_turns(pipeline, different, turns, steps)
    return Outcome(case, plans, {name: turns[of_plan[name]] for name in plans})


def plans_of(profile: Profile, samples: int) -> dict[str, Plan]:
    found = {}
    for name, (strategy, choices) in SPACES.items():
        space = EVERYTHING.model_copy(
            update={"tensor_parallel_size": (1,), "leave_out": False} | choices
        )
        request = PlanRequest(global_batch=samples, space=space)
        found[name] = STRATEGIES[strategy](profile, request)
    return found


def alike(one: Plan, other: Plan) -> bool:
    """Whether two plans are the same but for how they were found."""
    told = {"strategy": "", "prediction": None, "reasons": None}
    return one.model_copy(update=told) == other.model_copy(update=told)


def in_words(plan: Plan) -> str:
    stages = " | ".join(
        f"{len(stage.units)} layers on "
        + " + ".join(f"{w.device} ({w.samples} by {w.micro_batch})" for w in stage.workers)
        for stage in plan.stages
    )
    schedule = f", {plan.schedule}" if len(plan.stages) > 1 else f" by {plan.sharding}"
    return f"{stages}; ZeRO stage {plan.zero_stage}{schedule}"


def _arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each plan")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
