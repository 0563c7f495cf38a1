"""Backward through the code between units.

This code (embedding, masks, norms, head, loss) is ordinary autograd, cut at unit outputs, which are
leaves. Its outputs to units are the *roots* of small graphs. A root may be used by several units
(an encoder's output): its gradients are summed until the first of its users is done, and passed on
once. Two roots may share a part of their graphs: the first backward then keeps its buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward, get_gradient_edge


def attach_leaf(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut `values` from their graph. Returns a leaf for their gradient alone, with the memory of a
    scalar and no values, and an ordinary tensor of the values, whose gradient goes to the leaf. The
    model may write into it."""
    leaf = values.new_empty_strided(values.shape, (0,) * values.dim(), requires_grad=True)
    if values.requires_grad:
        values = values.detach()
    if torch.is_grad_enabled():
        return leaf, _ConnectToLeaf.apply(leaf, values)
    with torch.enable_grad():
        return leaf, _ConnectToLeaf.apply(leaf, values)


def run_backward(
    edges: Sequence[GradientEdge],
    gradients: Sequence[torch.Tensor | None],
    *,
    retain_graph: bool = False,
) -> None:
    """Run backward from edges of a graph like `torch.autograd.backward`, without its checks:
    gradients made by autograd have the right shape and dtype."""
    _engine_run_backward(
        tuple(edges),
        tuple(gradients),
        retain_graph,
        False,  # no graph of this backward
        (),  # for all leaves
        allow_unreachable=True,
        accumulate_grad=True,
    )


class _ConnectToLeaf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        ctx.leaf = leaf
        return values.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        # Autograd would add in place to a tensor that other leaves may share: the gradients of
        # `torch.stack(outputs).sum(0)` are one tensor.
        if ctx.leaf.grad is not None:
            ctx.leaf.grad = ctx.leaf.grad.clone()
        return gradients[0], None


class GradientTarget(NamedTuple):
    """Destination of the gradient of a unit's input: a leaf, or an edge of the graph of the model's
    own code. Does not hold the input's values. `handed` is a leaf that the input was directly
    handed for."""

    leaf: torch.Tensor | None
    edge: GradientEdge | None
    handed: torch.Tensor | None
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> GradientTarget:
        """Return the link of an input that wants a gradient."""
        leaf = _leaf_of(tensor)
        edge = get_gradient_edge(tensor) if leaf is None else None
        handed = leaf if tensor.grad_fn is not None else None
        return cls(leaf, edge, handed, tensor.shape, tensor.dtype, tensor.device)


def find_reachable_leaves(tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the leaves reached by gradients of tensors through the model's own code, by id. Only
    leaves of `attach_leaf` count."""
    found: dict[int, torch.Tensor] = {}
    ahead = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen: set[Any] = set()
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "leaf", None)
        if isinstance(leaf, torch.Tensor):
            found[id(leaf)] = leaf
        ahead += [of for of, _ in node.next_functions if of is not None]
    return found


@dataclass
class _Root:
    edge: GradientEdge
    first_call: int
    gradient: torch.Tensor | None = None


class InterUnitGraph:
    """The roots of a micro-batch. Backward runs in the order: the end, last unit call, ..., first.
    The end is the loss, or the absence of further calls."""

    def __init__(self) -> None:
        self._roots: dict[tuple[int, int], _Root] = {}
        self._kept: set[int] = set()

    @property
    def waiting(self) -> list[torch.Tensor]:
        """Gradients of roots still to be passed on."""
        return [r.gradient for r in self._roots.values() if r.gradient is not None]

    def used(self, call: int, inputs: Iterable[GradientTarget]) -> None:
        """Record that unit call number `call` takes `inputs`."""
        for link in inputs:
            if link.edge is not None:
                self._roots.setdefault(_key(link.edge), _Root(link.edge, call))

    def backward_loss(self, loss: torch.Tensor) -> None:
        """Run backward from the loss through the head to the last units' outputs."""
        seen = self.find_shared_graphs()
        torch.autograd.backward(loss, retain_graph=not seen.isdisjoint(_nodes([loss.grad_fn])))

    def find_shared_graphs(self) -> set[Node]:
        """Find graphs that share a part, after the last call; return all used nodes."""
        seen: set[Node] = set()
        for call in sorted({root.first_call for root in self._roots.values()}):
            nodes = _nodes(root.edge.node for root in self._of(call))
            if nodes & seen:
                self._kept.add(call)
            seen |= nodes
        return seen

    def backward(
        self,
        call: int,
        inputs: Sequence[GradientTarget],
        gradients: Sequence[torch.Tensor | None],
    ) -> None:
        """Pass on the gradients of the inputs of unit call number `call`, which is done."""
        for link, gradient in zip(inputs, gradients):
            if gradient is None:
                continue
            if link.edge is not None:
                root = self._roots[_key(link.edge)]
                root.gradient = gradient if root.gradient is None else root.gradient + gradient
                continue
            assert link.leaf is not None, "a gradient goes to a leaf or to an edge"
            if isinstance(link.leaf, nn.Parameter):
                torch.autograd.backward(link.leaf, gradient)
            elif link.leaf.grad is None:
                link.leaf.grad = gradient
            else:
                link.leaf.grad = link.leaf.grad + gradient
        done = self._of(call)
        for root in done:
            del self._roots[_key(root.edge)]
        done = [root for root in done if root.gradient is not None]
        if done:
            run_backward(
                [root.edge for root in done],
                [root.gradient for root in done],
                retain_graph=call in self._kept,
            )

    def _of(self, call: int) -> list[_Root]:
        return [root for root in self._roots.values() if root.first_call == call]


def _key(edge: GradientEdge) -> tuple[int, int]:
    return id(edge.node), edge.output_nr


def _leaf_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the leaf that `tensor` is or was handed for. None if it was computed, or if hooks or
    `retain_grad` observe the gradient."""
    node = tensor.grad_fn
    if node is None:
        return tensor
    if tensor._backward_hooks or tensor.retains_grad:
        return None
    return node.next_functions[0][0].variable if _is_leaf_connection(node) else None  # type: ignore[union-attr]


def _is_leaf_connection(node: Node) -> bool:
    return getattr(node, "_forward_cls", None) is _ConnectToLeaf


def _nodes(starts: Iterable[Node | None]) -> set[Node]:
    """Return the graph nodes on the way of backward from `starts` that hold buffers. Nodes of
    leaves hold none, so sharing them does not matter."""
    wanted = list(starts)
    found: set[Node] = set()
    while wanted:
        node = wanted.pop()
        if node is None or node in found or hasattr(node, "variable") or _is_leaf_connection(node):
            continue
        found.add(node)
        wanted += [following for following, _ in node.next_functions]
    return found
