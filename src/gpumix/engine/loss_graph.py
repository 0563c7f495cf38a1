"""The denominator of a loss, read from its autograd graph.

A loss that was reduced is a sum over items divided by a number: of labels, of samples, of elements,
of class weights. The nodes of the graph have saved that number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gpumix.engine.samples import IGNORED_LABEL

# Nodes whose output is their input, cast or in another shape.
_UNCHANGED = frozenset(
    (
        "ToCopyBackward0", "ViewBackward0", "ReshapeAliasBackward0", "UnsafeViewBackward0",
        "AliasBackward0", "CloneBackward0", "ExpandBackward0", "SqueezeBackward0",
        "SqueezeBackward1", "UnsqueezeBackward0",
    )
)  # fmt: skip
# Nodes of loss functions that are means over the elements of `self`.
_ELEMENTWISE = frozenset(
    (
        "MseLossBackward0", "SmoothL1LossBackward0", "HuberLossBackward0",
        "SoftMarginLossBackward0", "BinaryCrossEntropyBackward0",
        "BinaryCrossEntropyWithLogitsBackward0",
    )
)  # fmt: skip
_LIKELIHOOD = frozenset(("NllLossBackward0", "NllLoss2DBackward0"))
_PRODUCTS = frozenset(("MulBackward0", "MulBackward1"))
_QUOTIENTS = frozenset(("DivBackward0", "DivBackward1"))
# Nodes whose output is as long as values say, as of `losses[mask]`.
_SELECTIONS = frozenset(("IndexBackward0", "MaskedSelectBackward0"))
MOST_NODES = 50  # of a graph between a loss and its logits
_MEAN, _SUM = 1, 2  # torch's numbers of reductions


def ignored_by(loss: Tensor) -> int | None:
    """The label that functions which make a loss leave out, as cross entropy: one other than -100,
    if there is any; None if there is no such function."""
    found = None
    for node in _nodes(loss, until=_ignored):
        own = _ignored(node)
        if own is not None and own != IGNORED_LABEL:
            return own
        found = own if own is not None else found
    return found


def selects_by_values(loss: Tensor) -> bool:
    """Whether values say how many elements a loss is made of, as where a mask selects them."""
    return any(type(node).__name__ in _SELECTIONS for node in _nodes(loss))


def _nodes(loss: Tensor, until: Callable[[Any], Any] = lambda node: None) -> Iterator[Any]:
    """Those of a loss's graph, `MOST_NODES` at most, and none behind one of which `until` tells
    something."""
    left: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while left and len(seen) < MOST_NODES:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if until(node) is None:
            left += [following for following, _ in node.next_functions]


def _ignored(node: Any) -> int | None:
    """The label that a node leaves out; None if it is of no such function."""
    of_chunks = getattr(node, "ignore_index", None)  # see `ChunkedLoss`
    if type(node).__name__ not in _LIKELIHOOD and of_chunks is None:
        return None
    own = int(node._saved_ignore_index if of_chunks is None else of_chunks)
    return own - 2**64 * (own >= 2**63)  # torch tells them without a sign


def denominators_of(loss: Tensor, *, shapes: bool = True) -> tuple[Tensor, ...]:
    """The numbers that the terms of a loss are sums divided by: each term times its denominator
    adds up over items.

    Args:
        loss: of one element, with its graph.
        shapes: whether numbers of elements, and of labels, count; else only what other values, and
            constants, come to.

    Returns:
        float64 tensors without dimensions, on the loss's device, one for each term of a sum; none
        at all where the graph has a node that this function does not know.
    """
    if loss.grad_fn is None or loss.numel() != 1:
        return ()
    one = torch.ones((), dtype=torch.float64, device=loss.device)
    with torch.no_grad():
        found = _denominators(loss.grad_fn, one, shapes)
    if any(term is None for term in found):
        return ()
    return tuple(term.abs() for term in found if term is not None)  # -sum(x) / n is over n too


def _denominators(node: Any, factor: Tensor, shapes: bool) -> list[Tensor | None]:
    """
    Args:
        node: None: a constant.
        factor: what the node's output is multiplied with on its way to the loss.
    """
    if node is None:
        return []
    name = type(node).__name__
    if name in _UNCHANGED or _is_of_one(node, name):
        return _denominators(node.next_functions[0][0], factor, shapes)
    if name in ("AddBackward0", "SubBackward0"):
        (first, _), (second, _) = node.next_functions
        alpha = node._saved_alpha if name == "AddBackward0" else -node._saved_alpha
        return [
            *_denominators(first, factor, shapes),
            *_denominators(second, factor * alpha, shapes),
        ]
    if name == "NegBackward0":
        return _denominators(node.next_functions[0][0], -factor, shapes)
    if name in _PRODUCTS | _QUOTIENTS:
        return _of_product(node, factor, shapes, divides=name in _QUOTIENTS)
    own = _own_denominator(node, name, factor)
    if own is not None and not shapes and not _is_weighted(node, name):
        own = torch.ones_like(factor)
    return [None if own is None else own / factor]


def _of_product(node: Any, factor: Tensor, shapes: bool, *, divides: bool) -> list[Tensor | None]:
    """Of a product with a constant, or a quotient by one."""
    places = [place for place, (n, _) in enumerate(node.next_functions) if n is not None]
    if len(places) != 1 or (divides and places != [0]):
        return [None]
    other = node._saved_self if places == [1] else node._saved_other
    if other is None or (isinstance(other, Tensor) and other.numel() != 1):
        return [None]
    if isinstance(other, Tensor) and other.dim():
        other = other.reshape(())
    factor = (factor / other if divides else factor * other).double()
    return _denominators(node.next_functions[places[0]][0], factor, shapes)


def _is_of_one(node: Any, name: str) -> bool:
    """Whether a node reduces a tensor without dimensions, which it leaves as it is."""
    return name in ("MeanBackward0", "SumBackward0") and not len(node._saved_self_sym_sizes)


def _is_weighted(node: Any, name: str) -> bool:
    """Whether the denominator of a node that reduces goes by more than numbers of elements and
    labels: by weights of classes."""
    return name in _LIKELIHOOD and node._saved_weight is not None


def _own_denominator(node: Any, name: str, like: Tensor) -> Tensor | None:
    """Of a node that reduces: 1 where that is a sum."""
    reduction = getattr(node, "_saved_reduction", None)
    if name == "SumBackward0" or (name in _LIKELIHOOD | _ELEMENTWISE and reduction == _SUM):
        return torch.ones_like(like)
    if name == "MeanBackward0":
        return torch.full_like(like, node._saved_self_sym_numel)
    if name in _LIKELIHOOD and reduction == _MEAN:
        return node._saved_total_weight.detach().double()  # type: ignore[no-any-return]
    if name in _ELEMENTWISE and reduction == _MEAN:
        return torch.full_like(like, node._saved_self.numel())
    of_chunks = getattr(node, "denominator", None)  # see `ChunkedLoss`
    return None if of_chunks is None else of_chunks().double()
