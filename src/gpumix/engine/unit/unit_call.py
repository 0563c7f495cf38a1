"""The cut at a unit's boundary. Forward keeps only the unit's inputs and backward recomputes the
rest, or forward keeps the unit's graph.

Between units the model's own code is ordinary autograd. A unit's outputs become leaves. Gradients
cross from leaf to leaf: from the unit's outputs, through its recompute, to its inputs, and through
the code between units to the outputs of earlier units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves

from gpumix.engine.model.backward_hooks import CheckpointedRun, KeptRun
from gpumix.engine.model.forward_coroutine import ModelError, ThreadState, UnitCall
from gpumix.engine.model.module_buffers import BufferCopies
from gpumix.engine.model.unit_values import (
    PLAIN_TYPES,
    ArgumentsStructure,
    Collected,
    OutputCapture,
    Structure,
    unflatten,
)
from gpumix.engine.offload.host_offload import OffloadedTensor, OffloadStore
from gpumix.engine.sequence_parallel.collective_regions import own_part
from gpumix.engine.sequence_parallel.positions import POSITION_DIM, is_divided
from gpumix.engine.unit.inter_unit_backward import (
    GradientTarget,
    attach_leaf,
    run_backward,
)
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
        self._sent_by_all: list[int] = []  # places of outputs divided within a team
        self.weights: SplitBackward | None = None
        self._recompute = recompute
        self._host = host
        self._inputs, structure = ArgumentsStructure.of(call.args, call.kwargs)
        self._captured = OutputCapture.of_unit(
            unit.name,
            call.args,
            call.kwargs,
            call.context,
            may_change=unit.positions is None,
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
            refuse_outputs(self.unit, outputs)
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
        refuse_outputs(self.unit, outputs)
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
            assert self.unit.positions is not None, "a team's part of it was sent"
            gradient = own_part(gradient, POSITION_DIM, self.unit.positions.team)
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
                with self._ran.backward():
                    run_backward(edges, gradients)
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
        self.seed()
        given = [cast_floating(value, self.dtype) for value in inputs]
        with self.state.applied():
            return self.captured.run_unit(self.label, self.forward, self.structure, given)

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
    tensors = (t for t in values if isinstance(t, torch.Tensor))
    return [0 if t.is_inference() else t._version for t in tensors]


def refuse_writes(inputs: Sequence[Any], before: list[int], what: str) -> None:
    """Raise a ModelError with message `what` if inputs were written into since `before`."""
    if get_versions(inputs) != before:
        raise ModelError(
            what,
            why="the input is needed unchanged to run the unit again in backward",
            fix="make the operation out of place in the model's code",
        )


def refuse_inputs(unit: str, inputs: Sequence[Any]) -> None:
    """Raise a ModelError if an input of a unit cannot cross its boundary."""
    for value in _find_opaque_values(inputs):
        if type(value).__name__.endswith("Cache"):
            raise ModelError(
                f"unit '{unit}' is given a {type(value).__name__}",
                why="a cache remembers the first run of a unit, which is run again in backward",
                fix="set `use_cache=False` in the model's configuration",
            )
    _refuse_hidden(unit, inputs, "is given", lambda t: t.requires_grad)


def refuse_outputs(unit: ShardedUnit, outputs: Sequence[Any]) -> None:
    """Raise a ModelError if an output cannot cross the unit's boundary or is useless to the model.
    Parameters of the unit are invalid once the unit is done.

    A model that one plan can run, every plan can: the rules are those of the plan that shards most.
    """
    _refuse_hidden(unit.name, outputs, "returns", torch.Tensor.is_floating_point)
    tensors = [t for t in outputs if isinstance(t, torch.Tensor)]
    if not tensors:
        raise ModelError(
            f"unit '{unit.name}' returns no tensor",
            why="its parameters get their gradients through what it returns",
            fix="return what it computes, or name other units: `model: {units: [MyBlock]}`",
        )
    full = unit.bucket.storages
    if any(t.layout == torch.strided and t.untyped_storage()._cdata in full for t in tensors):
        raise ModelError(
            f"unit '{unit.name}' returns one of its own parameters",
            why="its values are here while the unit is computed only",
            fix="return what is computed from it, or a `.clone()`",
        )


def _refuse_hidden(
    unit: str, values: Sequence[Any], verb: str, matters: Callable[[torch.Tensor], bool]
) -> None:
    """Refuse tensors inside objects that are no pytree. Such tensors cross the boundary unseen and
    would get no gradients."""
    for value in _find_opaque_values(values):
        if any(isinstance(t, torch.Tensor) and matters(t) for t in _list_contents(value)):
            kind = type(value).__name__
            raise ModelError(
                f"unit '{unit}' {verb} tensors inside of a {kind}",
                why="gradients cross the boundary in tensors, tuples, lists and dicts only",
                fix=f"make it one of those, or register it: "
                f"torch.utils._pytree.register_dataclass({kind})",
            )


def _find_opaque_values(values: Sequence[Any]) -> list[Any]:
    """Return the values of types that may contain further values."""
    return [value for value in values if type(value) not in PLAIN_TYPES]


def _list_contents(value: Any) -> list[Any]:
    """Return the visible contents of an object that is no pytree."""
    if isinstance(value, torch.Tensor | torch.nn.Module | type):
        return []
    held = list(getattr(value, "__dict__", {}).values())
    for kind in type(value).__mro__:
        names = getattr(kind, "__slots__", ())
        held += [getattr(value, n, None) for n in ([names] if isinstance(names, str) else names)]
    if isinstance(value, set | frozenset):
        held += value
    return tree_leaves(held)
