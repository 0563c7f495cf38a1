"""Runner of a model's units on one device: one unit of each kind, and the root unit.

The model's own forward determines the inputs of a unit. Only one unit of each kind has memory and
is computed; all others receive its outputs. So a model too large for a device can be profiled on
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from gpumix.engine.comm.communicator import Communicator, Pending, PooledTensor
from gpumix.engine.loss.chunked_cross_entropy import ChunkedCrossEntropy
from gpumix.engine.loss.reduction import Objective
from gpumix.engine.model.forward_coroutine import (
    Coroutine,
    ForwardResult,
    UnitCall,
    UnitCallHandlers,
    intercept,
)
from gpumix.engine.model.model_settings import bypass_torch_checkpoint
from gpumix.engine.model.unit_values import (
    ArgumentsStructure,
    Collected,
    Containers,
    OutputCapture,
)
from gpumix.engine.schedule.remote_stage_values import RemoteStages, Returned, run_without_gradients
from gpumix.engine.sequence_parallel.positions import PositionSharding
from gpumix.engine.sharding.flat_group import Dtypes
from gpumix.engine.sharding.shard_layout import ShardLayout
from gpumix.engine.sharding.unit_discovery import ModelUnits, Unit
from gpumix.engine.unit.regional_compile import compile_units, get_uncompiled_forward
from gpumix.engine.unit.sharded_units import ShardedUnit, Storage, make_standalone_unit
from gpumix.engine.unit.unit_call import (
    GradientTarget,
    InterUnitGraph,
    UnitBoundary,
    attach_leaf,
    cast_floating,
    divide_call_inputs,
)
from gpumix.hardware.host.replaced_attributes import replace_attributes
from gpumix.hardware.memory_limit import count_as_host_memory
from gpumix.profiler.compute.call_order import CallOrder
from gpumix.schema.cluster.kernels import PLAIN_EFFICIENCY, KernelSettings
from gpumix.schema.plan.splitting import ShardIntervals
from gpumix.schema.profile.profile import TensorParallelOperation

# Small and not zero: realistic for timing, and no loss overflows.
WEIGHT_STD = 0.02
# Of the sum of all losses: about one over the tokens of a batch.
SCALE = 2.0**-16

Told = tuple[TensorParallelOperation, int]
"""Collective of a tensor-parallel group, and a rank's bytes in it."""


class UnitRunner:
    """Model with one runnable unit per kind.

    Args:
        model: on the meta device or not; its parameters are replaced by random ones.
        device: where it runs.
        objective: the loss of a batch, as for the engine.
        tp_group: the tensor-parallel group, if the anatomy is divided.
        efficiency: compute settings of the device, already applied to the model.

    `scale` multiplies summed losses before backward; `shared_by` maps units to their parameters of
    the root; `order` is the order of calls, checked in each walk.
    """

    def __init__(
        self,
        model: nn.Module,
        anatomy: ModelUnits,
        *,
        device: torch.device,
        compute_dtype: torch.dtype,
        objective: Objective,
        tp_group: FakeTensorParallelGroup | None = None,
        efficiency: KernelSettings = PLAIN_EFFICIENCY,
    ) -> None:
        self.model = model
        self.images_last = efficiency.channels_last
        self.tp_group = tp_group
        self.device = device
        self.compute_dtype = compute_dtype
        self.compiled = False
        self.order = CallOrder()
        self.scale = torch.full((), SCALE, device=device)
        self._objective = objective
        self.head = ChunkedCrossEntropy(
            model,
            (unit.module for unit in anatomy.units),
            full_logits_reason="" if tp_group is None else "a tensor-parallel group computes it",
            fused=efficiency.loss == "triton",
        )
        self.root = self._alive(anatomy.root)
        self.head.add_to_gradients_of(self.root.bucket.trainable)
        self.root_slots = anatomy.root.slots
        dividing = (unit.positions for unit in anatomy.units if unit.positions is not None)
        self.positions = next(dividing, None)
        # Calls of a group depend on its ranks' parts; one rank's outputs do not show all.
        self.elsewhere = RemoteStages(anatomy, device, compute_dtype) if tp_group is None else None
        self.of_kind: dict[str, ShardedUnit] = {}
        self.kind_of: dict[str, str] = {}
        self._units = anatomy.units
        self._forwards = {unit.name: unit.module.forward for unit in anatomy.units}
        self.divide({unit.name: unit.kind for unit in anatomy.units})
        calls = UnitCallHandlers(model)
        for unit in anatomy.units:
            intercept(unit.name, unit.module, calls)
        self.shared_by = {unit.name: unit.uses(self.root_slots) for unit in anatomy.units}
        for owner in model.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    owner._buffers[name] = buffer.to(device)

    def _alive(self, unit: Unit) -> ShardedUnit:
        """Make a unit with gathered parameters and a gradient buffer, but no state: another rank of
        a made-up pair owns it."""
        alive = make_standalone_unit(
            unit,
            ShardLayout(zero_stage=3, shares=(1.0, 0.0), comm=_Bystander(self.device)),
            Storage(self.device, Dtypes(self.compute_dtype, self.compute_dtype), _no_values),
        )
        alive.bucket.install()
        for group in alive.bucket.groups:
            group.fill(lambda values: values.normal_(0.0, WEIGHT_STD))
        alive.bucket.begin_gradient()
        return alive

    def divide(self, kinds: Mapping[str, str]) -> None:
        """Assign kinds to units by name; existing kinds keep their unit."""
        self.kind_of = dict(kinds)
        for unit in self._units:
            kind = kinds[unit.name]
            if kind not in self.of_kind:
                self.of_kind[kind] = self._alive(unit)
                self.of_kind[kind].forward = self._forwards[unit.name]

    def compile(self, sizes: range) -> None:
        """Compile the units for micro-batches of `sizes`."""
        self.compiled = True
        compile_units(self.of_kind.values(), sizes=sizes, device=self.device)

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Run units uncompiled in a `with` block."""
        with ExitStack() as stack:
            for unit in self.of_kind.values():
                forward = get_uncompiled_forward(unit)
                stack.enter_context(replace_attributes(unit, forward=forward))
            yield

    def head_in_chunks(self) -> AbstractContextManager[None]:
        """Chunk the head and its loss in a `with` block, if the model supports it:
        `head.supported`."""
        return self.head.step(self.scale)

    def start(self, batch: Any) -> ModelRun:
        """Start a run of the model on `batch`, with tensors on the device."""
        return ModelRun(self, Coroutine(lambda: self._objective(self.model, batch)))

    def returned(self, call: UnitCall) -> Returned:
        """Return the called unit's outputs, without gradients and compiled code."""
        forward = get_uncompiled_forward(self.of_kind[self.kind_of[call.unit]])
        return run_without_gradients(
            call, forward, lambda value: cast_floating(value, self.compute_dtype)
        )

    def cut(self, call: UnitCall, *, recompute: bool = True) -> UnitBoundary:
        """Return the called unit as a runnable one, with the call's inputs. It can run repeatedly:
        the model's captures from inside are handed over only by `RecordedOutputs`."""
        context, _ = OutputCapture(call.context).copy_context()
        leaves, arguments = ArgumentsStructure.of(call.args, call.kwargs)
        args, kwargs = arguments.filled(leaves)  # with containers of its own
        cut = UnitBoundary(
            call._replace(args=args, kwargs=kwargs, context=context),
            self.of_kind[self.kind_of[call.unit]],
            compute_dtype=self.compute_dtype,
            seed=_no_seed,
            recompute=recompute,
        )
        # Its backward returns the gradients of all inputs, to be counted and compared.
        cut.links = [link._replace(handed=None) for link in cut.links]
        return cut


class ModelRun:
    """Run of the model from unit call to unit call.

    `enters` and `leaves` are the numbers of the calls before which hidden states are divided into
    positions, if they require gradients, and after which they are gathered; the last gather belongs
    to the head.
    """

    def __init__(self, runner: UnitRunner, coroutine: Coroutine) -> None:
        self.calls: list[str] = []
        self.enters: list[int] = []
        self.leaves: list[int] = []
        self._runner = runner
        self._coroutine = coroutine
        self._inside = ExitStack()
        self._glue = InterUnitGraph()
        self._links: list[list[GradientTarget]] = []
        self._leaves: list[torch.Tensor] = []
        self._from: list[int] = []  # by call, the index of its first leaf
        self._at: UnitCall | ForwardResult | None = None

    def __enter__(self) -> ModelRun:
        self._inside.enter_context(bypass_torch_checkpoint())
        return self

    def __exit__(self, *_: object) -> None:
        self._coroutine.close()
        self._inside.close()

    @property
    def call(self) -> UnitCall | None:
        """Current unit call; None at the end."""
        return self._at if isinstance(self._at, UnitCall) else None

    @property
    def result(self) -> Any:
        """Summed loss and count, at the end."""
        assert isinstance(self._at, ForwardResult)
        return self._at.value

    def go_on(self, outputs: Any = None) -> None:
        """Hand over the outputs of the call (nothing at the start) and run to the next.

        Raises:
            ModelError: the next call is not the one of earlier walks.
        """
        positions = self._runner.positions
        left = 0 if positions is None else positions.left
        self._from.append(len(self._leaves))
        self._at = self._coroutine.resume(tree_map(self._handed, outputs))
        self._runner.order.check_call(len(self.calls) + 1, self.call.unit if self.call else "")
        if self.call is not None and positions is not None:
            self.leaves += [len(self.calls) - 1] * (positions.left - left)
            self._divide(self.call, positions)
        if self.call is not None:
            self._links.append(self._runner.cut(self.call).links)
            self._glue.used(len(self.calls), self._links[-1])
            self.calls.append(self.call.unit)

    def _handed(self, value: Any) -> Any:
        """Prepare an output for the model, with a leaf for its gradient, as in the engine."""
        if not isinstance(value, torch.Tensor) or not (value.requires_grad and value.is_leaf):
            return value
        leaf, handed = attach_leaf(value)
        self._leaves.append(leaf)
        return handed

    def _divide(self, call: UnitCall, positions: PositionSharding) -> None:
        entered, runner = positions.entered, self._runner
        self._at = divide_call_inputs(call, runner.of_kind[runner.kind_of[call.unit]])
        self.enters += [len(self.calls)] * (positions.entered - entered)

    def loss_backward(self) -> None:
        """Run backward from the loss to the last unit's outputs, at the end."""
        assert isinstance(self._at, ForwardResult)
        loss, _ = self._at.value
        self._at = None
        self._glue.backward_loss(loss * self._runner.scale)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of units' outputs, and of tensors computed from them."""
        gradients = [leaf.grad for leaf in self._leaves if leaf.grad is not None]
        storages = [t.untyped_storage() for t in (*gradients, *self._glue.waiting)]
        return sum({s._cdata: s.nbytes() for s in storages}.values())

    def drop_gradients(self, number: int) -> None:
        """Free the output gradients of unit call `number`, the last call left."""
        for leaf in self._leaves[self._from[number + 1] :]:
            leaf.grad = None

    def backward(self, number: int) -> None:
        """Run backward through the code before unit call `number`."""
        links = self._links[number]
        self._glue.pass_on(number, links, _ones(links))

    def root_backward(self, inputs: list[GradientTarget]) -> None:
        """Run backward through the code before the first call, which took `inputs`."""
        self._glue.pass_on(0, inputs, _ones(inputs))


@dataclass(frozen=True)
class RecordedOutputs:
    """Outputs of a call, and the model's captures from inside, for calls of equal kind without
    computation."""

    value: Any
    collected: Collected

    @classmethod
    def of(cls, cut: UnitBoundary) -> RecordedOutputs:
        """Compute the outputs of a call."""
        return cls(cut.forward(), cut.collected)

    def again(self, call: UnitCall) -> Any:
        """Return the outputs for `call`, after handing over the model's captures."""
        captured = OutputCapture(call.context, Containers(call.unit, call.args, call.kwargs))
        captured.give_to_model(_alike(self.collected))
        return _alike(self.value)


def _alike(values: Any) -> Any:
    """Copy tensors without a graph, keeping `requires_grad`."""

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().requires_grad_(value.requires_grad)

    return tree_map(leaf, values)


class FakeTensorParallelGroup(Communicator):
    """Made-up tensor-parallel group: rank 0 of `degree` ranks with equal data. Collectives are
    recorded; gloo's buffers for them are not counted here (`cost.tensor_parallel_groups`)."""

    def __init__(self, degree: int, device: torch.device) -> None:
        super().__init__(None, rank=0, world=1, device=device)
        self.world = degree
        self.on_gloo = device.type == "cpu"
        self.told: list[Told] = []

    def borrow(self, purpose: str, like: torch.Tensor, rows: int, length: int) -> PooledTensor:
        with count_as_host_memory():
            return super().borrow(purpose, like, rows, length)

    def start_all_reduce(self, value: torch.Tensor, label: str, *, flags: bool = False) -> Pending:
        self._note("all_reduce", value)
        return Pending((), label, self)

    def exchange(
        self, row: torch.Tensor, label: str, *, into: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Pending]:
        self._note("exchange", row)
        rows = row.new_empty(self.world, row.numel()) if into is None else into
        return rows.copy_(row.expand(rows.shape)), Pending((), label, self)

    def reduce(
        self,
        full: torch.Tensor,
        intervals: ShardIntervals,
        label: str,
        deliver: Callable[[torch.Tensor], None],
    ) -> Pending:
        self._note("reduce", full)
        return Pending((), label, self, lambda: deliver(full[None, : intervals.sizes[0]]))

    def _note(self, operation: TensorParallelOperation, value: torch.Tensor) -> None:
        self.told.append((operation, value.nbytes))


class _Bystander(Communicator):
    """Rank 1 of two, which never communicates."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(None, rank=0, world=1, device=device)
        self.rank, self.world = 1, 2


def _ones(links: Sequence[GradientTarget]) -> list[torch.Tensor]:
    return [torch.ones(one.shape, dtype=one.dtype, device=one.device) for one in links]


def _no_values(name: str, parameter: nn.Parameter, start: int, end: int) -> torch.Tensor:
    raise AssertionError(f"a unit under measurement owns nothing, it was asked for '{name}'")


def _no_seed() -> None:
    return None


def tensor_bytes(value: Any) -> int:
    """Return the bytes of all tensors in a pytree."""
    tensors = (t for t in tree_leaves(value) if isinstance(t, torch.Tensor))
    return sum(t.numel() * t.element_size() for t in tensors)
