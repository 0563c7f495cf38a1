"""Data flow of a model: the inputs of each unit call and of the loss, and the use of root
parameters.

The model runs once, recording every function called by the code between units: outputs depend on
all inputs. So the needs of each call, and of the loss, are root parameters and earlier calls; a
stage must have these parameters, and receive the outputs of these calls. Tables looked up by the
code before the first unit are needed nowhere else, not even in backward: the gradient of a lookup
needs only indices. Parameters of head and loss are needed only there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from gpumix.engine.model.unit_values import ArgumentsStructure
from gpumix.engine.schedule.remote_stage_values import (
    FILL_OPS,
    Returned,
    UnknownOutputError,
    hand_over,
    make_input_shape_key,
)
from gpumix.engine.sharding.absent_parameter import PERMITTED_FUNCTIONS
from gpumix.engine.sharding.unit_discovery import count_frozen_bytes, count_packed_bytes
from gpumix.engine.unit.unit_call import attach_leaf, find_reachable_leaves
from gpumix.hardware.memory_limit import is_out_of_memory
from gpumix.profiler.compute.unit_runner import UnitRunner
from gpumix.schema.errors import GpumixError, get_first_line
from gpumix.schema.plan.stage import StageInput
from gpumix.schema.profile.profile import CallInputs, EndParameters

LOOKUPS = (nn.functional.embedding, torch.embedding)
INSIDE_UNIT = -1  # place of a unit: its own operations are not recorded
# Functions of a tensor's shape, dtype or device, but not of its values.
LIKE_FIRST = frozenset(
    getattr(torch if name.endswith("_like") else torch.Tensor, name)
    for name in (*FILL_OPS, "new_tensor")
)
LIKE_SECOND = frozenset(
    getattr(torch.Tensor, name) for name in ("to", "type_as", "expand_as", "view_as", "reshape_as")
)
# Functions from a tensor's values to Python values or a shape: all later code may depend on them.
VALUE_READS = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        "__bool__", "__int__", "__float__", "__index__", "__contains__", "__format__", "item",
        "tolist", "numpy", "equal", "allclose", "is_nonzero", "nonzero", "argwhere", "unique",
        "masked_select",
    )
) | {
    torch.equal, torch.allclose, torch.is_nonzero, torch.nonzero, torch.argwhere, torch.unique,
    torch.masked_select,
}  # fmt: skip

Source = str | StageInput
"""Name of a root parameter, or an output of a unit call."""


@dataclass(frozen=True)
class DataFlow:
    """Data flow of a model.

    Attributes:
        before, after: root parameters only looked up before the first unit, and only used after the
            last.
        needs: of each call, then of the loss.
        no_stages: the reason why the flow is unknown; all else is empty then.
    """

    before: EndParameters
    after: EndParameters
    needs: tuple[CallInputs, ...]
    no_stages: str = ""


class _FlowRecorder(TorchFunctionMode):
    """Recorder of parameter uses (number of previous unit calls, and if looked up), of the sources
    of each tensor, and of all sources `looked` at so far."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.uses: dict[str, set[tuple[int, bool]]] = defaultdict(set)
        self.place = 0
        self.looked: set[Source] = set()
        self._names = names
        self._handed: dict[int, tuple[torch.Tensor, StageInput]] = {}  # by the id of a leaf
        self._behind: list[set[int]] = []  # for each call's inputs, the ids of leaves
        self._sources = WeakTensorKeyDictionary()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in PERMITTED_FUNCTIONS or self.place == INSIDE_UNIT:
            return func(*args, **kwargs)
        given = _tensors((args, kwargs))
        for name in (self._names[id(t)] for t in given if id(t) in self._names):
            self.uses[name].add((self.place, func in LOOKUPS))
        sources = self.sources(_read(func, args, kwargs))
        if func in VALUE_READS or _chooses(func, args):
            self.looked |= sources
        with torch._C.DisableTorchFunctionSubclass():
            versions = [t._version for t in given]
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            self.add(tensor, sources)
        with torch._C.DisableTorchFunctionSubclass():
            written = [t for t, version in zip(given, versions) if t._version != version]
            bases = [t._base for t in written]  # and any other views of the same base
        for tensor in (*written, *(base for base in bases if base is not None)):
            self.add(tensor, sources)
        return result

    def sources(self, value: Any) -> set[Source]:
        """Return the sources of the tensors in a pytree."""
        found: set[Source] = set()
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in _tensors(value):
                if id(tensor) in self._names:
                    found.add(self._names[id(tensor)])
                for one in (tensor, tensor._base):
                    found |= set() if one is None else self._sources.get(one, set())
        return found

    def set_sources(self, tensor: torch.Tensor, sources: set[Source]) -> None:
        """Set the sources of a tensor, replacing any known ones."""
        self._sources[tensor] = sources

    def handed(self, leaf: torch.Tensor, taken: StageInput) -> None:
        """Record a leaf in place of a call's output."""
        self._handed[id(leaf)] = leaf, taken

    def given(self, values: Any) -> None:
        """Record a pytree of inputs of a call or the loss."""
        with torch._C.DisableTorchFunctionSubclass():
            self._behind.append(set(find_reachable_leaves(_tensors(values))))

    def without_gradient(self) -> set[StageInput]:
        """Return the outputs without a gradient from later computation: rounded or detached by the
        model's code. Call at the end."""
        *of_calls, found = self._behind
        for number in reversed(range(len(of_calls))):  # each call passes gradients on to its inputs
            if any(taken.call == number for n, (_, taken) in self._handed.items() if n in found):
                found |= of_calls[number]
        return {taken for number, (_, taken) in self._handed.items() if number not in found}

    def add(self, tensor: torch.Tensor, sources: set[Source]) -> None:
        """Add sources to a tensor."""
        if sources:
            self._sources[tensor] = self._sources.get(tensor, set()) | sources


def find_flows(runner: UnitRunner, batch: Any, *, in_chunks: bool) -> DataFlow:
    """Run the model on `batch`, with tensors on the device; `in_chunks` avoids full logits."""
    try:
        return _trace_data_flow(runner, batch, in_chunks=in_chunks)
    except UnknownOutputError as error:
        told = f"{error.what}: {error.why}"
    except Exception as error:  # from the model's code, which runs in one stage
        if is_out_of_memory(error) or isinstance(error, GpumixError):
            raise
        told = f"run on what its units return it fails: {get_first_line(error)}"
    return DataFlow(before=EndParameters(), after=EndParameters(), needs=(), no_stages=told)


def _trace_data_flow(runner: UnitRunner, batch: Any, *, in_chunks: bool) -> DataFlow:
    groups = runner.root.bucket.groups
    notes = _FlowRecorder(
        {id(p): name for group in groups for p, name in group.names_by_parameter()}
    )
    returned: dict[object, Returned] = {}
    needed: list[set[Source]] = []
    chunks = runner.head_in_chunks() if in_chunks else nullcontext()
    with runner.start(batch) as walk, chunks, notes:
        walk.go_on()
        while walk.call is not None:
            notes.place = INSIDE_UNIT
            if runner.elsewhere is not None:
                runner.elsewhere.returned(walk.call)
            alike = runner.kind_of[walk.call.unit], make_input_shape_key(walk.call)
            if alike not in returned:
                returned[alike] = runner.returned(walk.call)
            inside = runner.shared_by[walk.call.unit]
            for name in inside:
                notes.uses[name].add((INSIDE_UNIT, False))
            leaves, _ = ArgumentsStructure.of(walk.call.args, walk.call.kwargs)
            given = notes.sources(leaves)
            notes.given(leaves)
            needed.append(given.union(inside, notes.looked))
            call, notes.place = len(walk.calls) - 1, len(walk.calls)
            gradients = walk.call.state.gradients
            leaves = _copy_outputs(returned[alike], call, notes, gradients=gradients)
            walk.go_on(hand_over(walk.call, returned[alike], leaves))
        needed.append(notes.sources(walk.result) | notes.looked)
    notes.given(walk.result)
    needed = [_with_gradients(sources, notes.without_gradient()) for sources in needed]
    taken = {one.call for sources in needed for one in sources if isinstance(one, StageInput)}
    for number, unit in enumerate(walk.calls[:-1]):
        if number not in taken:
            raise UnknownOutputError(
                f"call {number}, of unit '{unit}'",
                code="call-output-unknown",
                why="nothing uses what it returns",
            )
    # The first stage keeps parameters used by no stage: they belong to checkpoints.
    unused = {slot.name for slot in runner.root_slots}.difference(*needed)
    needed[0] = needed[0] | unused
    before = [name for name, uses in notes.uses.items() if uses == {(0, True)}]
    after = [name for name, uses in notes.uses.items() if {p for p, _ in uses} == {notes.place}]
    return DataFlow(
        before=_end(runner, before),
        after=_end(runner, after),
        needs=tuple(_needs(runner, sources) for sources in needed),
    )


def _copy_outputs(
    returned: Returned, call: int, notes: _FlowRecorder, *, gradients: bool
) -> list[Any]:
    """Copy a unit's recorded outputs as outputs of `call`."""
    leaves = []
    for place, leaf in enumerate(returned.leaves):
        value = leaf
        if isinstance(leaf, torch.Tensor):
            value = leaf.clone()
            source = StageInput(call=call, output=place, differentiable=leaf.is_floating_point())
            if value.is_floating_point() and gradients:
                handed, value = attach_leaf(value)
                notes.handed(handed, source)
            notes.set_sources(value, {source})
        leaves.append(value)
    return leaves


def _with_gradients(sources: set[Source], without: set[StageInput]) -> set[Source]:
    return {
        one.model_copy(update={"differentiable": False}) if one in without else one
        for one in sources
    }


def _read(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments of a function read by value."""
    if func in LIKE_FIRST:
        return args[1:], {name: value for name, value in kwargs.items() if name != "input"}
    return args[:1] if func in LIKE_SECOND else (args, kwargs)


def _chooses(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Check if a function selects elements by a mask."""
    return func is torch.Tensor.__getitem__ and any(
        t.dtype == torch.bool for t in _tensors(args[1])
    )


def _needs(runner: UnitRunner, sources: set[Source]) -> CallInputs:
    names = tuple(slot.name for slot in runner.root_slots if slot.name in sources)
    taken = [source for source in sources if isinstance(source, StageInput)]
    return CallInputs(
        root=names, outputs=tuple(sorted(taken, key=lambda one: (one.call, one.output)))
    )


def _end(runner: UnitRunner, names: Collection[str]) -> EndParameters:
    chosen = [slot for slot in runner.root_slots if slot.name in names]
    trained = [s.window.numel for s in chosen if s.parameter.requires_grad]
    return EndParameters(
        names=tuple(slot.name for slot in chosen),
        trainable=sum(trained),
        frozen_bytes=count_frozen_bytes(chosen, runner.compute_dtype),
        packed_bytes=count_packed_bytes(chosen),
    )


def _tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
