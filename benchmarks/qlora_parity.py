"""Do adapters on a quantised base train as under stock libraries, and does a plan count its bytes?

    python benchmarks/qlora_parity.py [--json] [--steps 3]

A small Llama in NF4, in NF4 with quantised constants and in int8 (bitsandbytes), with LoRA and with
DoRA (PEFT). One process trains it without gpumix: `from_pretrained` with a `BitsAndBytesConfig`, a
plain loop. The same on 1, 2 and 3 ranks (gloo, loopback) that get unlike parts of the samples and
of the state; in two stages; from a checkpoint of adapters under another plan; through Trainer,
SFTTrainer and Accelerator, of which the import alone is changed; and as jobs, which quantise while
they read.

Figures: `cases`, and `worst_relative_error` over all of them, of a step's loss, and of the tensors
that an engine or a resumed run ends with. `gathered_bytes_per_weight` is what one gather of all
blocks moves for a weight of NF4, constants and all; `constants_counted` says
whether profiles have the bytes that ranks store and gather, to the byte, and all of a weight's
constants among them. Needs bitsandbytes, peft and trl.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import make_parser, print_figures
from gpumix.profiler.api import profile
from gpumix.schema.plan.plan import Plan
from helpers.processes.harness import run_ranks
from helpers.training import quantised as q
from helpers.training.reference import Trained, worst_error

LIMIT, MOST_BYTES = 1e-4, 0.57


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = q.save_base(folder / "base")
        errors = dict(_all_errors(folder, base, arguments.steps))
        for case, error in errors.items():
            print(f"{case}: {error:.1e}", file=sys.stderr)
        bytes_per_weight, counted = _count_bytes(base)
    worst = max(errors.values())
    print_figures(
        {
            "cases": len(errors),
            "worst_relative_error": worst,
            "gathered_bytes_per_weight": round(bytes_per_weight, 4),
            "constants_counted": counted,
        },
        as_json=arguments.json,
    )
    return int(not worst <= LIMIT or bytes_per_weight > MOST_BYTES or not counted)


def _all_errors(folder: Path, base: Path, steps: int) -> Iterator[tuple[str, float]]:
    yield from _of_engines(base, steps)
    yield from _of_resumed(folder, base)
    yield from _of_programs(folder)
    yield from _of_jobs(folder, base)


def _of_engines(base: Path, steps: int) -> Iterator[tuple[str, float]]:
    for kind in q.CONFIGS:
        for dora in (False, True):
            name = f"{kind}, {'DoRA' if dora else 'LoRA'}"
            stock = q.train_stock(base, kind, dora=dora, steps=steps)
            model = q.load_adapted(base, kind, dora=dora)
            plans = {
                f"{world} ranks": q.plan_of(model, shares, zero_stage=3)
                for world, shares in q.SHARES.items()
            }
            plans["two stages"] = q.plan_of_stages(model, [q.BATCH, q.BATCH], zero_stage=1)
            for told, plan in plans.items():
                world = len(Plan.model_validate_json(plan).workers)
                ranks = run_ranks(_train, world, base, kind, plan, dora, steps, timeout_s=300)
                yield f"{name}, {told}", worst_error(q.merged(ranks), stock)


def _train(base: Path, kind: str, plan: str, dora: bool, steps: int) -> Any:
    return q.train_rank(base, kind, plan, dora=dora, steps=steps)


def _of_resumed(folder: Path, base: Path) -> Iterator[tuple[str, float]]:
    """Two steps on two ranks, and two more on three."""
    for kind in q.CONFIGS:
        model = q.load_adapted(base, kind)
        first, second = (q.plan_of(model, q.SHARES[world], zero_stage=3) for world in (2, 3))
        saved = folder / f"resumed-{kind}"
        begun = run_ranks(_begin, 2, base, kind, first, saved, timeout_s=300)
        ended = run_ranks(_go_on, 3, base, kind, second, saved, timeout_s=300)
        found = q.merged(ended)
        found = Trained([*begun[0], *found.losses], found.weights)
        yield (
            f"{kind}, resumed under another plan",
            worst_error(found, q.train_stock(base, kind, steps=4)),
        )


def _begin(base: Path, kind: str, plan: str, saved: Path) -> list[float]:
    from helpers.training.checkpoints import checkpointer

    engine, optimizer = q.engine_for(base, kind, Plan.model_validate_json(plan))
    losses = [q.step(engine, optimizer, number) for number in range(2)]
    checkpointer(saved).save(2, engine, optimizer, cursor={})
    return losses


def _go_on(base: Path, kind: str, plan: str, saved: Path) -> Any:
    from helpers.training.checkpoints import checkpointer

    engine, optimizer = q.engine_for(base, kind, Plan.model_validate_json(plan))
    checkpointer(saved).load(engine, optimizer)
    losses = [q.step(engine, optimizer, number) for number in (2, 3)]
    return losses, q.trained_pieces(engine)


def _of_programs(folder: Path) -> Iterator[tuple[str, float]]:
    from helpers.scripts.quantised_programs import RUN, run_each

    (stock,) = run_ranks(run_each, 1, folder, 1, timeout_s=600)
    ours = run_ranks(run_each, 2, folder, 2, timeout_s=900)
    for program in RUN:
        errors = [_error(rank[program]["losses"], stock[program]["losses"]) for rank in ours]
        yield f"program: {program}", max(errors)


def _of_jobs(folder: Path, base: Path) -> Iterator[tuple[str, float]]:
    from helpers.runs.adapter_jobs import adapter_job, losses, stock_losses
    from helpers.runs.jobs import plan_for, train

    for kind in q.CONFIGS:
        job = adapter_job(folder / f"job-{kind}", base, kind)
        train(job, plan=plan_for(job))
        yield f"{kind}, a job", _error(losses(job), stock_losses(base, job))


def _error(found: list[float], expected: list[float]) -> float:
    wanted = np.array(expected)
    return float(np.max(np.abs(np.array(found) - wanted) / np.abs(wanted)))


def _count_bytes(base: Path) -> tuple[float, bool]:
    """Return the gathered bytes of a weight in NF4, and whether profiles count what is stored."""
    counted, per_weight = True, 0.0
    for kind in q.CONFIGS:
        model = q.load_adapted(base, kind)
        found = profile(
            lambda model=model: q.without_weights(model),
            lambda samples: q.make_batch(0, samples),
            sequence_length=q.LENGTH,
            global_batch_size=2,
            progress=lambda line: None,
        ).model
        sizes = {one.name: one.packed_bytes for one in found.kinds}
        planned = sum(sizes[name] for name in found.kind_of_call) + found.root.packed_bytes
        tensors = sum(
            t.nbytes
            for _, one in q.iterate_quantised_parameters(model)
            for t in one.tensors().values()
        )
        plan = q.plan_of(model, q.SHARES[3], zero_stage=3)
        ranks = run_ranks(_stored_and_gathered, 3, base, kind, plan, timeout_s=300)
        stored, gathered = sum(own for own, _ in ranks), ranks[0][1]
        counted &= planned == stored == gathered and tensors <= planned < 1.02 * tensors
        if kind == "nf4":
            per_weight = gathered / q.weights_of(model)
    return per_weight, counted


def _stored_and_gathered(base: Path, kind: str, plan: str) -> tuple[int, int]:
    """Return the bytes of quantised weights that a rank stores, and that each gathers once."""
    engine, optimizer = q.engine_for(base, kind, Plan.model_validate_json(plan))
    seen: dict[str, int] = {}  # by what is gathered
    gather = type(engine.comm).gather

    def counting(comm: Any, into: torch.Tensor, values: Any, intervals: Any, label: str) -> Any:
        if into.dtype == torch.uint8:
            seen[label] = into.nbytes
        return gather(comm, into, values, intervals, label)

    type(engine.comm).gather = counting  # type: ignore[method-assign]
    q.step(engine, optimizer, 0)
    groups = [group for group in engine.groups() if group.full.dtype == torch.uint8]
    return sum(p.local.nbytes for group in groups for p in group.pieces), sum(seen.values())


def _arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
