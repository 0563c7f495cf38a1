"""Outputs of a function for this rank's part of a batch, by places in the global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from gpumix.engine.engine import Engine
from gpumix.schema.plan.batch_shares import get_batch_share


def compute_by_place(
    engine: Engine, function: Callable[[nn.Module, Any], Any], values: Any, samples: int
) -> dict[range, Any]:
    """Compute outputs as `Engine.outputs` does. Collective.

    Args:
        function: is called with the model and a micro-batch; returns a tree of tensors with a row
            per sample.
        values: this rank's part of a batch of `samples`.

    Returns:
        The outputs by places in the global batch.
    """
    staged = len(engine.plan.stages) > 1
    found = engine.outputs(function, values, samples=samples if staged else None)
    if staged:
        rows = list(range(samples))
    else:
        own = get_batch_share(engine.plan, engine.comm.rank).rows(samples)
        rows = [place for of in own for place in of]
    return dict(_split_by_place(found, rows))


def _split_by_place(found: Mapping[range, Any], rows: Sequence[int]) -> Iterator[tuple[range, Any]]:
    """Yield outputs by places in the global batch, split into runs of adjacent places."""
    for of, made in found.items():
        places = rows[of.start : of.stop]
        begin = 0
        for end in range(1, len(places) + 1):
            if end == len(places) or places[end] != places[end - 1] + 1:
                own = slice(begin, end)
                yield (
                    range(places[begin], places[end - 1] + 1),
                    tree_map(lambda t, own=own: t[own], made),
                )
                begin = end


def detach_leaf(value: Any) -> Any:
    """Return a leaf of a model's outputs without its graph."""
    return value.detach() if isinstance(value, Tensor) else value


def copy_to_host(value: Any) -> Any:
    """Return a copy of a leaf on the host, without its graph."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def clone_inference_tensor(value: Any) -> Any:
    """Clone a tensor made in inference mode, which no graph may keep and whose in-place changes
    units cannot track; return any other value as is."""
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value
