"""Denominators of losses, read from the autograd graph.

A reduced loss is a sum over items divided by a number: of labels, of samples, of elements, of class
weights. The graph's nodes have saved this number.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpumix.engine.batch.batch_split import IGNORED_LABEL
from gpumix.engine.cross_entropy.linear_cross_entropy import EarlyGradients

# Nodes whose output is their input, cast or reshaped.
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
# Nodes whose output length depends on values, as in `losses[mask]`.
_SELECTIONS = frozenset(("IndexBackward0", "MaskedSelectBackward0"))
_REDUCES = frozenset(("MeanBackward0", "SumBackward0"))
_CHOICES = frozenset(("WhereBackward0",))
_NAMELESS = _UNCHANGED | _QUOTIENTS | _CHOICES
# Parameters and, in a layered step, outputs of blocks.
_LEAVES = frozenset(("AccumulateGrad", "_ConnectToLeafBackward"))
_REDUCED = _LIKELIHOOD | _ELEMENTWISE
_LOW_PRECISION_DTYPES = (torch.float16, torch.bfloat16)
MOST_NODES = 50  # of a graph between a loss and its logits
MOST_NAMED = 256  # of a graph, whose operations determine its kind
_BLOCK_OUTPUT = "gpumix_block_output"  # key of a node's metadata
MOST_TERMS = 4  # of a loss, that are distinguished
_MEAN, _SUM = 1, 2  # torch's numbers of reductions


def find_ignored_label(loss: Tensor) -> int | None:
    """Return the label ignored by loss functions in a graph, for example by cross-entropy;
    preferably not -100. None without a function that ignores labels."""
    found = None
    for node in _nodes(loss, until=_ignored):
        own = _ignored(node)
        if own is not None and own != IGNORED_LABEL:
            return own
        found = own if own is not None else found
    return found


def selects_by_values(loss: Tensor) -> bool:
    """Return whether the number of elements of a loss depends on values, as with a mask."""
    return any(type(node).__name__ in _SELECTIONS for node in _nodes(loss))


def _nodes(
    loss: Tensor,
    until: Callable[[Any], Any] = lambda node: None,
    *,
    most: int = MOST_NODES,
    nameless: frozenset[str] = frozenset(),
) -> Iterator[Any]:
    """Yield the nodes of a loss's graph, the nearest `most` plus `nameless` nodes. The search stops
    at nodes for which `until` is not None."""
    left: deque[Any] = deque([loss.grad_fn])
    seen: set[Any] = set()
    while left and most:
        node = left.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        most -= type(node).__name__ not in nameless
        yield node
        if until(node) is None:
            left += [following for following, _ in node.next_functions]


def _ignored(node: Any) -> int | None:
    """Return the label ignored by a node; None for nodes of other functions."""
    of_chunks = getattr(node, "ignore_index", None)  # see `ChunkedLoss`
    if type(node).__name__ not in _LIKELIHOOD and of_chunks is None:
        return None
    own = int(node._saved_ignore_index if of_chunks is None else of_chunks)
    return own - 2**64 * (own >= 2**63)  # torch returns it as unsigned


def find_denominators(loss: Tensor, *, shapes: bool = True) -> tuple[Tensor, ...]:
    """Return the denominators of the terms of a loss: each term times its denominator adds up over
    items.

    Args:
        loss: of one element, with its graph.
        shapes: whether numbers of elements and of labels count; else only factors from other values
            and from constants.

    Returns:
        float64 scalars on the loss's device, one for each term of a sum; empty if the graph has an
            unknown node.
    """
    with torch.no_grad():
        found = [_quotient(one.divisor, one.factor) for one in _terms_of(loss, shapes=shapes)]
        return tuple(
            _to_tensor(loss.device, one).abs() for one in found
        )  # -sum(x) / n is over n too


def divided_by_program(loss: Tensor) -> Tensor | None:
    """Return the number by which a program divides the first term of a loss, besides the loss
    function's own mean; float64 on the loss's device. None if the graph has an unknown node."""
    terms = _terms_of(loss)
    with torch.no_grad():
        return _to_tensor(loss.device, _quotient(1.0, terms[0].factor)).abs() if terms else None


def drop_gradients(loss: Tensor, is_empty: Tensor) -> None:
    """Let the terms of a loss give gradients of 0 if `is_empty`, a scalar: a mean over nothing has
    gradients of 0 / 0, also where its loss is multiplied by 0."""

    def drop(gradients: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
        return tuple(
            None if one is None else one.masked_fill(is_empty.to(one.device), 0)
            for one in gradients
        )

    for term in _terms_of(loss):
        term.node.register_hook(drop)


def observe_unknown_rows(loss: Tensor, observe: Callable[[Tensor], object]) -> None:
    """Let `observe` get the number of rows that a term of unknown reduction gives a gradient, in
    the backward pass of a loss: those that it counts. int64 on the loss's device; nothing is
    observed if all terms are known, or if the term is computed of single numbers."""

    def count(gradients: tuple[Tensor | None, ...], _: Any) -> None:
        given = [one for one in gradients if one is not None and one.dim()]
        if given:
            widest = max(given, key=Tensor.numel)
            rows = widest if widest.dim() == 1 else widest.flatten(0, -2).abs().amax(-1)
            observe((rows.abs() > 0).sum())  # NaN is of a mean over nothing

    for term in _all_terms_of(loss):
        if isinstance(term, _UnknownTerm):
            term.node.register_hook(count)
            return


def is_sum(loss: Tensor) -> bool:
    """Return whether a loss is a sum over items, or of sums, without a denominator."""
    terms = _terms_of(loss)
    return bool(terms) and all(
        _is_sum_node(one.node) and isinstance(one.factor, float) and abs(one.factor) == 1
        for one in terms
    )


def kind_of(loss: Tensor) -> int:
    """Return a nonzero number for the composition of a loss, equal on every machine: the operations
    at the end of its graph, and the number of factors equal to 0."""
    return _kind_of(_collect_kind_nodes(loss))


def _collect_kind_nodes(loss: Tensor) -> list[Any]:
    """Return nodes whose names determine a kind. A multiplication by the loss's count does not
    change the kind, since products are nameless. Blocks' own nodes do not belong to the loss: a
    layered step has no graph of them."""
    nodes = _nodes(loss, _block_mark, most=MOST_NAMED, nameless=_NAMELESS | _PRODUCTS)
    return [node for node in nodes if _block_mark(node) is None]


def mark_block_output(output: Tensor) -> None:
    """Mark the end of a block in the graph of a loss."""
    node: Any = output.grad_fn
    if node is not None:
        node.metadata[_BLOCK_OUTPUT] = True


def _block_mark(node: Any) -> Any:
    return node.metadata.get(_BLOCK_OUTPUT)


def kind_and_weight_of(loss: Tensor) -> tuple[int, Tensor | None]:
    """Return the kind, and a number for the factors of the terms, float64 on the loss's device.
    Losses of a kind with unequal numbers are not sums of equal terms. None for many terms, coarse
    factors, or an unknown graph."""
    nodes = _collect_kind_nodes(loss)
    kind, terms = _kind_of(nodes), _terms_of(loss)
    if not 0 < len(terms) <= MOST_TERMS or any(one.is_coarse for one in terms):
        return kind, None
    with torch.no_grad():
        told = _combine_numbers([_quotient(one.factor, one.divisor) for one in terms])
        of_classes = [_number(own.sum()) for node in nodes for own in _class_weights(node)]
        return kind, _to_tensor(loss.device, told + _combine_numbers(of_classes))


def _combine_numbers(numbers: list[_Number]) -> _Number:
    """Combine numbers into a single number: their common value, if all are equal."""
    if not numbers:
        return 0.0
    first = numbers[0]
    return first + sum(place * (one - first) for place, one in enumerate(numbers, 1))


def _kind_of(nodes: Iterable[Any]) -> int:
    names, zeros = set(), 0
    beside = False  # next to a factor of the full loss
    for node in nodes:
        name = type(node).__name__
        if name in _PRODUCTS:
            zeros += beside and _is_by_zero(node)
        elif name not in _NAMELESS and name not in _LEAVES:
            reduction = getattr(node, "_saved_reduction", "") if name in _REDUCED else ""
            names.add(f"{name} {reduction}")
        beside = beside or sum(following is not None for following, _ in node.next_functions) > 1
    told = f"{' '.join(sorted(names))} {min(zeros, MOST_TERMS)}"
    return 1 + zlib.crc32(told.encode())


def _is_by_zero(product: Any) -> bool:
    """Return whether a node multiplies by 0, as far as the host knows."""
    for name in ("_saved_self", "_saved_other"):
        own = getattr(product, name, None)
        if isinstance(own, Tensor) and (own.numel() != 1 or own.device.type != "cpu"):
            continue
        if own is not None and not _number(own):
            return True
    return False


def _class_weights(node: Any) -> list[Tensor]:
    """Return the class weights of a loss function."""
    name = type(node).__name__
    of_name = "_saved_weight" if name in _LIKELIHOOD else "_saved_pos_weight"
    own = getattr(node, of_name, None) if name in _REDUCED else None
    return [] if own is None or own.dtype in _LOW_PRECISION_DTYPES else [own.detach()]


_Number = float | Tensor  # a tensor may be on a GPU, and is never waited for


class _Term(NamedTuple):
    """A term of a loss: a sum, divided by a divisor and multiplied by a factor.

    Attributes:
        is_coarse: whether a factor has a dtype of few digits.
        node: the graph's node of the reduction.
    """

    divisor: _Number
    factor: _Number
    is_coarse: bool
    node: Any


class _UnknownTerm(NamedTuple):
    """A term of a loss computed by a node whose reduction is not understood."""

    node: Any


def _terms_of(loss: Tensor, *, shapes: bool = True) -> list[_Term]:
    """Return the terms of a loss; empty if the graph has an unknown node."""
    found = _all_terms_of(loss, shapes=shapes)
    known = [term for term in found if isinstance(term, _Term)]
    return known if len(known) == len(found) else []


def _all_terms_of(loss: Tensor, *, shapes: bool = True) -> list[_Term | _UnknownTerm]:
    """Return the terms of a loss, unknown terms too."""
    if loss.grad_fn is None or loss.numel() != 1:
        return []
    with torch.no_grad():
        return _terms(loss.grad_fn, 1.0, shapes, False)


def _terms(node: Any, factor: _Number, shapes: bool, is_coarse: bool) -> list[_Term | _UnknownTerm]:
    """Return the terms below a node.

    Args:
        node: None: a constant.
        factor: product of the factors between the node's output and the loss.
        is_coarse: whether one of these factors has few digits.
    """
    if node is None:
        return []
    name = type(node).__name__
    if name in _CHOICES:
        ends = [following for following, _ in node.next_functions if following is not None]
        if len(ends) != 1:
            return [_UnknownTerm(node)]
        return _terms(ends[0], factor, shapes, is_coarse)
    if name in _UNCHANGED or _is_of_one(node, name):
        return _terms(node.next_functions[0][0], factor, shapes, is_coarse)
    if name in ("AddBackward0", "SubBackward0"):
        (first, _), (second, _) = node.next_functions
        alpha = node._saved_alpha if name == "AddBackward0" else -node._saved_alpha
        return [
            *_terms(first, factor, shapes, is_coarse),
            *_terms(second, factor * alpha, shapes, is_coarse),
        ]
    if name == "NegBackward0":
        return _terms(node.next_functions[0][0], -factor, shapes, is_coarse)
    if name in _PRODUCTS | _QUOTIENTS:
        return _find_product_terms(node, factor, shapes, is_coarse, divides=name in _QUOTIENTS)
    if _is_of_losses(node, name):
        return [_UnknownTerm(node)]
    count = _get_denominator(node, name)
    if count is not None and not shapes and not _is_weighted(node, name):
        count = 1.0
    return [_UnknownTerm(node) if count is None else _Term(count, factor, is_coarse, node)]


def _find_product_terms(
    node: Any, factor: _Number, shapes: bool, is_coarse: bool, *, divides: bool
) -> list[_Term | _UnknownTerm]:
    """Return the terms of a product with a constant, or of a quotient by a constant."""
    places = [place for place, (n, _) in enumerate(node.next_functions) if n is not None]
    if len(places) != 1 or (divides and places != [0]):
        return [_UnknownTerm(node)]
    other = node._saved_self if places == [1] else node._saved_other
    if other is None or (isinstance(other, Tensor) and other.numel() != 1):
        return [_UnknownTerm(node)]
    is_coarse |= isinstance(other, Tensor) and other.dtype in _LOW_PRECISION_DTYPES
    number = _number(other)
    factor = _quotient(factor, number) if divides else factor * number
    return _terms(node.next_functions[places[0]][0], factor, shapes, is_coarse)


def _is_of_one(node: Any, name: str) -> bool:
    """Return whether a node reduces a 0-dimensional tensor, which is a no-op."""
    return name in _REDUCES and not len(node._saved_self_sym_sizes)


def _is_of_losses(node: Any, name: str) -> bool:
    """Return whether a node reduces stacked numbers, such as several losses, instead of items."""
    if name not in _REDUCES or len(node._saved_self_sym_sizes) != 1:
        return False
    inner = node.next_functions[0][0]
    for _ in range(MOST_TERMS):
        if inner is None or type(inner).__name__ not in _UNCHANGED | _PRODUCTS | _QUOTIENTS:
            break
        inner = next((one for one, _ in inner.next_functions if one is not None), None)
    return type(inner).__name__ == "StackBackward0"


def _is_weighted(node: Any, name: str) -> bool:
    """Return whether a node's denominator uses class weights, not only numbers of labels."""
    return name in _LIKELIHOOD and node._saved_weight is not None


def _get_denominator(node: Any, name: str) -> _Number | None:
    """Return the denominator of a reducing node: 1 for a sum."""
    reduction = getattr(node, "_saved_reduction", None)
    if _is_sum_node(node):
        return 1.0
    if name == "MeanBackward0":
        return float(node._saved_self_sym_numel)
    if name in _LIKELIHOOD and reduction == _MEAN:
        return _number(node._saved_total_weight)
    if name in _ELEMENTWISE and reduction == _MEAN:
        return float(node._saved_self.numel())
    of_chunks = getattr(node, "denominator", None)  # see `ChunkedLoss`
    return None if of_chunks is None else _number(of_chunks())


def _is_sum_node(node: Any) -> bool:
    """Return whether a node reduces without a denominator."""
    name, reduction = type(node).__name__, getattr(node, "_saved_reduction", None)
    return name == "SumBackward0" or (name in _REDUCED and reduction == _SUM)


def _number(value: Any) -> _Number:
    """Convert a value of one element."""
    if not isinstance(value, Tensor):
        return float(value)
    # Python numbers, which graphs keep as tensors, are invisible to modes that watch operations.
    with torch.no_grad():
        made = torch.zeros((), dtype=torch.float64, device=value.device) + value
    made = made.reshape(())
    return float(made) if made.device.type == "cpu" else made


def _quotient(one: _Number, other: _Number) -> _Number:
    """Divide like tensors."""
    if isinstance(other, Tensor) or other:
        return one / other
    return one * math.inf


def _to_tensor(device: torch.device, number: _Number) -> Tensor:
    if isinstance(number, Tensor):
        return number
    return torch.full((), number, dtype=torch.float64, device=device)


def find_unscaled_losses(loss: Tensor) -> list[EarlyGradients]:
    """Return the head's losses whose gradient is exactly the gradient of `loss`."""
    if loss.grad_fn is None or loss.numel() != 1:
        return []
    passes, others, found = [loss.grad_fn], [], []
    while passes:
        node = passes.pop()
        if (payment := getattr(node, "payment", None)) is not None:
            found.append(payment)
        elif _has_identity_gradient(node):
            passes += [n for n, _ in node.next_functions if n is not None]
        else:
            others.append(node)
    seen = set()
    while others:
        node = others.pop()
        if node not in seen:
            seen.add(node)
            others += [n for n, _ in node.next_functions if n is not None]
    changed = [getattr(node, "payment", None) for node in seen]
    return [p for p in found if found.count(p) == 1 and p not in changed]


def _has_identity_gradient(node: Any) -> bool:
    """Return whether a graph node passes its gradient unchanged to all inputs."""
    name = type(node).__name__
    return name == "ToCopyBackward0" or (name == "AddBackward0" and node._saved_alpha == 1)
