"""How well the cost model foretells step time and peak memory.

Profiles two small models on four emulated devices of three classes, then runs random plans (uneven
samples, micro-batches and shares, among them devices without samples or without state) for a few
steps each, next to `optimal` and `even`, and compares with what was predicted beforehand.

    python benchmarks/prediction.py [--json] [--plans 5] [--steps 4]

Figures: `plans`, `step_time_mape` and `memory_mape` (mean absolute error over plans, and over all
devices of all plans, as fractions), `worst_memory_underestimate` (the largest fraction by which a
measured peak was above the predicted one; 0 if none was), `overruns` (must be 0 to count).
"""

from __future__ import annotations

import argparse
from statistics import fmean

from common import make_parser, print_figures
from emulated.trials import MODELS, Outcome, measured, profiled, random_plans

SEED = 11
SLOWEST = 2.0


def main() -> None:
    arguments = _arguments()
    found: list[Outcome] = []
    for name in MODELS:
        with profiled(name) as (pipeline, profile):
            optimal = pipeline.plan(profile)
            plans = {"optimal": optimal, "even": pipeline.plan(profile, "even")}
            drawn = random_plans(profile, optimal, arguments.plans, seed=SEED, slowest=SLOWEST)
            plans |= {f"random {number}": plan for number, plan in enumerate(drawn, 1)}
            for label, plan in plans.items():
                found.append(measured(f"{name} {label}", pipeline, plan, arguments.steps))
                print(found[-1], flush=True)
    times = [abs(o.time_error) for o in found]
    memory = [error for o in found for error in o.memory_errors]
    print_figures(
        {
            "plans": len(found),
            "step_time_mape": fmean(times),
            "worst_step_time_error": max(times),
            "memory_mape": fmean(map(abs, memory)),
            "worst_memory_overestimate": max(0.0, *memory),
            "worst_memory_underestimate": max(0.0, *(-e for e in memory)),
            "overruns": sum(o.overruns for o in found),
        },
        as_json=arguments.json,
    )


def _arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--plans", type=int, default=5, help="random plans per model")
    parser.add_argument("--steps", type=int, default=4, help="measured steps per plan")
    return parser.parse_args()


if __name__ == "__main__":
    main()
