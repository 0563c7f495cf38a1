"""Whether the plans that the cost model calls faster are faster.

Profiles a small GPT-2 on four emulated devices of three classes, draws random plans (uneven
samples, micro-batches and shares, among them devices without samples or without state), and
measures them in an order that has nothing to do with their predictions.

    python benchmarks/planner_selfcheck.py [--json] [--plans 20] [--steps 4]

Figures: `plans`, `spearman` (rank correlation of predicted and measured step time), `time_mape`
(mean absolute error, a fraction), `worst_time_error`, `overruns` (must be 0 to count).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import correlation, fmean

from common import make_parser, print_figures
from emulated.trials import measured, profiled, random_plans

MODEL = "gpt2"
BATCH, TOKENS = 32, 32  # many short samples: of few, many plans would be as fast
SEED = 5
SLOWEST = 3.0


def main() -> None:
    arguments = _arguments()
    with profiled(MODEL, global_batch=BATCH, sequence_length=TOKENS) as (pipeline, profile):
        optimal = pipeline.plan(profile)
        drawn = random_plans(profile, optimal, arguments.plans, seed=SEED, slowest=SLOWEST)
        found = []
        for number, plan in enumerate(drawn, 1):
            found.append(measured(f"random {number}", pipeline, plan, arguments.steps))
            print(found[-1], flush=True)
    rank = correlation(
        _places([o.predicted_s for o in found]), _places([o.measured_s for o in found])
    )
    print_figures(
        {
            "plans": len(found),
            "spearman": rank,
            "time_mape": fmean(abs(o.time_error) for o in found),
            "worst_time_error": max(abs(o.time_error) for o in found),
            "overruns": sum(o.overruns for o in found),
        },
        as_json=arguments.json,
    )


def _places(values: Sequence[float]) -> list[int]:
    """The place of each value among all."""
    order = sorted(values)
    return [order.index(value) for value in values]


def _arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--plans", type=int, default=20)
    parser.add_argument("--steps", type=int, default=4, help="measured steps per plan")
    return parser.parse_args()


if __name__ == "__main__":
    main()
