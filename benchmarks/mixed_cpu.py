"""How much faster gpumix is than DDP and FSDP2 on a mixture of emulated devices.

Four emulated devices of speeds 4 : 2 : 1 : 1 and unequal memory train a GPT-2 of 2.7 M parameters.
gpumix, by its own plan, takes turns with the best that DDP or FSDP2 reach with an even split of the
batch, and with a split in proportion to speed. Best: all their settings that fit the devices'
memory are tried (which system; recompute or graphs kept; micro-batches, with gradients exchanged in
each or once a step; weights resharded or kept; gathers ahead), and the fastest takes part. Then
each device trains alone in its best setting: the sum of these speeds is what the fleet could reach.
Last, equal devices, gpumix against the best of DDP and FSDP2. Same devices, weights, samples and
optimizer for all.

    python benchmarks/mixed_cpu.py [--json] [--rounds 3] [--steps 2] [--quick] [--every]

Figures: `speedup_vs_best_even` (ideal 2.0), `speedup_vs_best_proportional` (1.0: where the state
fits evenly, that split leaves nothing to gain but in overheads), `fleet_efficiency`,
`equal_devices_vs_best`. Speeds are medians over rounds of medians over steps. A run in which an
emulated device fell behind its speed is repeated, up to three times in all, and left out if the
other rounds have clean ones; `overruns` are those in the runs that counted: with any the figures
mean nothing. `worst_loss_difference` is relative, over all systems and steps. Overruns, and a fleet
efficiency above 1, end the script with exit code 1.

`--quick`: a quarter of the work and one round, to try the script. `--every`: try all settings, also
those in which another that fits does no more work and no more communication.
"""

from __future__ import annotations

import argparse
import sys
import time

from common import Figures, cluster_of, make_parser, print_counted
from emulated.contest import EVEN, Contest, Size, figures_of, hold, refuse_impossible
from emulated.setting import Setting

WIDTH, LAYERS, HEADS = 192, 6, 6

MIXED = cluster_of(
    ("fast", 1, "10 GFLOP/s", "128 MiB"),
    ("medium", 1, "5 GFLOP/s", "192 MiB"),
    ("slow", 2, "2.5 GFLOP/s", "96 MiB"),
)
EQUAL = cluster_of(("equal", 4, "6 GFLOP/s", "384 MiB"))


def main() -> None:
    arguments = _arguments()
    begun = time.perf_counter()
    sizes = {"global_batch": 16, "sequence": 64} if arguments.quick else {}
    rounds, steps = (1, 1) if arguments.quick else (arguments.rounds, arguments.steps)
    size = Size(rounds, steps, arguments.every)
    mixed = hold(Setting(MIXED, WIDTH, LAYERS, HEADS, **sizes), size)
    equal = hold(Setting(EQUAL, WIDTH, LAYERS, HEADS, **sizes), size, splits=(EVEN,))
    figures = _figures(mixed, equal) | {"seconds": round(time.perf_counter() - begun, 1)}
    print("emulated devices: times are of the emulation, not of any real card\n")
    print(f"{mixed}\n\nfour equal devices\n{equal}\n")
    counted = print_counted(figures, as_json=arguments.json)
    sys.exit(counted or refuse_impossible([mixed, equal]))


def _arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="measured steps per system and round")
    parser.add_argument("--quick", action="store_true", help="a quarter of the work, one round")
    parser.add_argument("--every", action="store_true", help="try covered settings too")
    return parser.parse_args()


def _figures(mixed: Contest, equal: Contest) -> Figures:
    results = (mixed.results, equal.results)
    figures = figures_of([mixed]) | {
        "ideal_speedup": mixed.ideal_speedup,
        "equal_devices_vs_best": equal.speedup(EVEN),
        "equal_devices_fleet_efficiency": equal.efficiency,
        "tokens_per_s": mixed.tokens_per_s,
        "prediction_error": 1 / mixed.vs_prediction - 1,
        "overruns": mixed.overruns + equal.overruns,
        "runs_spoiled": sum(r.spoiled for r in results),
        "worst_loss_difference": max(r.worst_loss_difference for r in results),
        "busiest_cpu_share": max(r.busiest_cpu() for r in results),
    }
    return {n: float(f"{v:.6g}") if isinstance(v, float) else v for n, v in figures.items()}


if __name__ == "__main__":
    main()
