"""How close a fleet of unequal devices comes to the sum of its devices, and to its prediction.

Mixtures of emulated devices, each profiled, planned and trained by the plan, in turns with the best
that DDP or FSDP2 reach with an even split and with one in proportion to speed (all settings that
fit are tried, see `mixed_cpu.py`). A device's own speed is that of a plain loop on it, alone, in
its best setting, with memory without end: it has not the whole model's state to hold in a fleet.
The fleet's efficiency is its speed over the sum of these; devices that the plan leaves out count
too. Where memory is scarce, plans may have to recompute, which the sum does not.

    python benchmarks/engine_mixed.py [--json] [--rounds 2] [--steps 2] [--only 8:1 ...] [--quick]

Figures: `mixtures`; the worst of all `speedup_vs_best_even`, `speedup_vs_best_proportional` and
`fleet_efficiency`, each also by mixture; `speedup_over_ideal`, the worst of speed-ups against even
over what the devices' FLOP/s allow; `fleet_efficiency_plenty` over mixtures in which compute binds
(memory is plenty), `fleet_efficiency_same_mode`: the worst of all, if devices alone recompute as
the plan does; `worst_vs_prediction`, measured over predicted tokens/s. A speed-up is null where no
setting of the split fits. `overruns` as in `mixed_cpu.py`. Overruns, and a fleet efficiency above
1, end the script with exit code 1.

`--quick`: a quarter of the work and one round, to try the script.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from common import Figures, cluster_of, make_parser, print_counted
from compared.where import where_time_goes
from emulated.contest import EVEN, GPUMIX, PROPORTIONAL, Contest, Size, hold, refuse_impossible
from emulated.contest import figures_of as figures_of_contests
from emulated.results import aligned, plan_line
from emulated.setting import Setting
from gpumix.schema.units import show_bytes

WIDTH, LAYERS, HEADS = 192, 6, 6


@dataclass(frozen=True)
class Mixture:
    """Devices as (class, count, speed, memory); `plenty`: memory binds nobody."""

    name: str
    groups: tuple[tuple[str, int, str, str], ...]
    plenty: bool = True
    global_batch: int = 32

    def setting(self, sequence: int) -> Setting:
        cluster = cluster_of(*self.groups)
        return Setting(cluster, WIDTH, LAYERS, HEADS, self.global_batch, sequence)


MIXTURES = (
    Mixture(
        "4:2:1:1",
        (
            ("fast", 1, "10 GFLOP/s", "512 MiB"),
            ("medium", 1, "5 GFLOP/s", "512 MiB"),
            ("slow", 2, "2.5 GFLOP/s", "512 MiB"),
        ),
    ),
    Mixture(
        "8:1",
        (("fast", 1, "10 GFLOP/s", "512 MiB"), ("slow", 1, "1.25 GFLOP/s", "512 MiB")),
        global_batch=18,
    ),
    Mixture(
        "unequal memory",
        (
            ("roomy", 1, "5 GFLOP/s", "512 MiB"),
            ("middle", 1, "5 GFLOP/s", "96 MiB"),
            ("narrow", 2, "5 GFLOP/s", "48 MiB"),
        ),
        plenty=False,
    ),
    Mixture(
        "fast is small",
        (("fast", 1, "10 GFLOP/s", "48 MiB"), ("slow", 2, "2.5 GFLOP/s", "256 MiB")),
        plenty=False,
        global_batch=24,
    ),
    Mixture(
        "one for nothing",
        (("fast", 2, "8 GFLOP/s", "512 MiB"), ("useless", 1, "800 MFLOP/s", "64 MiB")),
        global_batch=12,
    ),
    Mixture("equal", (("equal", 3, "6 GFLOP/s", "512 MiB"),), global_batch=30),
)


@dataclass(frozen=True)
class Result:
    """What became of a mixture."""

    mixture: Mixture
    contest: Contest


def main() -> None:
    arguments = _arguments()
    begun = time.perf_counter()
    size = Size(1, 1) if arguments.quick else Size(arguments.rounds, arguments.steps)
    results = []
    for mixture in MIXTURES:
        if mixture.name in arguments.only:
            setting = mixture.setting(32 if arguments.quick else 128)
            contest = hold(setting, size, recomputing_alone=True, recorded=True)
            results.append(Result(mixture, contest))
            print(f"{mixture.name}: {contest.efficiency:.3f}", file=sys.stderr, flush=True)
    _show(results)
    figures = figures_of(results) | {"seconds": round(time.perf_counter() - begun, 1)}
    counted = print_counted(figures, as_json=arguments.json)
    sys.exit(counted or refuse_impossible([result.contest for result in results]))


def _arguments() -> argparse.Namespace:
    names = [mixture.name for mixture in MIXTURES]
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="measured steps per round")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--quick", action="store_true", help="a quarter of the work, one round")
    return parser.parse_args()


def figures_of(results: Sequence[Result]) -> Figures:
    """What comes of all mixtures."""
    contests = [result.contest for result in results]
    plenty = [result for result in results if result.mixture.plenty]
    figures: Figures = {"mixtures": len(results)} | figures_of_contests(contests)
    figures["speedup_over_ideal"] = min(
        (speedup / c.ideal_speedup for c in contests if (speedup := c.speedup(EVEN))), default=None
    )
    if plenty:
        figures["fleet_efficiency_plenty"] = min(r.contest.efficiency for r in plenty)
    figures["fleet_efficiency_same_mode"] = min(c.efficiency_same_mode for c in contests)
    figures["worst_vs_prediction"] = min(c.vs_prediction for c in contests)
    figures["overruns"] = sum(c.overruns for c in contests)
    for result in results:
        own = figures_of_contests([result.contest])
        mixture = result.mixture.name.replace(" ", "_").replace(":", "_")
        figures |= {f"{name}_{mixture}": value for name, value in own.items()}
    return {n: round(v, 4) if isinstance(v, float) else v for n, v in figures.items()}


def _show(results: Sequence[Result]) -> None:
    print("emulated devices: times are of the emulation, not of any real card\n")
    rows = [
        ("mixture", "tokens/s", "alone", "efficiency", "same mode", "vs best even", "ideal",
         "vs best proportional", "vs predicted", "overruns"),
    ]  # fmt: skip
    for result in results:
        contest = result.contest
        rows.append(
            (
                result.mixture.name + ("" if result.mixture.plenty else " (memory binds)"),
                f"{contest.tokens_per_s:.1f}",
                f"{sum(alone.best for alone in contest.alone.values()):.1f}",
                f"{contest.efficiency:.3f}",
                f"{contest.efficiency_same_mode:.3f}",
                _shown(contest.speedup(EVEN)),
                f"{contest.ideal_speedup:.2f}",
                _shown(contest.speedup(PROPORTIONAL)),
                f"{contest.vs_prediction:.3f}",
                str(contest.overruns),
            )
        )
    print(aligned(rows))
    for result in results:
        contest = result.contest
        print(f"\n{result.mixture.name}: {_devices(contest)}\n{plan_line(contest.plan)}")
        for split, found in contest.found.items():
            print(f"{split}, as tried:\n{found}")
    print("\nwhere the time of one step goes, mean over ranks")
    recordings = {r.mixture.name: r.contest.results.recordings(GPUMIX) for r in results}
    print(where_time_goes(recordings), end="\n\n")


def _shown(speedup: float | None) -> str:
    return "does not fit" if speedup is None else f"{speedup:.3f}"


def _devices(contest: Contest) -> str:
    """Each device with its memory, and what it does alone."""
    setting = contest.setting
    told = []
    for rank, device in enumerate(setting.devices):
        alone = contest.alone[device.id]
        memory = show_bytes(setting.class_of(rank).memory_bytes)
        told.append(
            f"{device.id} ({memory}) {alone.keeping:.0f} tokens/s, {alone.recomputing:.0f} "
            "recomputing"
        )
    return "; ".join(told)


if __name__ == "__main__":
    main()
