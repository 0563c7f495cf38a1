"""Whether low precision and whole-matrix optimizers train as in a single process.

A small Llama trains for 200 steps on three uneven ranks (samples, micro-batches and shares of the
state all differ) in bf16, in fp16, and in fp32 with Adafactor and Muon; a single process trains it
on the same batches: FSDP2 in a group of one in low precision, a plain loop with torch's own
optimizers in fp32. An error is max over steps of |loss - truth| / |truth|. Rounding differs with
the order of sums alone, so it is told beside a spread: the same of two single processes that
differ in nothing but the size of their micro-batches.

    python benchmarks/engine_numerics.py [--json] [--steps 200] [--only bf16 ...]

Figures: `worst_relative_error_bf16`, `worst_relative_error_fp16`, `worst_relative_error_optimizers`
and, for each case, `error_...` and `spread_...`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import torch
from torch import nn

import gpumix
from common import Figures, make_parser, print_figures
from compared.curves import Case, Optimizers, Share, engine_curve, single_curves, worst_difference
from compared.setting import Model
from compared.where import where_time_goes
from emulated.results import aligned
from gpumix.engine.comm.step_recorder import RecordedStep
from gpumix.engine.engine import Engine
from gpumix.engine.sharding.unit_discovery import split_into_units

LEARNING_RATE = 1e-3
ADAFACTOR_RATE = 1e-2  # torch's own default: it is relative to the size of a weight
SHARES = (Share(5, 2, 0.2), Share(2, 2, 0.5), Share(1, 1, 0.3))
BATCH = sum(share.samples for share in SHARES)
WHOLE, CUT = BATCH, 3  # the truth's micro-batches, and those that it is compared with
# CPUs are slow in fp16: 2 to 4 GFLOP/s.
SMALL = Model(width=64, layers=4, vocabulary=256, sequence=32)
LARGER = Model(width=128, layers=4, vocabulary=256, sequence=32)
EARLY = 5


def adamw(model: nn.Module) -> Optimizers:
    return [torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)]


def adamw_of_pieces(engine: Engine) -> torch.optim.Optimizer:
    return torch.optim.AdamW(engine.parameters(), lr=LEARNING_RATE, fused=True)


def adafactor(model: nn.Module) -> Optimizers:
    return [torch.optim.Adafactor(model.parameters(), lr=ADAFACTOR_RATE)]


def adafactor_of_pieces(engine: Engine) -> torch.optim.Optimizer:
    return gpumix.Adafactor(engine.parameters(), engine.layout(), lr=ADAFACTOR_RATE)


def muon(model: nn.Module) -> Optimizers:
    """Muon for the matrices of the blocks, AdamW for all else."""
    blocks = [p for unit in split_into_units(model).units for p in unit.module.parameters()]
    matrices = [p for p in blocks if p.dim() == 2]
    of_muon = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in of_muon]
    return [
        torch.optim.Muon(matrices, lr=LEARNING_RATE, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=LEARNING_RATE, weight_decay=0.1),
    ]


def muon_of_pieces(engine: Engine) -> torch.optim.Optimizer:
    return gpumix.Muon(
        engine.parameters(),
        engine.layout(),
        lr=LEARNING_RATE,
        weight_decay=0.1,
        adjust_lr_fn="match_rms_adamw",
    )


CASES = (
    Case("bf16", LARGER, SHARES, adamw, adamw_of_pieces, "bf16"),
    Case("fp16", SMALL, SHARES, adamw, adamw_of_pieces, "fp16"),
    Case("adafactor", LARGER, SHARES, adafactor, adafactor_of_pieces),
    Case("muon", LARGER, SHARES, muon, muon_of_pieces),
)
NEEDS = {"adafactor": "Adafactor", "muon": "Muon"}  # what gpumix must have for a case


def main() -> None:
    arguments = _arguments()
    begun = time.perf_counter()
    errors: dict[str, float] = {}
    spreads: dict[str, float] = {}
    rows: list[Sequence[str]] = [
        ("case", "error", "spread", f"first {EARLY} steps", "truth", "ours ends at")
    ]
    recorded: dict[str, list[RecordedStep]] = {}
    for case in CASES:
        if case.name not in arguments.only:
            continue
        if not hasattr(gpumix, NEEDS.get(case.name, "prepare")):
            print(f"{case.name} left out: there is no gpumix.{NEEDS[case.name]}")
            continue
        truth, other = single_curves(case, arguments.steps, (WHOLE, CUT))
        ours, recorded[case.name] = engine_curve(case, arguments.steps)
        errors[case.name] = worst_difference(ours, truth)
        spreads[case.name] = worst_difference(other, truth)
        rows.append(_row(case.name, errors[case.name], spreads[case.name], ours, truth))
        print(f"{case.name}: {errors[case.name]:.1e}", file=sys.stderr, flush=True)
    print(aligned(rows))
    print(f"\nwhere the time of one step goes\n{where_time_goes(recorded)}\n")
    figures = _figures(errors, spreads) | {"steps": arguments.steps}
    figures["seconds"] = round(time.perf_counter() - begun, 1)
    print_figures(figures, as_json=arguments.json)


def _arguments() -> argparse.Namespace:
    names = [case.name for case in CASES]
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    return parser.parse_args()


def _row(
    name: str, error: float, spread: float, ours: Sequence[float], truth: Sequence[float]
) -> Sequence[str]:
    """Where the error is, and that there was something to learn."""
    early = worst_difference(ours[:EARLY], truth[:EARLY])
    learnt = f"{truth[0]:.3f} to {truth[-1]:.3f}"
    return (name, f"{error:.1e}", f"{spread:.1e}", f"{early:.1e}", learnt, f"{ours[-1]:.3f}")


def _figures(errors: dict[str, float], spreads: dict[str, float]) -> Figures:
    figures: Figures = {f"error_{name}": error for name, error in errors.items()}
    figures |= {f"spread_{name}": spread for name, spread in spreads.items()}
    for name in ("bf16", "fp16"):
        if name in errors:
            figures[f"worst_relative_error_{name}"] = errors[name]
    of_optimizers = [errors[name] for name in NEEDS if name in errors]
    if of_optimizers:
        figures["worst_relative_error_optimizers"] = max(of_optimizers)
    return figures


if __name__ == "__main__":
    main()
