"""Any plan trains any model as one process does.

Each architecture is trained for 5 steps on 1, 2, 3 and 4 ranks (gloo, loopback) with random uneven
plans: batches, micro-batches and shares of the state differ by rank and may be zero. A single
process, without gpumix, trains on the whole batch with the model's own mean loss. Both start from
the model's own initialiser. Samples differ in length, so that means do not simply average.

    python benchmarks/parity.py [--json] [--only gpt2 ...] [--steps 5]

Figures: `worst_relative_error` of a step's loss or of a parameter tensor, ||w - w'|| / ||w'||, over
all `plans`; `wrong_collectives` are steps of a rank that took other collectives than the closed
form says (2 gathers and 1 reduction per unit, 1 and 1 for the root, whatever the micro-batches).
The optimizer, and why it is SGD with momentum, is `optimizer_for` in
tests/helpers/training/reference.py.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass

import torch

from common import make_parser, print_figures
from helpers.training.models import ARCHITECTURES
from helpers.training.reference import (
    Share,
    Trained,
    random_shares,
    train_alone,
    train_by_plan,
    worst_error,
)

WORLDS = (1, 2, 3, 4, 2, 3, 4)
LIMIT = 1e-4


@dataclass(frozen=True)
class Outcome:
    """How one plan did."""

    shares: list[Share]
    error: float
    wrong_collectives: int


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(1)
    begun = time.perf_counter()
    outcomes = {name: _outcomes(name, arguments.steps) for name in arguments.only}
    every = [outcome for of_name in outcomes.values() for outcome in of_name]
    worst = max(outcome.error for outcome in every)
    wrong = sum(outcome.wrong_collectives for outcome in every)
    if not arguments.json:
        _print_table(outcomes)
    print_figures(
        {
            "architectures": len(outcomes),
            "plans": len(every),
            "steps": arguments.steps,
            "worst_relative_error": worst,
            "wrong_collectives": wrong,
            "seconds": round(time.perf_counter() - begun, 1),
        },
        as_json=arguments.json,
    )
    return int(worst >= LIMIT or wrong > 0)


def _outcomes(name: str, steps: int) -> list[Outcome]:
    """All plans of one architecture; which they are depends on its name alone."""
    rng = random.Random(name)
    alone: dict[int, Trained] = {}
    outcomes = []
    for world in WORLDS:
        shares = random_shares(world, rng)
        size = sum(share.samples for share in shares)
        if size not in alone:
            alone[size] = train_alone(ARCHITECTURES[name], size, steps)
        trained = train_by_plan(name, shares, steps)
        wrong = sum(counts != trained.expected_counts for counts in trained.counts)
        outcomes.append(Outcome(shares, worst_error(trained, alone[size]), wrong))
    print(f"{name}: {max(o.error for o in outcomes):.1e}", file=sys.stderr)
    return outcomes


def _print_table(outcomes: dict[str, list[Outcome]]) -> None:
    """Each plan as samples/micro-batch/state of its ranks."""
    print(f"{'architecture':20} {'ranks':>5} {'error':>8}  samples/micro-batch/state share by rank")
    for name, of_name in outcomes.items():
        for outcome in of_name:
            parts = "  ".join(f"{s.samples}/{s.micro_batch}/{s.state}" for s in outcome.shares)
            print(f"{name:20} {len(outcome.shares):5} {outcome.error:8.1e}  {parts}")


def _arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--steps", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
