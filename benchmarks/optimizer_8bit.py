"""Whether AdamW in 8 bits trains alike, to the bit, by any plan.

A small Llama trains by plans that differ in ranks, shares of the state, ZeRO stage, order, offload,
hosts that repeat the state, and pipeline stages; some stop in the middle, and another plan goes on
from the checkpoint, or a running engine takes another plan. Each batch is two micro-batches of one
sample, wherever they are computed: a sum of two gradients is the same in any order, so that the
optimizer alone can tell plans apart. Losses and final weights are compared with those of one rank.

Other cuts of a batch sum gradients in another order. What AdamW in 8 bits makes of that rounding is
compared with AdamW in fp32, by the same plans: three ranks with six samples, in micro-batches of
two.

    python benchmarks/optimizer_8bit.py [--json] [--steps 12]
    python benchmarks/optimizer_8bit.py --device cuda [--json] [--steps 12]    # on one GPU

Figures: `plans`; `worst_relative_error_between_plans` of any loss and `different_weights`, elements
whose bits differ, over all plans; `state_bytes_per_parameter` of a rank with all state;
`relative_error_of_other_sums` and `..._fp32`; `relative_error_to_fp32`, of the last loss;
`seconds_per_1e6_parameters` of a step on one core, and `..._fp32` of torch's fused AdamW.
On a GPU no plans are compared: `different_from_cpu` counts bytes of weights and states that differ
from the CPU's after the same gradients, and the seconds are those of the GPU.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import gpumix
from common import Figures, make_parser, print_figures
from compared.curves import worst_difference
from compared.setting import Model
from gpumix.engine.engine import Engine
from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import PLAIN, Mode, Stage, StageInput, Worker
from gpumix.testing import Share, plan_for

MODEL = Model(width=128, layers=3, vocabulary=500, sequence=32)
RATES = {"lr": 2e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
SAMPLES = 2
BOTTOM, TOP = ("model.embed_tokens.weight",), ("model.norm.weight", "lm_head.weight")


@dataclass(frozen=True)
class Run:
    """A plan, and from the middle another one: of the running engine, or after a checkpoint."""

    name: str
    plan: Plan
    then: Plan | None = None
    resumes: bool = False
    fp32: bool = False


@dataclass
class Ended:
    """Losses of a run, and its weights by name."""

    losses: list[float]
    weights: dict[str, np.ndarray] = field(default_factory=dict)


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    if device.type != "cpu":
        return _compare_with_cpu(device, arguments.steps, as_json=arguments.json)
    begun = time.perf_counter()
    runs = list_runs()
    first, *others = (_execute(run, arguments.steps) for run in runs)
    errors, different = [], 0
    for run, ended in zip(runs[1:], others):
        errors.append(worst_difference(ended.losses, first.losses))
        apart = sum(
            int((ended.weights[name].view(np.int32) != value.view(np.int32)).sum())
            for name, value in first.weights.items()
        )
        different += apart
        print(f"{run.name}: {errors[-1]:.1e}, {apart} elements differ", file=sys.stderr, flush=True)
    figures: Figures = {
        "plans": len(runs),
        "steps": arguments.steps,
        "first_loss": first.losses[0],
        "last_loss": first.losses[-1],
        "worst_relative_error_between_plans": max(errors),
        "different_weights": different,
        "state_bytes_per_parameter": _state_bytes(),
        **_compare_other_sums(arguments.steps),
        **_time_steps(device),
        "seconds": round(time.perf_counter() - begun, 1),
    }
    print_figures(figures, as_json=arguments.json)
    return int(max(errors) > 0 or different > 0)


def _arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--device", default="cpu", help="cpu, or the GPU to compare with it: cuda")
    return parser.parse_args()


# -- plans -----------------------------------------------------------------------------------------


def list_runs() -> list[Run]:
    """One rank first."""
    draw = random.Random(5)
    model = MODEL.build()
    runs = [Run("one rank", _flat(model, [(2, 1)], zero_stage=3))]
    for zero_stage in (0, 1, 2, 3):
        for world in (2, 3, 4):
            runs.append(
                Run(f"{world} ranks, ZeRO {zero_stage}", _drawn(model, world, zero_stage, draw))
            )
    sequential = Mode(order="sequential")
    runs += [
        Run("sequential", _flat(model, [(1, 3), (1, 2)], zero_stage=1, mode=sequential)),
        Run(
            "graphs kept", _flat(model, [(1, 3), (1, 2)], zero_stage=2, mode=Mode(recompute=False))
        ),
        Run("state on hosts", _flat(model, [(2, 1), (0, 3)], zero_stage=3, on_host=[0, 1])),
        Run("one on its host", _flat(model, [(1, 5), (1, 2), (0, 1)], zero_stage=2, on_host=[1])),
        Run("hosts repeat", _by_hosts(model)),
        Run("two stages", _staged(model, [[(2, 1)], [(2, 1)]], zero_stage=1)),
        Run("three stages", _staged(model, [[(2, 1)], [(2, 1)], [(2, 1)]], zero_stage=0)),
        Run("ragged stages", _staged(model, [[(1, 3), (1, 1)], [(2, 1), (0, 2)]], zero_stage=3)),
    ]
    some = [_flat(model, [(1, a), (1, b), (0, c)], zero_stage=2) for a, b, c in
            ((1, 2, 3), (0, 5, 1), (4, 0, 1))]  # fmt: skip
    stages = _staged(model, [[(2, 1)], [(1, 2), (1, 1)]], zero_stage=1)
    runs += [
        Run("moved while it trains", some[0], some[1]),
        Run("moved to ranks without state", some[1], some[2]),
        Run("resumed by other shares", some[2], some[0], resumes=True),
        Run("resumed by two stages", some[0], stages, resumes=True),
        Run("resumed from two stages", stages, some[1], resumes=True),
    ]
    return runs


def _flat(model: nn.Module, parts: Sequence[tuple[int, int]], **settings: Any) -> Plan:
    """Of one stage: samples and relative share of the state of each rank."""
    mode = settings.pop("mode", PLAIN)
    shares = [Share(n, min(n, 1), state, mode) for n, state in parts]
    return _plan_for(model, shares, **settings)


def _plan_for(model: nn.Module, shares: Sequence[Share], **settings: Any) -> Plan:
    settings = {"optimizer_state": "8bit", "sequence_length": MODEL.sequence, **settings}
    return plan_for(model, shares, **settings)


def _drawn(model: nn.Module, world: int, zero_stage: int, draw: random.Random) -> Plan:
    """A plan of random shares; some are zero."""
    samples = [0] * world
    for _ in range(SAMPLES):
        samples[draw.randrange(world)] += 1
    states = [draw.randint(0, 9) for _ in range(world)]
    states[draw.randrange(world)] += 1
    return _flat(model, list(zip(samples, states)), zero_stage=zero_stage)


def _by_hosts(model: nn.Module) -> Plan:
    parts = [(1, 3, "a"), (1, 1, "a"), (0, 2, "b"), (0, 5, "b")]
    shares = [Share(n, min(n, 1), state, host=host) for n, state, host in parts]
    return _plan_for(model, shares, sharding="host", zero_stage=3)


def _staged(model: nn.Module, stages: Sequence[Sequence[tuple[int, int]]], **settings: Any) -> Plan:
    anatomy = split_into_units(model)
    names, count = [unit.name for unit in anatomy.units], len(stages)
    ends = [len(names) * n // count for n in range(count + 1)]
    made, device = [], 0
    for number, parts in enumerate(stages):
        total, workers = sum(state for _, state in parts), []
        for samples, state in parts:
            workers.append(
                Worker(
                    device=f"d{device}",
                    device_class="cpu",
                    samples=samples,
                    micro_batch=min(samples, 1),
                    state_share=state / total,
                )
            )
            device += 1
        made.append(
            Stage(
                units=tuple(names[ends[number] : ends[number + 1]]),
                workers=tuple(workers),
                takes=(StageInput(call=ends[number] - 1, output=0),) if number else (),
                root=(BOTTOM if number == 0 else ()) + (TOP if number == count - 1 else ()),
            )
        )
    return Plan(
        strategy="by hand",
        model=anatomy.fingerprint(),
        sequence_length=MODEL.sequence,
        global_batch=SAMPLES,
        stages=tuple(made),
        optimizer_state="8bit",
        **settings,
    )


# -- training --------------------------------------------------------------------------------------


def _execute(run: Run, steps: int) -> Ended:
    from helpers.processes.harness import run_ranks
    from helpers.training.reference import joined

    cut = steps // 2 if run.then is not None else steps
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(
            _train, len(run.plan.workers), run, Path(folder), (0, cut, steps), timeout_s=300
        )
        if run.resumes:
            assert run.then is not None
            losses = ranks[0][0]
            ranks = run_ranks(
                _go_on, len(run.then.workers), run, Path(folder), (cut, steps), timeout_s=300
            )
            return Ended(losses + ranks[0][0], joined([pieces for _, pieces in ranks]))
    return Ended(ranks[0][0], joined([pieces for _, pieces in ranks]))


def _train(run: Run, folder: Path, steps: tuple[int, int, int]) -> tuple[list[float], Any]:
    from helpers.training.checkpoints import checkpointer
    from helpers.training.reference import pieces_of

    begin, cut, end = steps
    engine = _engine(run.plan)
    optimizer = _optimizer(engine, fp32=run.fp32)
    losses = _steps(engine, optimizer, range(begin, cut))
    if run.resumes:
        checkpointer(folder).save(cut, engine, optimizer, cursor={})
    elif run.then is not None:
        engine.replan(run.then, optimizer)
        losses += _steps(engine, optimizer, range(cut, end))
    return losses, pieces_of(engine)


def _go_on(run: Run, folder: Path, steps: tuple[int, int]) -> tuple[list[float], Any]:
    from helpers.training.checkpoints import checkpointer
    from helpers.training.reference import pieces_of

    assert run.then is not None
    engine = _engine(run.then)
    optimizer = _optimizer(engine)
    checkpointer(folder).load(engine, optimizer)
    return _steps(engine, optimizer, range(*steps)), pieces_of(engine)


def _engine(plan: Plan) -> Engine:
    from helpers.training.known_losses import known_loss

    model = MODEL.build()
    return gpumix.prepare(model, plan, loss=known_loss(model))


def _optimizer(engine: Engine, *, fp32: bool = False) -> torch.optim.Optimizer:
    if fp32:
        return torch.optim.AdamW(engine.parameters(), **RATES)
    optimizer = gpumix.AdamW8bit(engine.parameters(), **RATES)
    engine.check_optimizer(optimizer)
    return optimizer


def _steps(engine: Engine, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses, batch = [], engine.plan.global_batch
    own = [n for rows in engine.plan.rows_of(engine.comm.rank) for n in rows]
    for step in steps:
        rows = MODEL.rows(step * batch, batch)
        loss = engine.step({name: value[own] for name, value in rows.items()})
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


# -- beside ----------------------------------------------------------------------------------------


def _compare_other_sums(steps: int) -> Figures:
    """Train three ranks with other sums of gradients, and one rank, in 8 bits and in fp32."""
    found: dict[bool, list[list[float]]] = {}
    for fp32 in (False, True):
        state = "fp32" if fp32 else "8bit"
        shares = [[Share(3, 2, 3), Share(2, 2, 1), Share(1, 1, 2)], [Share(6, 6, 1)]]
        plans = [_plan_for(MODEL.build(), some, optimizer_state=state) for some in shares]
        found[fp32] = [_execute(Run("", plan, fp32=fp32), steps).losses for plan in plans]
    return {
        "relative_error_of_other_sums": worst_difference(*found[False]),
        "relative_error_of_other_sums_fp32": worst_difference(*found[True]),
        "relative_error_to_fp32": abs(found[False][1][-1] / found[True][1][-1] - 1),
    }


def _state_bytes() -> float:
    model = MODEL.build()
    optimizer = gpumix.AdamW8bit(model.parameters(), **RATES)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    held = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in held) / sum(p.numel() for p in model.parameters())


def _compare_with_cpu(device: torch.device, steps: int, *, as_json: bool) -> int:
    """Print how the optimizer on one GPU differs from the same on the CPU; return the exit code."""
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU here")
    here, there = _update(torch.device("cpu"), steps), _update(device, steps)
    different = sum(int((a != b).sum()) for a, b in zip(here, there, strict=True))
    figures: Figures = {
        "device": torch.cuda.get_device_name(device),
        "steps": steps,
        "different_from_cpu": different,
        **_time_steps(device),
    }
    print_figures(figures, as_json=as_json)
    return int(different > 0)


def _update(device: torch.device, steps: int) -> list[torch.Tensor]:
    """Return weights and states after the same gradients on any device, as bytes on the host."""
    draw = torch.Generator().manual_seed(1)
    p = nn.Parameter(torch.randn(2**20, generator=draw).to(device))
    optimizer = gpumix.AdamW8bit([p], **RATES)
    for _ in range(steps):
        p.grad = torch.randn(p.numel(), generator=draw).to(device)
        optimizer.step()
    held = [p.detach(), *(optimizer.state[p][name] for name in sorted(optimizer.state[p]))]
    return [value.cpu().reshape(-1).view(torch.uint8) for value in held]


def _time_steps(device: torch.device) -> Figures:
    """Time a step of 4 million parameters: on one core, or on a GPU."""
    figures: Figures = {}
    for name, kind in (("", gpumix.AdamW8bit), ("_fp32", torch.optim.AdamW)):
        p = nn.Parameter(torch.randn(2**22, device=device))
        p.grad = torch.randn_like(p)
        optimizer = kind([p], **RATES, **({"fused": True} if name else {}))
        seconds = []
        for _ in range(6):
            begun = time.perf_counter()
            optimizer.step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - begun)
        figures[f"seconds_per_1e6_parameters{name}"] = min(seconds[1:]) / p.numel() * 1e6
    return figures


if __name__ == "__main__":
    sys.exit(main())
