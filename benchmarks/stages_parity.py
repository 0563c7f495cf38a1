"""Any plan of several stages, or of ranks that compute together, trains any model as one process.

Hypothesis draws plans on up to 4 ranks (gloo, loopback): workers of each stage, the tensor parallel
degree of each, whether it divides the sequence too, where the layers are cut, micro-batches and who
gets which, shares of the state, ZeRO stage, schedule, how often interleaved stages go round, how
many waves of micro-batches (from ZeRO stage 2 on), with and without recompute, the head whole or in
chunks. A single process, without gpumix, trains on the whole batch with the model's own mean loss.

    python benchmarks/stages_parity.py [--json] [--only gpt2-deep ...] [--steps 3] [--plans 40]

Figures: `plans`, `plans_in_waves` (more than one), `plans_of_mixed_degrees` (a stage has workers
of several tensor parallel degrees), `plans_interleaved`, `architectures`,
`schedules_by_architecture` (the pairs of a schedule and an architecture that were drawn, of five
each), and `worst_relative_error` of a step's loss or of a parameter tensor, ||w - w'|| / ||w'||,
over all plans.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, get_args
from zlib import crc32

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from common import make_parser, print_figures
from gpumix.schema.plan.plan import Plan, Schedule
from helpers.training.models import ARCHITECTURES, DEEP
from helpers.training.reference import Trained, train_alone, worst_error
from helpers.training.staging import (
    EVERY,
    Row,
    calls_of,
    layouts,
    schedules_for,
    staged_plan,
    train_in_stages,
)

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
LIMIT = 1e-4


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(1)
    begun = time.perf_counter()
    found = {name: _trained(name, arguments.steps, arguments.plans) for name in arguments.only}
    every = [one for of_name in found.values() for one in of_name]
    worst = max(one.error for one in every)
    drawn = {
        name: Counter(_schedule(one.plan) for one in of_name) for name, of_name in found.items()
    }
    for name, counts in drawn.items():
        print(f"{name}: {', '.join(f'{counts[one]} {one}' for one in SCHEDULES)}", file=sys.stderr)
    print_figures(
        {
            "plans": len(every),
            "plans_in_waves": sum(one.plan.waves > 1 for one in every),
            "plans_of_mixed_degrees": sum(
                any(stage.has_mixed_degrees for stage in one.plan.stages) for one in every
            ),
            "plans_interleaved": sum(counts["interleaved"] for counts in drawn.values()),
            "architectures": len(found),
            "schedules_by_architecture": sum(
                counts[one] > 0 for counts in drawn.values() for one in SCHEDULES
            ),
            "worst_relative_error": worst,
            "seconds": round(time.perf_counter() - begun, 1),
        },
        as_json=arguments.json,
    )
    return int(worst >= LIMIT)


class Tried(NamedTuple):
    plan: Plan
    error: float


def _trained(name: str, steps: int, plans: int) -> list[Tried]:
    """All plans of one architecture."""
    alone: dict[int, Trained] = {}
    found: list[Tried] = []

    def tried(rows: list[Row], cuts: list[int], how: dict[str, Any]) -> None:
        plan = staged_plan(name, rows, cuts, **how)
        size = plan.global_batch
        if size not in alone:
            alone[size] = train_alone(EVERY[name], size, steps)
        _, trained = train_in_stages(name, plan, steps)
        found.append(Tried(plan, worst_error(trained, alone[size])))

    schedules = schedules_for(len(calls_of(name)))
    for number, schedule in enumerate(schedules):
        _draw(name, schedule, len(range(number, plans, len(schedules))), tried)
    drawn = Counter(_kind(one.plan) for one in found)
    told = ", ".join(f"{count} {what}" for what, count in sorted(drawn.items()))
    print(f"{name}: {max(one.error for one in found):.1e} ({told})", file=sys.stderr)
    return found


def _draw(name: str, schedule: Schedule, count: int, tried: Callable[..., None]) -> None:
    """Give `tried` so many layouts: of each architecture and schedule others, always the same."""

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @seed(crc32(f"{name}, {schedule}".encode()))
    @given(layouts(len(calls_of(name)), schedule))
    def draw(layout: tuple[list[Row], list[int], dict[str, Any]]) -> None:
        tried(*layout)

    if count:
        draw()


def _schedule(plan: Plan) -> str:
    return plan.schedule if len(plan.stages) > 1 else "one stage"


def _kind(plan: Plan) -> str:
    waves = ", several waves" if plan.waves > 1 else ""
    groups = ", in tensor-parallel groups" if plan.uses_tensor_parallel else ""
    if any(stage.has_mixed_degrees for stage in plan.stages):
        groups = ", in tensor-parallel groups of unlike sizes"
    if any(stage.sequence for stage in plan.stages):
        groups += ", with sequence parallelism"
    return f"{_schedule(plan)}, ZeRO {plan.zero_stage}{waves}{groups}"


def _arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=[*ARCHITECTURES, *DEEP], default=[*DEEP])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--plans", type=int, default=40, help="of each architecture")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
