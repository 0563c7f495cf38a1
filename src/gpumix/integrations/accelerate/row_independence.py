"""Check of evaluation outputs: a model's rows must not depend on other samples of the batch.

A batch is evaluated in micro-batches, and each rank has a part. So before outputs are used, a few
samples are computed at once and in two parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpumix.engine.engine import Engine
from gpumix.engine.model.forward_coroutine import ModelError
from gpumix.engine.rehearsal.observations import tolerance_of
from gpumix.engine.rehearsal.refusals import refuse_any
from gpumix.engine.rehearsal.samples import all_gather_values
from gpumix.integrations.accelerate.outputs import find_float_tensors, join_outputs
from gpumix.schema.errors import InputError


def check_row_independence(
    engine: Engine,
    function: Callable[[nn.Module, Any], Any],
    batch: Any,
    samples: int | None = None,
) -> None:
    """Compare outputs of a few samples with outputs of parts. Collective. A model drawing random
    numbers in evaluation passes, as any model does if coupling is accepted.

    Args:
        function: is called with the model and a micro-batch; returns a tree of tensors with a row
            per sample.
        batch, samples: as in `Engine.evaluate`.

    Raises:
        ModelError: outputs of a sample depend on other samples.
    """

    def made(*, start: int = 0) -> list[Any]:
        return engine.in_parts(function, batch, samples, start=start)

    if engine.accepts_coupling:
        return
    found = made()
    _, tolerance = tolerance_of(engine)
    apart = not found or is_row_wise(found[0], found[1:], tolerance)
    if all(is_apart for (is_apart,) in all_gather_values(engine, [float(apart)])):
        return
    pairs = zip(found[:1], made(start=1))
    draws = any(not _is_same(one, other) for one, other in pairs)
    if any(one for (one,) in all_gather_values(engine, [float(draws)])):
        return
    error = ModelError(
        "in evaluation, what the model returns for a sample depends on other samples",
        code="outputs-depend-on-others",
        where=type(engine.model).__name__,
        why="a batch is computed in micro-batches, and each rank has a part of it",
        fix="return a row for each sample, or train by a plan that does not cut batches",
    )
    refuse_any(engine, None if apart else error)


def is_row_wise(whole: Any, parts: Sequence[Any], tolerance: float) -> bool:
    """Return True if outputs for some samples at once equal outputs for their parts.

    Args:
        tolerance: relative to the largest value of a tensor.
    """
    try:
        pairs = zip(find_float_tensors(whole), find_float_tensors(join_outputs(parts)), strict=True)
        return all(_is_close(own, one, tolerance) for own, one in pairs)
    except (InputError, ValueError):  # parts do not fit together, or differ in number
        return False


def _is_close(own: Tensor, one: Tensor, tolerance: float) -> bool:
    if own.shape != one.shape:
        return False
    own, one = (torch.nan_to_num(each.double()).asinh() for each in (own, one))  # next to masks
    return not own.numel() or bool((own - one).abs().max() <= tolerance * own.abs().max())


def _is_same(one: Any, other: Any) -> bool:
    pairs = zip(find_float_tensors(one), find_float_tensors(other))
    return all(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) for a, b in pairs)
