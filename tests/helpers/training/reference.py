"""A model trained by one process and by a plan, and how far apart the two end.

The single process is plain PyTorch: the model's own mean loss on the whole batch. Both start from
the values of the model's own initialiser and see the same batches.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from gpumix.engine.comm.host_staged import StagedCommunicator
from gpumix.engine.engine import Engine
from gpumix.engine.loss.reduction import SUM_AND_COUNT, Objective, SummedLoss
from gpumix.engine.model.deferred_init import build
from gpumix.engine.prepare import prepare
from gpumix.engine.sharding.initial_weights import make_source
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import PLAIN, Mode
from gpumix.testing import Share, plans
from helpers.processes.harness import run_ranks
from helpers.training.known_losses import known_loss
from helpers.training.models import ARCHITECTURES, LENGTH, Architecture, Batch, mean_loss

Array = np.ndarray
Key = TypeVar("Key", bound=Hashable)
SEED = 7
# A bias whose true gradient is zero (that of a key, which softmax cannot see) starts at zero and is
# moved by rounding alone; two roundings share no digit. So an error is taken relative to the
# tensor's root mean square or, where that is smaller, to this: far less than any weight that is
# trained.
SMALLEST_WEIGHT = 1e-4
# The same for gradients, as a part of the root mean square of all of them.
SMALLEST_GRADIENT = 1e-3


Case = tuple[str, Sequence[Share], Mapping[str, Any]]
"""An architecture, the shares of ranks, and more of the plan."""


@dataclass
class Trained:
    """What training ended with, and the collectives of each step on each rank."""

    losses: list[float]
    weights: dict[str, Array]
    counts: list[dict[str, int]] = field(default_factory=list)
    expected_counts: dict[str, int] = field(default_factory=dict)


def optimizer_for(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum, without clipping: a gradient that is wrong by a factor shows, which AdamW
    and clipping hide; and the rounding of a gradient near zero stays small, which AdamW, dividing
    each gradient by its own size, blows up to a full step. Five such steps move the weights by 0.5
    to 50 percent."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


# -- plans -----------------------------------------------------------------------------------------


def plan_for(model: nn.Module, shares: Sequence[Share], **settings: Any) -> Plan:
    """A plan of one stage for samples of `LENGTH` tokens; see `gpumix.testing.plan_for`."""
    return plans.plan_for(model, shares, **{"sequence_length": LENGTH, **settings})


def random_shares(world: int, rng: random.Random) -> list[Share]:
    """Uneven parts: samples 0 to 5 in micro-batches of any size, state 0 to 3."""
    while True:
        shares = []
        for _ in range(world):
            samples = rng.randint(0, 5)
            shares.append(Share(samples, rng.randint(min(1, samples), samples), rng.randint(0, 3)))
        if any(s.samples for s in shares) and any(s.state for s in shares):
            return shares


def in_hosts(*states: int) -> list[Share]:
    """Two ranks on each of two hosts."""
    return [Share(n + 1, 2 if n else 1, states[n], host="ab"[n // 2]) for n in range(4)]


# -- training --------------------------------------------------------------------------------------


def batches(architecture: Architecture, size: int, steps: int) -> Iterator[Batch]:
    """The global batches of a run."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        yield architecture.batch(size, generator)


def own_rows(batch: Any, shares: Sequence[Share], rank: int) -> Any:
    """A rank's part of a global batch."""
    begin = sum(share.samples for share in shares[:rank])
    return {k: v[begin : begin + shares[rank].samples] for k, v in batch.items()}


def initialised(factory: Callable[[], nn.Module]) -> nn.Module:
    """An ordinary model with the values that `build` gives to the same factory."""
    deferred = build(factory, SEED)
    value = make_source(deferred)
    model = factory()
    with torch.no_grad():
        for (name, parameter), recipe in zip(
            model.named_parameters(), deferred.parameters(), strict=True
        ):
            parameter.copy_(value(name, recipe, 0, recipe.numel()).view(recipe.shape))
    config = getattr(model, "config", None)
    if config is not None:
        config.use_cache = False
    return model


@cache
def train_alone(architecture: Architecture, size: int, steps: int) -> Trained:
    """The same as `train_plainly`, once, whoever asks."""
    return train_plainly(architecture.factory, batches(architecture, size, steps))


def train_plainly(factory: Callable[[], nn.Module], every: Iterable[Batch]) -> Trained:
    """Train on whole batches in this process, without any of gpumix."""
    model = initialised(factory)
    optimizer = optimizer_for(model.parameters())
    losses = []
    for batch in every:
        optimizer.zero_grad()
        loss = mean_loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, {n: p.detach().numpy() for n, p in model.named_parameters()})


def train_by_plan(
    name: str, shares: Sequence[Share], steps: int, *, backend: str = "gloo", **settings: Any
) -> Trained:
    """Train on ranks as a plan with these shares, and `settings`, says."""
    case = name, shares, settings
    ranks = run_ranks(_train_each, len(shares), [case], steps, backend=backend)
    return _trained([of_rank for (of_rank,) in ranks])


def train_by_plans(cases: Mapping[Key, Case], steps: int) -> dict[Key, Trained]:
    """The same of several, by what they are called; ranks of as many are started once."""
    found = {}
    for world in sorted({len(shares) for _, shares, _ in cases.values()}):
        alike = {key: case for key, case in cases.items() if len(case[1]) == world}
        time_s = max(60.0, 10.0 * len(alike))
        ranks = run_ranks(_train_each, world, [*alike.values()], steps, timeout_s=time_s)
        found |= {key: _trained(of_ranks) for key, of_ranks in zip(alike, zip(*ranks))}
    return found


def _trained(results: Sequence[tuple[Any, ...]]) -> Trained:
    return Trained(
        results[0][0],
        joined([pieces for _, pieces, _, _ in results]),
        [count for _, _, counts, _ in results for count in counts],
        results[0][3],
    )


def _train_each(cases: Sequence[Case], steps: int) -> list[tuple[Any, ...]]:
    return [_train_rank(name, shares, steps, settings) for name, shares, settings in cases]


def _train_rank(
    name: str, shares: Sequence[Share], steps: int, settings: Mapping[str, Any]
) -> tuple[Any, ...]:
    architecture = ARCHITECTURES[name]
    engine = engine_for(architecture.factory, shares, **settings)
    optimizer = optimizer_for(engine.parameters())
    losses, counts = [], []
    for batch in batches(architecture, sum(s.samples for s in shares), steps):
        before = engine.comm.counts.copy()
        optimizer.zero_grad()
        loss = engine.step(own_rows(batch, shares, engine.comm.rank))
        counts.append(dict(engine.comm.counts - before))
        optimizer.step()
        losses.append(loss.item())
    return losses, pieces_of(engine), counts, expected_counts(engine)


def expected_counts(engine: Engine) -> dict[str, int]:
    """The collectives of a later step, whatever the micro-batches.

    At stage 3 every run of calls of one bucket is gathered forward and backward, but for the last
    one, which stays between the passes; the root's buckets once. At stages 1 and 2 what is trained
    is gathered once. Every group that is trained is reduced once, and once more over hosts. All of
    that in each wave, but that what stays gathered is not gathered again.
    """
    parts, stage, waves = engine._parts, engine.plan.zero_stage, engine.plan.waves
    trained = sum(len(bucket.trainable) for bucket in parts.buckets)
    counts = Counter({"exchange": 1})
    if engine.comm.world > 1:
        counts["flags"] = 1
    if stage == 0:
        counts["all_reduce"] = trained
        return dict(counts)
    counts["gather"], counts["reduce"] = trained, waves * trained
    if stage == 3:
        called = [parts.units[name].bucket for name in parts.calls]
        runs = [bucket for bucket, _ in groupby(called)]
        twice = sum(len(bucket.groups) for bucket in [*runs, *runs[:-1]])
        ends = sum(len(bucket.groups) for bucket in (parts.before, parts.after))
        kept = sum(len(bucket.groups) for bucket in parts.always_used_buckets)
        counts["gather"] = kept + waves * (twice + ends)
    if engine.plan.sharding == "host" and parts.layout.copies is not None:
        hosts = dict.fromkeys(w.host for w in engine.plan.workers)
        cuts = {tuple(w.state_share for w in engine.plan.workers if w.host == h) for h in hosts}
        counts["all_reduce" if len(cuts) == 1 else "exchange_parts"] += waves * trained
    return dict(counts)


Pieces = list[tuple[str, tuple[int, ...], tuple[int, ...], Array]]


def computed_in(engine: Engine) -> set[torch.dtype]:
    """The dtypes of the parameters that a rank computes with."""
    return {view.dtype for group in engine.groups() for view in group.views}


def pieces_of(
    engine: Engine, gradients: bool = False, only: Collection[str] | None = None
) -> Pieces:
    """A rank's part of all parameters, or of these, or of their gradients, to be sent to the
    parent."""
    found = []
    for piece in engine.pieces():
        if only is not None and piece.name not in only:
            continue
        tensor = piece.local.grad if gradients else piece.local
        if tensor is not None:
            for (offset, _), part in piece.window.boxes(piece.start, tensor.detach().cpu()):
                found.append((piece.name, tuple(piece.shape), offset, part.numpy()))
    return found


def joined(of_ranks: Sequence[Pieces]) -> dict[str, Array]:
    """Whole tensors from all ranks' pieces; what nobody has is nan."""
    whole: dict[str, Array] = {}
    for pieces in of_ranks:
        for name, shape, offset, values in pieces:
            tensor = whole.setdefault(name, np.full(shape, np.nan, values.dtype))
            tensor[tuple(slice(at, at + n) for at, n in zip(offset, values.shape))] = values
    return whole


# -- one step --------------------------------------------------------------------------------------


def engine_for(
    factory: Callable[[], nn.Module],
    shares: Sequence[Share],
    *,
    calls: Sequence[str] = (),
    units: Sequence[str] = (),
    loss: Objective | None = None,
    weights: Path | None = None,
    staged_on: str = "",
    **settings: Any,
) -> Engine:
    """The engine of a freshly built model, in a single process or on the ranks of a group."""
    model = build(factory, SEED)
    plan = plan_for(model, shares, calls=calls, units=units, **settings)
    comm = through_host(staged_on) if staged_on else None
    known = known_loss(model) if loss is None else SummedLoss(loss, SUM_AND_COUNT)
    return prepare(model, plan, comm=comm, units=units, loss=known, weights=weights)


def through_host(device: str) -> StagedCommunicator:
    """All ranks, which may share the device."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return StagedCommunicator(dist.group.WORLD, rank=rank, world=world, device=device)


def engine_alone(
    factory: Callable[[], nn.Module],
    samples: int,
    micro_batch: int,
    *,
    mode: Mode = PLAIN,
    **settings: Any,
) -> Engine:
    """The engine of a plan for one rank: `engine_for`'s settings."""
    return engine_for(factory, [Share(samples, micro_batch, 1, mode)], **settings)


def plain_step(factory: Callable[[], nn.Module], batch: Batch) -> tuple[float, dict[str, Array]]:
    """Loss and gradients of one step without gpumix; a parameter without gradient is left out."""
    model = initialised(factory)
    loss = mean_loss(model, batch)
    loss.backward()
    return loss.item(), {
        n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None
    }


def assert_step_is_plain(engine: Engine, factory: Callable[[], nn.Module], batch: Batch) -> None:
    """One step of a single-rank engine gives the loss and gradients of plain PyTorch."""
    loss, expected = plain_step(factory, batch)
    assert abs(engine.step(batch).item() / loss - 1) < 1e-5
    found = joined([pieces_of(engine, gradients=True)])
    assert_gradients_equal(found, expected)


def assert_ranks_step_plainly(
    factory: Callable[[], nn.Module], shares: Sequence[Share], batch: Batch, **settings: Any
) -> None:
    """One step of a rank for each of the shares gives the loss and gradients of plain PyTorch."""
    loss, expected = plain_step(factory, batch)
    losses, gradients = step_on_ranks(factory, shares, batch, **settings)
    assert max(abs(found / loss - 1) for found in losses) < 1e-5
    assert_gradients_equal(gradients, expected)


def step_on_ranks(
    factory: Callable[[], nn.Module], shares: Sequence[Share], batch: Batch, **settings: Any
) -> tuple[list[float], dict[str, Array]]:
    """The loss on each rank, and all gradients, of one step with these parts of a batch."""
    found = run_ranks(_step_rank, len(shares), factory, shares, batch, settings)
    losses, gradients = zip(*found, strict=True)
    return list(losses), joined(gradients)


def _step_rank(
    factory: Callable[[], nn.Module],
    shares: Sequence[Share],
    batch: Batch,
    settings: Mapping[str, Any],
) -> tuple[float, Pieces]:
    engine = engine_for(factory, shares, **settings)
    loss = engine.step(own_rows(batch, shares, engine.comm.rank)).item()
    return loss, pieces_of(engine, gradients=True)


def assert_gradients_equal(
    found: dict[str, Array], expected: dict[str, Array], tolerance: float = 2e-5
) -> None:
    """The engine has a zero gradient where plain PyTorch may have none."""
    for name in found.keys() - expected.keys():
        assert not found[name].any(), name
    size = sum(g.size for g in expected.values())
    rms = np.sqrt(sum(np.sum(np.square(g)) for g in expected.values()) / size)
    errors = tensor_errors({n: found[n] for n in expected}, expected, floor=SMALLEST_GRADIENT * rms)
    assert max(errors.values()) < tolerance, errors


# -- comparison ------------------------------------------------------------------------------------


def worst_error(trained: Trained, reference: Trained) -> float:
    """The larger of the worst relative error of a step's loss, and of a parameter's norm."""
    losses = np.array(trained.losses), np.array(reference.losses)
    return max(
        float(np.max(np.abs(losses[0] - losses[1]) / np.abs(losses[1]))),
        max(tensor_errors(trained.weights, reference.weights).values()),
    )


def tensor_errors(
    values: dict[str, Array], references: dict[str, Array], floor: float = SMALLEST_WEIGHT
) -> dict[str, float]:
    """Each tensor's ||value - reference|| / ||reference||, whose root mean square is taken to be no
    less than `floor`."""
    assert values.keys() == references.keys()
    errors = {}
    for name, reference in references.items():
        least = floor * np.sqrt(reference.size)
        distance = np.linalg.norm(values[name] - reference)
        error = float(distance / max(np.linalg.norm(reference), least))
        errors[name] = math.inf if math.isnan(error) else error  # which no maximum hides
    return errors
