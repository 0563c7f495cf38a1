"""The denominator of a loss, read from its autograd graph.

A loss that was reduced is a sum over items divided by a number: of labels, of samples, of elements,
of class weights. The nodes of the graph have saved that number.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

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
_REDUCES = frozenset(("MeanBackward0", "SumBackward0"))
_CHOICES = frozenset(("WhereBackward0",))
_NAMELESS = _UNCHANGED | _QUOTIENTS | _CHOICES
_REDUCED = _LIKELIHOOD | _ELEMENTWISE
_COARSE = (torch.float16, torch.bfloat16)
MOST_NODES = 50  # of a graph between a loss and its logits
MOST_NAMED = 256  # of a graph, whose operations tell its kind
MOST_TERMS = 4  # of a loss, that are told apart
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


def _nodes(
    loss: Tensor,
    until: Callable[[Any], Any] = lambda node: None,
    *,
    most: int = MOST_NODES,
    nameless: frozenset[str] = frozenset(),
) -> Iterator[Any]:
    """Those of a loss's graph, the nearest `most` beside `nameless` ones, and none behind one of
    which `until` tells something."""
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
    with torch.no_grad():
        found = [_quotient(one.divisor, one.factor) for one in _terms_of(loss, shapes=shapes)]
        return tuple(_on(loss.device, one).abs() for one in found)  # -sum(x) / n is over n too


def is_sum(loss: Tensor) -> bool:
    """Whether a loss is a sum over items, or of such sums, that nothing is divided by."""
    terms = _terms_of(loss)
    plain = (one.is_sum and isinstance(one.factor, float) and abs(one.factor) == 1 for one in terms)
    return bool(terms) and all(plain)


def kind_of(loss: Tensor) -> int:
    """A number for how a loss is made, the same on every machine and never 0: which operations are
    at the end of its graph, and how many numbers there are multiplied by 0."""
    return _kind_of(_telling(loss))


def _telling(loss: Tensor) -> list[Any]:
    """Nodes whose names tell a kind. A loss that was multiplied with its count has the same ones
    as without: that product is no named one."""
    return list(_nodes(loss, most=MOST_NAMED, nameless=_NAMELESS | _PRODUCTS))


def kind_and_weight_of(loss: Tensor) -> tuple[int, Tensor | None]:
    """The kind, and one number, float64 on the loss's device, for what its terms are multiplied
    with: losses of one kind with unlike numbers are not sums of the same. None of many terms, of
    coarse factors, and where the graph is not understood."""
    nodes = _telling(loss)
    kind, terms = _kind_of(nodes), _terms_of(loss)
    if not 0 < len(terms) <= MOST_TERMS or any(one.is_coarse for one in terms):
        return kind, None
    with torch.no_grad():
        told = _in_one([_quotient(one.factor, one.divisor) for one in terms])
        of_classes = [_number(own.sum()) for node in nodes for own in _class_weights(node)]
        return kind, _on(loss.device, told + _in_one(of_classes))


def _in_one(numbers: list[_Number]) -> _Number:
    """One number that tells of all of them: that of each, where they are alike, however many."""
    if not numbers:
        return 0.0
    first = numbers[0]
    return first + sum(place * (one - first) for place, one in enumerate(numbers, 1))


def _kind_of(nodes: Iterable[Any]) -> int:
    names, zeros = set(), 0
    beside = False  # of what the whole loss is multiplied with
    for node in nodes:
        name = type(node).__name__
        if name in _PRODUCTS:
            zeros += beside and _is_by_zero(node)
        elif name not in _NAMELESS:
            reduction = getattr(node, "_saved_reduction", "") if name in _REDUCED else ""
            names.add(f"{name} {reduction}")
        beside = beside or sum(following is not None for following, _ in node.next_functions) > 1
    told = f"{' '.join(sorted(names))} {min(zeros, MOST_TERMS)}"
    return 1 + zlib.crc32(told.encode())


def _is_by_zero(product: Any) -> bool:
    """Whether a node multiplies with a number that is 0, as far as the host can see."""
    for name in ("_saved_self", "_saved_other"):
        own = getattr(product, name, None)
        if isinstance(own, Tensor) and (own.numel() != 1 or own.device.type != "cpu"):
            continue
        if own is not None and not _number(own):
            return True
    return False


def _class_weights(node: Any) -> list[Tensor]:
    """What a loss function multiplies the items of a class with."""
    name = type(node).__name__
    of_name = "_saved_weight" if name in _LIKELIHOOD else "_saved_pos_weight"
    own = getattr(node, of_name, None) if name in _REDUCED else None
    return [] if own is None or own.dtype in _COARSE else [own.detach()]


_Number = float | Tensor  # a tensor of a GPU, which nothing is to wait for


class _Term(NamedTuple):
    """One of the terms of a loss: a sum, divided by one number and multiplied with another one.

    Attributes:
        is_coarse: whether a factor has few digits.
        is_sum: whether what reduces it divides by nothing.
    """

    divisor: _Number
    factor: _Number
    is_coarse: bool
    is_sum: bool


def _terms_of(loss: Tensor, *, shapes: bool = True) -> list[_Term]:
    """None at all where the graph is not understood."""
    if loss.grad_fn is None or loss.numel() != 1:
        return []
    with torch.no_grad():
        found = _terms(loss.grad_fn, 1.0, shapes, False)
    known = [term for term in found if term is not None]
    return known if len(known) == len(found) else []


def _terms(node: Any, factor: _Number, shapes: bool, is_coarse: bool) -> list[_Term | None]:
    """
    Args:
        node: None: a constant.
        factor: what the node's output is multiplied with on its way to the loss.
        is_coarse: whether some part of it has few digits.
    """
    if node is None:
        return []
    name = type(node).__name__
    if name in _CHOICES:
        ends = [following for following, _ in node.next_functions if following is not None]
        return _terms(ends[0], factor, shapes, is_coarse) if len(ends) == 1 else [None]
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
        return _of_product(node, factor, shapes, is_coarse, divides=name in _QUOTIENTS)
    if _is_of_losses(node, name):
        return [None]
    count = _own_count(node, name)
    if count is not None and not shapes and not _is_weighted(node, name):
        count = 1.0
    return [None if count is None else _Term(count, factor, is_coarse, _sums(node, name))]


def _of_product(
    node: Any, factor: _Number, shapes: bool, is_coarse: bool, *, divides: bool
) -> list[_Term | None]:
    """Of a product with a constant, or a quotient by one."""
    places = [place for place, (n, _) in enumerate(node.next_functions) if n is not None]
    if len(places) != 1 or (divides and places != [0]):
        return [None]
    other = node._saved_self if places == [1] else node._saved_other
    if other is None or (isinstance(other, Tensor) and other.numel() != 1):
        return [None]
    is_coarse |= isinstance(other, Tensor) and other.dtype in _COARSE
    number = _number(other)
    factor = _quotient(factor, number) if divides else factor * number
    return _terms(node.next_functions[places[0]][0], factor, shapes, is_coarse)


def _is_of_one(node: Any, name: str) -> bool:
    """Whether a node reduces a tensor without dimensions, which it leaves as it is."""
    return name in _REDUCES and not len(node._saved_self_sym_sizes)


def _is_of_losses(node: Any, name: str) -> bool:
    """Whether a node reduces numbers that were stacked, as several losses are: no items."""
    if name not in _REDUCES or len(node._saved_self_sym_sizes) != 1:
        return False
    inner = node.next_functions[0][0]
    for _ in range(MOST_TERMS):
        if inner is None or type(inner).__name__ not in _UNCHANGED | _PRODUCTS | _QUOTIENTS:
            break
        inner = next((one for one, _ in inner.next_functions if one is not None), None)
    return type(inner).__name__ == "StackBackward0"


def _is_weighted(node: Any, name: str) -> bool:
    """Whether the denominator of a node that reduces goes by more than numbers of elements and
    labels: by weights of classes."""
    return name in _LIKELIHOOD and node._saved_weight is not None


def _own_count(node: Any, name: str) -> _Number | None:
    """What a node that reduces divides by: 1 where it is a sum."""
    reduction = getattr(node, "_saved_reduction", None)
    if _sums(node, name):
        return 1.0
    if name == "MeanBackward0":
        return float(node._saved_self_sym_numel)
    if name in _LIKELIHOOD and reduction == _MEAN:
        return _number(node._saved_total_weight)
    if name in _ELEMENTWISE and reduction == _MEAN:
        return float(node._saved_self.numel())
    of_chunks = getattr(node, "denominator", None)  # see `ChunkedLoss`
    return None if of_chunks is None else _number(of_chunks())


def _sums(node: Any, name: str) -> bool:
    reduction = getattr(node, "_saved_reduction", None)
    return name == "SumBackward0" or (name in _REDUCED and reduction == _SUM)


def _number(value: Any) -> _Number:
    """Of one element."""
    if not isinstance(value, Tensor):
        return float(value)
    # Numbers of Python, which graphs keep as tensors, are none to modes that see operations.
    with torch.no_grad():
        made = torch.zeros((), dtype=torch.float64, device=value.device) + value
    made = made.reshape(())
    return float(made) if made.device.type == "cpu" else made


def _quotient(one: _Number, other: _Number) -> _Number:
    """As tensors divide."""
    if isinstance(other, Tensor) or other:
        return one / other
    return one * math.inf


def _on(device: torch.device, number: _Number) -> Tensor:
    if isinstance(number, Tensor):
        return number
    return torch.full((), number, dtype=torch.float64, device=device)
