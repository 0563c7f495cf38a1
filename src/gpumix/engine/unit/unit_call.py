"""The cut at a unit's boundary. Forward keeps only the unit's inputs and backward recomputes the
rest, or forward keeps the unit's graph.

Between units the model's own code is ordinary autograd. A unit's outputs become leaves. Gradients
cross from leaf to leaf: from the unit's outputs, through its recompute, to its inputs, and through
the code between units to the outputs of earlier units.

The code between units (embedding, masks, norms, head, loss) gives *roots* of small graphs to units.
A root may be used by several units (an encoder's output): its gradients are summed until the first
of its users is done, and passed on once. Two roots may share a part of their graphs: the first
backward then keeps its buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils._pytree import tree_leaves

from gpumix.engine.model.backward_hooks import CheckpointedRun, KeptRun, run_backward
from gpumix.engine.model.forward_coroutine import ModelError, ThreadState, UnitCall
from gpumix.engine.model.module_buffers import BufferCopies
from gpumix.engine.model.unit_values import (
    PLAIN_TYPES,
    ArgumentsStructure,
    Collected,
    OutputCapture,
    Structure,
    take_apart,
    unflatten,
)
from gpumix.engine.offload.host_offload import OffloadedTensor, OffloadStore
from gpumix.engine.sequence_parallel.collective_regions import get_own_part
from gpumix.engine.sequence_parallel.positions import POSITION_DIM, is_divided
from gpumix.engine.unit.boundary_checks import refuse_inputs, refuse_outputs
from gpumix.engine.unit.sharded_units import ShardedUnit
from gpumix.engine.unit.split_backward import SplitBackward

Forward = Callable[..., Any]
Outputs = tuple[list[Any], Structure]


class UnitBoundary:
    """A unit call of a micro-batch, from forward to backward.

    Args:
        call: the model's call.
        unit: the unit; its parameters are gathered whenever a method here runs.
        compute_dtype: floating inputs are cast to it, as FSDP2's mixed precision does.
        seed: seeds the random numbers of this call, equally in the recompute.
        recompute: whether the graph is dropped after forward (activation checkpointing).
        host: where inputs for the recompute are kept; None: on the device.
        sends: places of the outputs sent to other stages, which are in `sent`.
    """

    def __init__(
        self,
        call: UnitCall,
        unit: ShardedUnit,
        *,
        compute_dtype: torch.dtype,
        seed: Callable[[], None],
        recompute: bool = True,
        host: OffloadStore | None = None,
        sends: Sequence[int] = (),
    ) -> None:
        self.unit = unit
        self._sends = sends
        self.sent: list[torch.Tensor] = []
        self._sent_by_all: list[int] = []  # places of outputs divided within the group
        self.weights: SplitBackward | None = None
        self._recompute = recompute
        self._host = host
        self._inputs, structure, self._captured = take_apart(
            unit.name, call.args, call.kwargs, call.context, may_change=unit.positions is None
        )
        self._run = UnitRun(
            unit.name,
            unit.forward,
            call.state,
            self._captured,
            compute_dtype,
            seed,
            structure,
        )
        self._versions = get_versions(self._inputs)
        if not PLAIN_TYPES.issuperset(map(type, self._inputs)):
            refuse_inputs(unit.name, self._inputs)
        # The inputs that want a gradient: outputs of earlier units, or made from them.
        gradients = call.state.gradients
        self._wanted = [
            gradients and isinstance(t, torch.Tensor) and t.requires_grad for t in self._inputs
        ]
        self.links = [
            GradientTarget.of(t) for t, wanted in zip(self._inputs, self._wanted) if wanted
        ]
        self.differentiable = gradients and (unit.trainable or bool(self.links))
        # Of a differentiable call, from forward to backward:
        self._sources: list[torch.Tensor] = []
        self._edges: list[GradientEdge | None] = []
        self._leaves: list[torch.Tensor | None] = []
        self._given: UnitInputs | None = None
        self._ran: CheckpointedRun[Outputs] | KeptRun[Outputs] | None = None

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The outputs after `forward` that may get a gradient before `backward`."""
        return [leaf for leaf in self._leaves if leaf is not None]

    @property
    def collected(self) -> Collected:
        """Values collected by the context of the call, by this call or before."""
        return self._captured.collected

    def forward(self) -> Any:
        """Run the unit and return its outputs to the model as leaves."""
        inputs = [t.detach() if isinstance(t, torch.Tensor) else t for t in self._inputs]
        if not self.differentiable:
            outputs, structure = self._run(inputs)
            self._check_outputs(outputs)
            self.sent = self._copy_sent_outputs(outputs, structure)
            return self._hand_over(outputs, structure)
        handed = list(inputs)
        for place, link in zip((n for n, w in enumerate(self._wanted) if w), self.links):
            source = link.handed
            if source is not None:  # the input's graph ends there, no further cut is needed
                handed[place] = self._inputs[place]
            else:
                source, handed[place] = attach_leaf(inputs[place])
            self._sources.append(source)
        changing = self.unit.with_buffers
        buffers = BufferCopies(changing) if changing else None
        run = partial(self._run, handed)
        del handed
        if self._recompute:
            self._given = UnitInputs(inputs, self._wanted)
            again = partial(self._run.again, self._given, buffers)
            self._ran = CheckpointedRun(self.unit.name, again)
        else:
            self._ran = KeptRun()
        outputs, structure = self._ran.forward(run)
        del run
        if buffers is not None:
            buffers.keep_changed()
        self._check_outputs(outputs)
        self.sent = self._copy_sent_outputs(outputs, structure)
        for place, output in enumerate(outputs):
            if not (isinstance(output, torch.Tensor) and output.requires_grad):
                self._edges.append(None)
                self._leaves.append(None)
                continue
            self._edges.append(get_gradient_edge(output))
            leaf, outputs[place] = attach_leaf(output)
            self._leaves.append(leaf)
        del output
        result = self._hand_over(outputs, structure)
        if self._given is None:
            self._inputs = []  # autograd keeps what it needs, and checks versions
        elif self._host is not None:
            self._given.send(self._host)
            self._inputs = []
        return result

    def add_gradient(self, place: int, gradient: torch.Tensor) -> None:
        """Add the gradient of the output at `place`, received from another stage."""
        leaf = self._leaves[place]
        if place in self._sent_by_all:
            assert self.unit.positions is not None, "a tensor-parallel rank's part of it was sent"
            gradient = get_own_part(gradient, POSITION_DIM, self.unit.positions.tp_group)
        if leaf is not None:  # else nothing trained precedes it
            leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient

    def prefetch(self) -> None:
        """Fetch inputs from the host, because the backward is next."""
        if self._given is not None:
            self._given.fetch()

    def backward(self, *, splits: bool = False) -> list[torch.Tensor | None]:
        """Recompute the unit if needed, run backward, and return the gradients of `links` in order.
        None for a link whose `handed` leaf already has the gradient.

        Parameters' gradients accumulate in the unit's gradient buffer. The cut is empty afterwards,
        except that with `splits` a kept graph's backward towards parameters is in `weights`.
        """
        ends = [
            (edge, leaf.grad)
            for edge, leaf in zip(self._edges, self._leaves)
            if edge is not None and leaf is not None and leaf.grad is not None
        ]
        sources = self._sources
        self._edges, self._leaves, self._sources = [], [], []
        if ends:
            if self._inputs:
                self._refuse_writes(
                    f"an input of unit '{self.unit.name}' was written into after the call"
                )
            self._inputs = []
            edges, gradients = zip(*ends)
            del ends
            assert self._ran is not None, "forward comes before backward"
            if splits and isinstance(self._ran, KeptRun):
                self.weights = SplitBackward(edges, gradients, sources)
            else:
                self._ran.backward(edges, gradients)
        self._ran = self._given = None
        return [
            None if link.handed is not None else source.grad
            for link, source in zip(self.links, sources)
        ]

    def _copy_sent_outputs(self, outputs: list[Any], structure: Structure) -> list[torch.Tensor]:
        """Return unsharded copies of outputs for later stages. The model may write into its own."""
        if not self._sends:
            return []
        result = outputs
        if self.unit.positions is not None:
            result = tree_leaves(unflatten(structure, iter(outputs)), is_leaf=is_divided)
        self._sent_by_all = [place for place in self._sends if is_divided(result[place])]
        with torch.no_grad():
            return [
                result[place].gathered() if is_divided(result[place]) else outputs[place].clone()
                for place in self._sends
            ]

    def _check_outputs(self, outputs: list[Any]) -> None:
        """Refuse outputs that cannot cross the boundary. Most need no closer look."""
        storages = [
            t.untyped_storage()._cdata
            for t in outputs
            if isinstance(t, torch.Tensor) and t.layout is torch.strided
        ]
        plain = PLAIN_TYPES.issuperset(map(type, outputs))
        if not (plain and storages and self.unit.bucket.storages.isdisjoint(storages)):
            refuse_outputs(self.unit, outputs)

    def _hand_over(self, outputs: list[Any], structure: Structure) -> Any:
        """Return the unit's result to the model and hand over collected values."""
        self._refuse_writes(f"unit '{self.unit.name}' writes into its own input")
        return self._captured.hand_over(outputs, structure)

    def _refuse_writes(self, what: str) -> None:
        refuse_writes(self._inputs, self._versions, what)


@dataclass
class UnitRun:
    """A repeatable run of a unit.

    A graph references this object for its recompute. It must not reference the cut, which holds the
    graph: a cycle through autograd is never collected.
    """

    label: str
    forward: Forward
    state: ThreadState
    captured: OutputCapture
    dtype: torch.dtype
    seed: Callable[[], None]
    structure: ArgumentsStructure

    def __call__(self, inputs: Sequence[Any]) -> Outputs:
        """Run the unit; return all results, collected values included, and their structure."""
        dtype = self.dtype
        given = [
            cast_floating(value, dtype) if isinstance(value, torch.Tensor) else value
            for value in inputs
        ]
        run = self.captured.run_unit
        return self.state.run(self.seed, run, self.label, self.forward, self.structure, given)

    def again(self, given: UnitInputs, buffers: BufferCopies | None) -> Outputs:
        """Recompute the unit with the original buffers and fresh inputs. Inputs must be fresh,
        since a hook that the unit sets on an input must not exist twice."""
        with buffers.use_copies() if buffers is not None else nullcontext():
            return self(given.make_leaves())


class UnitInputs:
    """Inputs of a unit call for its recompute, on the device or offloaded to the host.

    Args:
        inputs: detached from the model's graph.
        wanted: whether each input wants a gradient. Such inputs are activations of this call. Other
            inputs (masks, position tables) are shared by many calls and stay in place.
    """

    def __init__(self, inputs: Sequence[Any], wanted: Sequence[bool]) -> None:
        self._inputs = list(inputs)
        self._wanted = wanted
        self._away: dict[int, OffloadedTensor] = {}

    def send(self, host: OffloadStore) -> None:
        """Move the activations to the host."""
        for place, wanted in enumerate(self._wanted):
            if wanted:
                self._away[place] = host.keep(self._inputs[place])
                self._inputs[place] = None

    def fetch(self) -> None:
        """Start to fetch the activations."""
        for kept in self._away.values():
            kept.fetch()

    def make_leaves(self) -> list[Any]:
        """Return the inputs as leaves, ready for differentiation."""
        for place, kept in self._away.items():
            self._inputs[place] = kept.reload()
        self._away = {}
        return [
            t.detach().requires_grad_() if wanted else t
            for t, wanted in zip(self._inputs, self._wanted)
        ]


def divide_call_inputs(call: UnitCall, unit: ShardedUnit) -> UnitCall:
    """Return the call with the inputs reduced to this unit's positions."""
    if unit.positions is None:
        return call
    with call.state.applied():
        args, kwargs = unit.taken(call.args, call.kwargs)
    return call._replace(args=args, kwargs=kwargs)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Cast floating tensors to `dtype` and return any other value unchanged."""
    if not isinstance(value, torch.Tensor) or value.dtype == dtype:
        return value
    return value.to(dtype) if value.is_floating_point() else value


def get_versions(values: Sequence[Any]) -> list[int]:
    """Return the version counter of each tensor among `values`. Inference tensors have no counter
    and allow no backward; they count as 0."""
    return [
        0 if value.is_inference() else value._version
        for value in values
        if isinstance(value, torch.Tensor)
    ]


def refuse_writes(inputs: Sequence[Any], before: list[int], what: str) -> None:
    """Raise a ModelError with message `what` if inputs were written into since `before`."""
    if get_versions(inputs) != before:
        raise ModelError(
            what,
            code="unit-input-overwritten",
            why="the input is needed unchanged to run the unit again in backward",
            fix="make the operation out of place in the model's code",
        )


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


@dataclass
class InterUnitGraph:
    """The roots of a micro-batch. Backward runs in the order: the end, last unit call, ..., first.
    The end is the loss, or the absence of further calls."""

    _roots: dict[tuple[int, int], _Root] = field(default_factory=dict)
    _kept: set[int] = field(default_factory=set)

    @property
    def waiting(self) -> list[torch.Tensor]:
        """Gradients of roots still to be passed on."""
        return [r.gradient for r in self._roots.values() if r.gradient is not None]

    def forward(self, call: int, cut: UnitBoundary) -> Any:
        """Run unit call number `call`, before a backward; see `UnitBoundary.forward`."""
        outputs = cut.forward()
        self.used(call, cut.links)
        return outputs

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

    def backward(self, call: int, cut: UnitBoundary | None, *, splits: bool = False) -> None:
        """Run backward through unit call number `call` and the code before it; see
        `UnitBoundary.backward`. None for a call that needs none."""
        if cut is not None:
            self.pass_on(call, cut.links, cut.backward(splits=splits))

    def pass_on(
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
