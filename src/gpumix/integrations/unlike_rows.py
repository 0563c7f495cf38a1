"""Whether what a model returns in evaluation is a row for each sample, whatever is beside it.

A batch is evaluated in micro-batches, and each rank has a part of it. So a few samples are computed
at once and in two parts, before what a model returns is told as that of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpumix.engine.coroutine import ModelError
from gpumix.engine.engine import Engine
from gpumix.engine.rehearsed_models import refuse_any
from gpumix.engine.rehearsed_samples import exchanged
from gpumix.engine.rehearsed_trials import tolerance_of
from gpumix.integrations.loop_outputs import differentiable, joined
from gpumix.spec.errors import InputError


class Returned(NamedTuple):
    """
    Attributes:
        outputs: a tree of tensors with a row for each sample.
        loss: the sum and the count, [2]; zeros if there is none.
    """

    outputs: Any
    loss: Tensor


def refuse_unlike_rows(
    engine: Engine,
    function: Callable[[nn.Module, Any], Returned],
    batch: Any,
    samples: int | None = None,
) -> None:
    """Compare a few samples of a batch with parts of them. Collective. Nothing is said of a model
    that draws random numbers in evaluation, nor where coupling is accepted.

    Args:
        function: is called with the model and a micro-batch.
        batch, samples: as `Engine.evaluate` takes them.

    Raises:
        ModelError: what the model returns for a sample depends on others.
    """

    def made(*, start: int = 0) -> list[Returned]:
        return engine.in_parts(function, batch, samples, start=start)

    if engine.accepts_coupling:
        return
    found = made()
    apart = not found or _are_apart(engine, *found)
    if all(is_apart for (is_apart,) in exchanged(engine, [float(apart)])):
        return
    pairs = zip(found[:1], made(start=1))
    draws = any(not _is_same(one, other) for one, other in pairs)
    if any(one for (one,) in exchanged(engine, [float(draws)])):
        return
    error = ModelError(
        "in evaluation, what the model returns for a sample depends on other samples",
        where=type(engine.model).__name__,
        why="a batch is computed in micro-batches, and each rank has a part of it",
        fix="return a row for each sample, or train by a plan that does not cut batches",
    )
    refuse_any(engine, None if apart else error)


def _are_apart(engine: Engine, whole: Returned, *parts: Returned) -> bool:
    of_loss, of_outputs = tolerance_of(engine)
    rows = is_of_rows(whole.outputs, [one.outputs for one in parts], of_outputs)
    return rows and _adds_up(whole.loss, [one.loss for one in parts], of_loss)


def is_of_rows(whole: Any, parts: Sequence[Any], tolerance: float) -> bool:
    """Whether a model returns for some samples at once what it returns for parts of them.

    Args:
        tolerance: relative to the largest value of a tensor.
    """
    try:
        pairs = zip(differentiable(whole), differentiable(joined(parts)), strict=True)
        return all(_are_near(own, one, tolerance) for own, one in pairs)
    except (InputError, ValueError):  # of parts that do not fit together, or are more, or fewer
        return False


def _are_near(own: Tensor, one: Tensor, tolerance: float) -> bool:
    if own.shape != one.shape:
        return False
    own, one = (torch.nan_to_num(each.double()) for each in (own, one))
    return not own.numel() or bool((own - one).abs().max() <= tolerance * own.abs().max())


def _adds_up(whole: Tensor, parts: Sequence[Tensor], tolerance: float) -> bool:
    """Whether the mean loss of parts, [sum, count], is that of the whole."""
    own, one = (
        told[0] / told[1] for told in (whole.double(), torch.stack(list(parts)).double().sum(0))
    )
    return not torch.isfinite(own) or bool((own - one).abs() <= tolerance * own.abs())


def _is_same(one: Returned, other: Returned) -> bool:
    pairs = zip(differentiable(one.outputs), differentiable(other.outputs))
    rows = all(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) for a, b in pairs)
    return rows and torch.equal(torch.nan_to_num(one.loss), torch.nan_to_num(other.loss))
