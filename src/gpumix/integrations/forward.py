"""What a function makes of this rank's part of a batch, by places in the whole one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from gpumix.engine.engine import Engine
from gpumix.spec.shares import share_of


def by_places(
    engine: Engine, function: Callable[[nn.Module, Any], Any], values: Any, samples: int
) -> dict[range, Any]:
    """As `Engine.outputs`. Collective.

    Args:
        function: is called with the model and a micro-batch; gives a tree of tensors with a row for
            each sample.
        values: this rank's part of a batch of `samples`.

    Returns:
        What it gave, by places in the whole batch.
    """
    staged = len(engine.plan.stages) > 1
    found = engine.outputs(function, values, samples=samples if staged else None)
    if staged:
        rows = list(range(samples))
    else:
        own = share_of(engine.plan, engine.comm.rank).rows(samples)
        rows = [place for of in own for place in of]
    return dict(_placed(found, rows))


def _placed(found: Mapping[range, Any], rows: Sequence[int]) -> Iterator[tuple[range, Any]]:
    """What was made, by places in the whole batch: of rows that are apart there one by one."""
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


def detached(value: Any) -> Any:
    """A leaf of what a model returned, without its graph."""
    return value.detach() if isinstance(value, Tensor) else value
