"""Backward in two parts: first to inputs, which another stage waits for, then to parameters.

Both parts run through the graph of a kept forward pass. Where a path to a parameter leaves the
paths to inputs, the first part records the passing gradient; the second part begins there. Nodes at
these places (the backward of a layer norm, say) run in both parts; a linear layer's products are
each computed once. Private functions of `torch.distributed.pipelining` find the places. Where they
are missing, the profiler measures no split, and schedule `zero-bubble` is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node

from gpumix.schema.errors import MachineError, get_first_line

Gradients = tuple[torch.Tensor | None, ...]


def explain_unsupported() -> str:
    """Return why this torch splits no backward; empty if splitting works."""
    try:
        from torch.distributed.pipelining._backward import (  # noqa: F401
            _get_grad_fn_or_grad_acc,
            construct_reverse_graph,
            get_param_groups,
        )
    except ImportError as error:
        return get_first_line(error)
    return ""


def check_supported() -> None:
    """Refuse a torch that splits no backward.

    Raises:
        MachineError: this torch splits no backward.
    """
    if why := explain_unsupported():
        raise MachineError(
            "backward passes cannot be split here, as schedule 'zero-bubble' does",
            code="split-backward-unavailable",
            where=f"torch {torch.__version__}",
            why=why,
            fix="make a plan by another schedule: `techniques: {pipeline_schedules: [1f1b, "
            "eager-1f1b, gpipe, interleaved]}`",
        )


class SplitBackward:
    """Backward in two parts; construction runs the first, and sets the `grad` of `inputs`.

    Args:
        edges, gradients: where backward begins, and the gradients there.
        inputs: leaves of the graph; all other leaves are parameters, of this unit or others.
    """

    def __init__(
        self,
        edges: Sequence[GradientEdge],
        gradients: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
    ) -> None:
        from torch.distributed.pipelining._backward import construct_reverse_graph, get_param_groups

        nodes = [edge.node for edge in edges]
        reverse = construct_reverse_graph(nodes)
        begins = [_get_node(i) for i in inputs]
        leaves: dict[Node, torch.Tensor] = {
            node: node.variable  # type: ignore[attr-defined]
            for node in reverse
            if node not in begins and node.name() == "torch::autograd::AccumulateGrad"
        }
        self._groups = [
            _ParameterGroup(
                list(found["intermediates"]), [leaves[node] for node in found["params"]]
            )
            for found in get_param_groups(begins, list(leaves), reverse)
        ]
        handles = [handle for group in self._groups for handle in group.watch()]
        try:
            if inputs:
                torch.autograd.backward(edges, gradients, inputs=list(inputs), retain_graph=True)
        finally:
            for handle in handles:
                handle.remove()
        # Parameters sharing no path with an input get their gradient from the beginning.
        apart = {id(p) for group in self._groups for p in group.parameters}
        self._edges, self._gradients = edges, gradients
        # Where no input comes before, the first part recorded nothing.
        leading = _find_dependents(begins, reverse)
        self._aside = [
            (edge, gradient) for edge, gradient in zip(edges, gradients) if edge.node not in leading
        ]
        self._others = [p for p in leaves.values() if id(p) not in apart]

    def backward(self) -> None:
        """Run the second part: gradients of parameters accumulate as in any backward."""
        if self._others:
            torch.autograd.backward(
                self._edges, self._gradients, inputs=self._others, retain_graph=True
            )
        grouped = [p for group in self._groups for p in group.parameters]
        if self._aside and grouped:
            aside, gradients = zip(*self._aside)
            torch.autograd.backward(aside, gradients, inputs=grouped, retain_graph=True)
        for group in self._groups:
            group.backward()


class _ParameterGroup:
    """Parameters, with the nodes where paths to parameters leave paths to inputs; `_came` has the
    gradients recorded at each node."""

    def __init__(self, nodes: list[Node], parameters: list[torch.Tensor]) -> None:
        self.parameters = parameters
        self._nodes = nodes
        self._came: list[Gradients | None] = [None] * len(nodes)

    def watch(self) -> list[Any]:
        return [node.register_prehook(self._note(n)) for n, node in enumerate(self._nodes)]

    def _note(self, number: int) -> Callable[[Gradients], None]:
        def note(gradients: Gradients) -> None:
            self._came[number] = gradients

        return note

    def backward(self) -> None:
        edges, gradients, handles = [], [], []
        for node, came in zip(self._nodes, self._came):
            for number, gradient in enumerate(came or ()):
                if gradient is not None:
                    edges.append(GradientEdge(node, number))
                    gradients.append(gradient)
            if came is not None and len(self._nodes) > 1:
                # A node may come after another: the gradient recorded there is complete.
                handles.append(node.register_prehook(lambda _, came=came: came))
        try:
            if edges:
                torch.autograd.backward(edges, gradients, inputs=self.parameters, retain_graph=True)
        finally:
            for handle in handles:
                handle.remove()
        self._nodes, self._came = [], []


def _find_dependents(nodes: list[Node], reverse: Mapping[Node, list[Node]]) -> set[Node]:
    """Return the nodes, and all nodes whose backward leads to any of the nodes."""
    found, wanted = set(nodes), list(nodes)
    while wanted:
        for user in reverse.get(wanted.pop(), ()):
            if user not in found:
                found.add(user)
                wanted.append(user)
    return found


def _get_node(tensor: torch.Tensor) -> Node:
    from torch.distributed.pipelining._backward import _get_grad_fn_or_grad_acc

    node = _get_grad_fn_or_grad_acc(tensor)
    assert node is not None, "it requires a gradient"
    return node
