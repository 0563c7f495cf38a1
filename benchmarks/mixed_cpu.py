"""How much faster gpumix is than DDP and FSDP2 on a mixture of emulated devices.

Four emulated devices of speeds 4 : 2 : 1 : 1 and unequal memory train a GPT-2 of 2.7 M parameters
in alternating rounds: DDP and FSDP2 with equal batches, FSDP2 with batches in proportion to speed,
and gpumix by its own plan. Same devices, weights, samples, optimizer and FLOPs: all compute blocks
again in backward, the others by `torch.utils.checkpoint`. The memory limits let the others run
their part of the batch in a single pass; gpumix may choose otherwise. Then each device trains
alone, without communication: the sum of their speeds is what the fleet could reach. Last, equal
devices, gpumix against FSDP2; there also without recompute, for which they have the memory.

    python benchmarks/mixed_cpu.py [--json] [--rounds 3] [--steps 2]

Speeds are medians over rounds of medians over steps. A run in which an emulated device fell behind
its speed is repeated, up to three times in all, and left out if the other rounds have clean ones;
`overruns` are those in the runs that counted (0, or the figures mean nothing).
`worst_loss_difference` is relative, over all systems and steps.
"""

from __future__ import annotations

import argparse
import json
import time

from emulated.results import Results, plan_line
from emulated.rounds import (
    DDP_EVEN,
    FSDP_EVEN,
    FSDP_KEEPS,
    FSDP_PROPORTIONAL,
    GPUMIX,
    Study,
)
from emulated.setting import Setting, cluster_of

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
    mixed = Results.of(
        Study(
            Setting(MIXED, WIDTH, LAYERS, HEADS),
            (DDP_EVEN, FSDP_EVEN, FSDP_PROPORTIONAL, GPUMIX),
            rounds=arguments.rounds,
            steps=arguments.steps,
            alone=True,
        )
    )
    equal = Results.of(
        Study(
            Setting(EQUAL, WIDTH, LAYERS, HEADS),
            (FSDP_EVEN, GPUMIX, FSDP_KEEPS),
            rounds=arguments.rounds,
            steps=arguments.steps,
        )
    )
    figures = _figures(mixed, equal) | {"seconds": time.perf_counter() - begun}
    _show(mixed, equal, figures)
    if arguments.json:
        print(json.dumps({name: float(f"{value:.6g}") for name, value in figures.items()}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="measured steps per system and round")
    return parser.parse_args()


def _figures(mixed: Results, equal: Results) -> dict[str, float]:
    ours, ours_equal = mixed.tokens_per_s(GPUMIX), equal.tokens_per_s(GPUMIX)
    prediction = mixed.plan.prediction
    assert prediction is not None
    return {
        "tokens_per_s": ours,
        "speedup_vs_ddp_even": ours / mixed.tokens_per_s(DDP_EVEN),
        "speedup_vs_fsdp2_even": ours / mixed.tokens_per_s(FSDP_EVEN),
        "speedup_vs_fsdp2_proportional": ours / mixed.tokens_per_s(FSDP_PROPORTIONAL),
        "fleet_efficiency": ours / sum(mixed.alone_tokens_per_s()),
        "equal_devices_vs_fsdp2": ours_equal / equal.tokens_per_s(FSDP_EVEN),
        "equal_devices_vs_fsdp2_no_recompute": ours_equal / equal.tokens_per_s(FSDP_KEEPS),
        "prediction_error": prediction.tokens_per_s / ours - 1,
        "overruns": mixed.overruns + equal.overruns,
        "runs_spoiled": mixed.spoiled + equal.spoiled,
        "worst_loss_difference": max(mixed.worst_loss_difference, equal.worst_loss_difference),
        "busiest_cpu_share": max(mixed.busiest_cpu(), equal.busiest_cpu()),
    }


def _show(mixed: Results, equal: Results, figures: dict[str, float]) -> None:
    alone = mixed.alone_tokens_per_s()
    print("emulated devices: times are of the emulation, not of any real card\n")
    print(mixed.table(GPUMIX))
    print(plan_line(mixed.plan))
    print(f"each device alone: {' + '.join(f'{a:.1f}' for a in alone)} = {sum(alone):.1f} tokens/s")
    print("\nfour equal devices")
    print(equal.table(GPUMIX))
    print(plan_line(equal.plan), end="\n\n")
    for name, value in figures.items():
        print(f"{name} {value:.4g}")


if __name__ == "__main__":
    main()
