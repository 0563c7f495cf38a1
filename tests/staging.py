"""Plans of several stages, made by hand, and training by them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from gpumix.engine.deferred import build
from gpumix.engine.objective import objective_of
from gpumix.engine.prepare import prepare, switch_off_caches
from gpumix.engine.units import dissect
from gpumix.profiler.flows import Flows, find_flows
from gpumix.profiler.specimen import Specimens
from gpumix.spec.plan import Plan, Stage, Worker
from harness import run_ranks
from models import ARCHITECTURES
from reference import SEED, Share, Trained, batches, joined, optimizer_for, pieces_of


class Row(NamedTuple):
    """A stage: how many unit calls it computes, and each worker's part."""

    calls: int
    shares: tuple[Share, ...]


@cache
def flows_of(name: str, *, in_chunks: bool = False) -> Flows:
    """What the calls of an architecture's model need of each other."""
    architecture = ARCHITECTURES[name]
    model = build(architecture.factory, 0)
    switch_off_caches(model)
    specimens = Specimens(
        model,
        dissect(model),
        device=torch.device("cpu"),
        compute_dtype=torch.float32,
        objective=objective_of(model),
    )
    batch = architecture.batch(2, torch.Generator().manual_seed(0))
    return find_flows(specimens, batch, in_chunks=in_chunks)


def staged_plan(name: str, rows: Sequence[Row], **settings: Any) -> Plan:
    """A plan whose devices are numbered from stage to stage."""
    anatomy = dissect(build(ARCHITECTURES[name].factory, SEED))
    calls = [unit.name for unit in anatomy.units]
    needs = flows_of(name).needs
    stages, begin, device = [], 0, 0
    for row in rows:
        workers = []
        for share in row.shares:
            workers.append(
                Worker(
                    device=f"d{device}",
                    device_class="cpu",
                    samples=share.samples,
                    micro_batch=share.micro_batch,
                    state_share=share.state / sum(s.state for s in row.shares),
                    mode=share.mode,
                    kept_graphs=share.kept,
                )
            )
            device += 1
        end = begin + row.calls
        wanted = [*needs[begin:end], *(needs[-1:] if end == len(calls) else ())]
        root = dict.fromkeys(name for one in wanted for name in one.root)
        takes = dict.fromkeys(t for one in wanted for t in one.outputs if t.call < begin)
        stages.append(
            Stage(
                units=tuple(calls[begin:end]),
                workers=tuple(workers),
                root=tuple(root),
                takes=tuple(takes),
            )
        )
        begin = end
    assert begin == len(calls)
    return Plan(
        strategy="test",
        model=anatomy.fingerprint(),
        sequence_length=1,
        global_batch=sum(share.samples for share in rows[0].shares),
        stages=tuple(stages),
        **settings,
    )


def train_in_stages(
    name: str, rows: Sequence[Row], steps: int, **settings: Any
) -> tuple[list[Trained], Trained]:
    """Train on ranks: what each rank saw, and what all came to."""
    world = sum(len(row.shares) for row in rows)
    plan = staged_plan(name, rows, **settings)
    results = run_ranks(_train_rank, world, name, plan.model_dump_json(), steps)
    weights = joined([pieces for _, pieces in results])
    return [Trained(losses, weights) for losses, _ in results], Trained(results[0][0], weights)


def _train_rank(name: str, plan_json: str, steps: int) -> tuple[list[float], Any]:
    architecture, plan = ARCHITECTURES[name], Plan.model_validate_json(plan_json)
    engine = prepare(build(architecture.factory, SEED), plan)
    optimizer = optimizer_for(engine.parameters())
    rows = plan.rows_of(engine.comm.rank)
    losses = []
    for batch in batches(architecture, plan.global_batch, steps):
        optimizer.zero_grad()
        own = {k: v[rows.start : rows.stop] for k, v in batch.items()}
        losses.append(engine.step(own).item())
        optimizer.step()
    return losses, pieces_of(engine)
