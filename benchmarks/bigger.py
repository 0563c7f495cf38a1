"""A model that an even split cannot hold, trained by gpumix on the same devices.

Four emulated devices of unequal memory; a GPT-2 of 12.1 M parameters, whose training state divided
by four is more than the smallest device has. gpumix trains it by its own plan; its own `even` plan
must be refused before anything is allocated. FSDP2 is tried all the same, with an even split of the
batch and with one in proportion to speed: first as sparing as it can be (most micro-batches,
recompute, no gathers ahead, the whole model in host memory that nobody counts), and if that fits in
all its other settings and DDP's, for the fastest. Limits are those of a real allocator, to the
byte. Each device alone, with memory without end and in its best setting, is the bound of the fleet.

    python benchmarks/bigger.py [--json] [--steps 4] [--quick]

Figures: `fits` (gpumix did all steps on all devices), `worst_memory_fraction` (its highest measured
peak over its device's limit), `even_fails_with` and `proportional_fails_with` (the error of the
thriftiest setting; empty if one fits), `even_plan_refused`; `fleet_efficiency`, the same if devices
alone recompute as the plan does (`fleet_efficiency_same_mode`) and, null where no setting fits,
`speedup_vs_best_even` and `speedup_vs_best_proportional`. `overruns`: with any, speeds mean
nothing. Overruns, and a fleet efficiency above 1, end the script with exit code 1.

`--quick`: a quarter of the work, to try the script.
"""

from __future__ import annotations

import argparse
import sys
import time

import gpumix
from common import cluster_of, make_parser, print_counted
from compared.search import Found
from emulated.attempts import Attempt, attempts
from emulated.contest import (
    EVEN,
    GPUMIX,
    PROPORTIONAL,
    Contest,
    Size,
    figures_of,
    hold,
    refuse_impossible,
)
from emulated.contestants import ByPlan
from emulated.results import aligned
from emulated.setting import Setting
from emulated.ways import Way
from gpumix.schema.errors import NoFeasiblePlanError
from gpumix.schema.profile.profile import Profile
from gpumix.schema.units import show_bytes

CLUSTER = cluster_of(
    ("large", 1, "12 GFLOP/s", "256 MiB"),
    ("medium", 1, "6 GFLOP/s", "128 MiB"),
    ("small", 2, "3 GFLOP/s", "40 MiB"),
)
WIDTH, LAYERS, HEADS, BATCH = 288, 12, 6, 16
SEQUENCE, QUICK_SEQUENCE = 128, 32


def main() -> None:
    arguments = _arguments()
    begun = time.perf_counter()
    sequence = QUICK_SEQUENCE if arguments.quick else SEQUENCE
    setting = Setting(CLUSTER, WIDTH, LAYERS, HEADS, BATCH, sequence)
    size = Size(rounds=1, steps=1 if arguments.quick else 2)
    contest = hold(setting, size, recomputing_alone=True, doubtful=True)
    ours = attempts(contest.fleet, ByPlan(GPUMIX, contest.plan, deferred=True), arguments.steps)
    refused = _refusal(contest.profile, setting)
    _show(contest, ours, refused)
    figures = {
        "fits": all(len(a.losses) == arguments.steps for a in ours),
        "worst_memory_fraction": max(_fractions(contest.fleet, ours)),
        "even_fails_with": _error(contest.found[EVEN]),
        "proportional_fails_with": _error(contest.found[PROPORTIONAL]),
        "even_plan_refused": bool(refused),
        **figures_of([contest]),
        "fleet_efficiency_same_mode": contest.efficiency_same_mode,
        "overruns": contest.overruns,
        "seconds": time.perf_counter() - begun,
    }
    rounded = {n: round(v, 4) if isinstance(v, float) else v for n, v in figures.items()}
    counted = print_counted(rounded, as_json=arguments.json)
    sys.exit(counted or refuse_impossible([contest]))


def _arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=4, help="of gpumix, whose memory is counted")
    parser.add_argument("--quick", action="store_true", help="a quarter of the work")
    return parser.parse_args()


def _refusal(profile: Profile, setting: Setting) -> str:
    """Why the planner refuses the even plan; empty if it does not."""
    try:
        gpumix.plan(profile, setting.global_batch, strategy="even")
    except NoFeasiblePlanError as error:
        return str(error)
    return ""


def _error(found: Found[Way]) -> str:
    return "" if found.best is not None else found.error


def _fractions(setting: Setting, ours: list[Attempt]) -> list[float]:
    """Peak over limit by rank."""
    limits = [setting.class_of(rank).memory_bytes for rank in range(len(ours))]
    return [attempt.peak_bytes / limit for attempt, limit in zip(ours, limits)]


def _show(contest: Contest, ours: list[Attempt], refused: str) -> None:
    fleet, profile = contest.fleet, contest.profile
    parameters = profile.model.parameters
    state = parameters * (8 + profile.optimizer_bytes_per_element)
    print(
        f"emulated devices; {parameters / 1e6:.1f} M parameters, {show_bytes(state)} of state, "
        f"{show_bytes(state / len(fleet.devices))} for each device if it is divided evenly\n"
    )
    rows = [("device", "limit", "gpumix", "peak")]
    for rank, attempt in enumerate(ours):
        done = f"{len(attempt.losses)} steps"
        limit = show_bytes(fleet.class_of(rank).memory_bytes)
        fate = f"{attempt.error} after {done}" if attempt.error else done
        rows.append((fleet.devices[rank].id, limit, fate, show_bytes(attempt.peak_bytes)))
    print(aligned(rows))
    losses = [sum(parts) for parts in zip(*(a.losses for a in ours))]
    print(f"gpumix's losses: {', '.join(f'{loss:.3f}' for loss in losses)}")
    print(f"gpumix's even plan: {refused or 'was NOT refused'}")
    print(contest, end="\n\n")


if __name__ == "__main__":
    main()
