"""One unit of each kind, and the root unit, ready to run on one device.

The model's own forward decides what a unit is called with. Of each kind only one unit has memory
and is computed; the others stand in line and are handed its outputs. So a model that does not fit
on a device can be profiled on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from gpumix.engine import own_checkpoints
from gpumix.engine.boundary import Cut, cast, taken
from gpumix.engine.captured import Captured, Collected
from gpumix.engine.comm import Borrowed, Communicator, Pending
from gpumix.engine.compiled import compile_units, plain_forward
from gpumix.engine.containers import Containers
from gpumix.engine.coroutine import Calls, Coroutine, Finished, UnitCall, intercept
from gpumix.engine.division import Division
from gpumix.engine.elsewhere import Elsewhere, Returned, plain_run
from gpumix.engine.glue import Glue, Link, hand, without_memory
from gpumix.engine.head import HeadInChunks
from gpumix.engine.parts import ShardedUnit, Storage, alone
from gpumix.engine.reduction import Objective
from gpumix.engine.sequence import Positions
from gpumix.engine.shards import Dtypes, FlatGroup
from gpumix.engine.units import Anatomy, Unit
from gpumix.engine.values import Arguments
from gpumix.hardware.memory import host_memory
from gpumix.profiler.order import OneOrder
from gpumix.spec.cut import Intervals
from gpumix.spec.profile import TeamOperation

# Small and not zero: like trained weights for the clock, and no loss overflows.
WEIGHT_STD = 0.02
# Of the sum of all losses: of the order of one over the tokens of a batch.
SCALE = 2.0**-16

Told = tuple[TeamOperation, int]
"""One collective of a team, and the bytes that a rank gives to it."""


class Specimens:
    """A model of which one unit per kind can run.

    Args:
        model: on the meta device or not; its parameters are replaced by random ones.
        device: where it runs.
        objective: the loss of a batch, as for the engine.
        team: the ranks that this one computes with, if the anatomy is divided between them.
        images_last: whether channels come last in batches of images.
        fused_loss: whether a head in chunks has its losses from the fused kernel.

    `scale` is what summed losses are multiplied with before backward; `shared_by` are by unit the
    parameters of the root that it uses; `order` is that of the calls, to which each walk is held.
    """

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        *,
        device: torch.device,
        compute_dtype: torch.dtype,
        objective: Objective,
        team: MadeUpTeam | None = None,
        images_last: bool = False,
        fused_loss: bool = False,
    ) -> None:
        self.model = model
        self.images_last = images_last
        self.team = team
        self.device = device
        self.compute_dtype = compute_dtype
        self.compiled = False
        self.order = OneOrder()
        self.scale = torch.full((), SCALE, device=device)
        self._objective = objective
        self.head = HeadInChunks(
            model,
            (unit.module for unit in anatomy.units),
            whole_because="" if team is None else "a team computes it together",
            fused=fused_loss,
        )
        self.root = self._alive(anatomy.root)
        self.head.add_to_gradients_of(self.root.bucket.trainable)
        self.root_slots = anatomy.root.slots
        dividing = (unit.positions for unit in anatomy.units if unit.positions is not None)
        self.positions = next(dividing, None)
        # The calls of a team go by what its ranks have; what those of one return says all.
        self.elsewhere = Elsewhere(anatomy, device, compute_dtype) if team is None else None
        self.of_kind: dict[str, ShardedUnit] = {}
        self.kind_of: dict[str, str] = {}
        self._units = anatomy.units
        self._forwards = {unit.name: unit.module.forward for unit in anatomy.units}
        self.divide({unit.name: unit.kind for unit in anatomy.units})
        calls = Calls()
        for unit in anatomy.units:
            intercept(unit.name, unit.module, calls)
        self.shared_by = {unit.name: unit.uses(self.root_slots) for unit in anatomy.units}
        for owner in model.modules():
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    owner._buffers[name] = buffer.to(device)

    def _alive(self, unit: Unit) -> ShardedUnit:
        """A unit with gathered parameters and a gradient buffer, but no state: another rank of a
        made-up pair owns all of that."""
        alive = alone(
            unit,
            Division(zero_stage=3, shares=(1.0, 0.0), comm=_Bystander(self.device)),
            Storage(self.device, Dtypes(self.compute_dtype, self.compute_dtype), _no_values),
        )
        for group in alive.bucket.groups:
            _fill(group)
        return alive

    def divide(self, kinds: Mapping[str, str]) -> None:
        """Let units be of these kinds, by their names; those that there are keep their units."""
        self.kind_of = dict(kinds)
        for unit in self._units:
            kind = kinds[unit.name]
            if kind not in self.of_kind:
                self.of_kind[kind] = self._alive(unit)
                self.of_kind[kind].forward = self._forwards[unit.name]

    def compile(self, sizes: range) -> None:
        """Let the units compute by compiled code, for micro-batches of `sizes`."""
        self.compiled = True
        compile_units(self.of_kind.values(), sizes=sizes, device=self.device)

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Inside, units do not compute by compiled code."""
        units = list(self.of_kind.values())
        before = [unit.forward for unit in units]
        for unit in units:
            unit.forward = plain_forward(unit)
        try:
            yield
        finally:
            for unit, forward in zip(units, before):
                unit.forward = forward

    def head_in_chunks(self) -> AbstractContextManager[None]:
        """Inside, the head and its loss run in chunks, if the model lets them: `head.supported`."""
        return self.head.step(self.scale)

    def start(self, batch: Any) -> Walk:
        """Begin to run the model on `batch`, whose tensors are on the device."""
        return Walk(self, Coroutine(lambda: self._objective(self.model, batch)))

    def returned(self, call: UnitCall) -> Returned:
        """What the called unit returns, without gradients and compiled code."""
        forward = plain_forward(self.of_kind[self.kind_of[call.unit]])
        return plain_run(call, forward, lambda value: cast(value, self.compute_dtype))

    def cut(self, call: UnitCall, *, recompute: bool = True) -> Cut:
        """The specimen of the called unit, given what that was called with. It runs as often as one
        likes: what the model takes from inside it is handed over by `Outputs` alone."""
        context, _ = Captured(call.context).apart()
        leaves, arguments = Arguments.of(call.args, call.kwargs)
        args, kwargs = arguments.filled(leaves)  # with containers of its own
        cut = Cut(
            call._replace(args=args, kwargs=kwargs, context=context),
            self.of_kind[self.kind_of[call.unit]],
            compute_dtype=self.compute_dtype,
            seed=_no_seed,
            recompute=recompute,
        )
        # Its backward gives the gradients of all inputs, to be counted and compared.
        cut.links = [link._replace(handed=None) for link in cut.links]
        return cut


class Walk:
    """One run of the model from unit call to unit call.

    `enters` and `leaves` are the numbers of the calls before and behind which the positions of
    hidden states are divided, where that has a gradient, and become whole again; the last one's are
    the head's affair.
    """

    def __init__(self, specimens: Specimens, coroutine: Coroutine) -> None:
        self.calls: list[str] = []
        self.enters: list[int] = []
        self.leaves: list[int] = []
        self._specimens = specimens
        self._coroutine = coroutine
        self._inside = ExitStack()
        self._glue = Glue()
        self._links: list[list[Link]] = []
        self._leaves: list[torch.Tensor] = []
        self._from: list[int] = []  # of each call, the place of its first leaf
        self._at: UnitCall | Finished | None = None

    def __enter__(self) -> Walk:
        self._inside.enter_context(own_checkpoints.taken_over())
        return self

    def __exit__(self, *_: object) -> None:
        self._coroutine.close()
        self._inside.close()

    @property
    def call(self) -> UnitCall | None:
        """The unit call that the walk has stopped at; None at the end."""
        return self._at if isinstance(self._at, UnitCall) else None

    @property
    def result(self) -> Any:
        """Summed loss and count, at the end."""
        assert isinstance(self._at, Finished)
        return self._at.value

    def go_on(self, outputs: Any = None) -> None:
        """Hand over the outputs of the call (nothing at the start) and walk to the next.

        Raises:
            ModelError: it is another one than in other walks.
        """
        positions = self._specimens.positions
        left = 0 if positions is None else positions.left
        self._from.append(len(self._leaves))
        self._at = self._coroutine.resume(tree_map(self._handed, outputs))
        self._specimens.order.reached(len(self.calls) + 1, self.call.unit if self.call else "")
        if self.call is not None and positions is not None:
            self.leaves += [len(self.calls) - 1] * (positions.left - left)
            self._divide(self.call, positions)
        if self.call is not None:
            self._links.append(self._specimens.cut(self.call).links)
            self._glue.used(len(self.calls), self._links[-1])
            self.calls.append(self.call.unit)

    def _handed(self, value: Any) -> Any:
        """An output for the model, its gradient for a leaf, as the engine has it."""
        if not isinstance(value, torch.Tensor) or not (value.requires_grad and value.is_leaf):
            return value
        self._leaves.append(without_memory(value).requires_grad_())
        return hand(self._leaves[-1], value)

    def _divide(self, call: UnitCall, positions: Positions) -> None:
        entered, specimens = positions.entered, self._specimens
        self._at = taken(call, specimens.of_kind[specimens.kind_of[call.unit]])
        self.enters += [len(self.calls)] * (positions.entered - entered)

    def loss_backward(self) -> None:
        """At the end: backward from the loss to the last unit's outputs."""
        assert isinstance(self._at, Finished)
        loss, _ = self._at.value
        self._at = None
        self._glue.backward_loss(loss * self._specimens.scale)

    @property
    def gradient_bytes(self) -> int:
        """What the gradients take that units' outputs have got, and what is made of these."""
        gradients = [leaf.grad for leaf in self._leaves if leaf.grad is not None]
        storages = [t.untyped_storage() for t in (*gradients, *self._glue.waiting)]
        return sum({s._cdata: s.nbytes() for s in storages}.values())

    def drop_gradients(self, number: int) -> None:
        """Unit call `number`, the last that has not been, takes those of its outputs."""
        for leaf in self._leaves[self._from[number + 1] :]:
            leaf.grad = None

    def backward(self, number: int) -> None:
        """Backward through the code before unit call `number`."""
        links = self._links[number]
        self._glue.backward(number, links, _ones(links))

    def root_backward(self, inputs: list[Link]) -> None:
        """Backward through the code before the first call, which took `inputs`."""
        self._glue.backward(0, inputs, _ones(inputs))


@dataclass(frozen=True)
class Outputs:
    """A call's outputs, and what the model takes from inside it, to be handed to calls of the same
    kind that are not computed."""

    value: Any
    collected: Collected

    @classmethod
    def of(cls, cut: Cut) -> Outputs:
        """Computed now."""
        return cls(cut.forward(), cut.collected)

    def again(self, call: UnitCall) -> Any:
        """What `call` returns, once the model has what else it takes."""
        given = Containers(call.unit, call.args, call.kwargs)
        Captured(call.context, given).hand_over(_alike(self.collected))
        return _alike(self.value)


def _alike(values: Any) -> Any:
    """Tensors of the same values, each with a gradient of its own if it had one."""

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().requires_grad_(value.requires_grad)

    return tree_map(leaf, values)


class MadeUpTeam(Communicator):
    """Rank 0 of so many, all of which have what it has; what they tell each other is noted, the
    memory that gloo keeps for it is not counted (`cost.teams`)."""

    def __init__(self, degree: int, device: torch.device) -> None:
        super().__init__(None, rank=0, world=1, device=device)
        self.world = degree
        self.on_gloo = device.type == "cpu"
        self.told: list[Told] = []

    def borrow(self, purpose: str, like: torch.Tensor, rows: int, length: int) -> Borrowed:
        with host_memory():
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
        intervals: Intervals,
        label: str,
        deliver: Callable[[torch.Tensor], None],
    ) -> Pending:
        self._note("reduce", full)
        return Pending((), label, self, lambda: deliver(full[None, : intervals.sizes[0]]))

    def _note(self, operation: TeamOperation, value: torch.Tensor) -> None:
        self.told.append((operation, value.nbytes))


class _Bystander(Communicator):
    """Rank 1 of two, which never communicates."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(None, rank=0, world=1, device=device)
        self.rank, self.world = 1, 2


def _ones(links: Sequence[Link]) -> list[torch.Tensor]:
    return [torch.ones(one.shape, dtype=one.dtype, device=one.device) for one in links]


def _no_values(name: str, parameter: nn.Parameter, start: int, end: int) -> torch.Tensor:
    raise AssertionError(f"a specimen owns nothing, it was asked for '{name}'")


def _no_seed() -> None:
    return None


def _fill(group: FlatGroup) -> None:
    group.install()
    if group.full.is_floating_point():
        group.full.data.normal_(0.0, WEIGHT_STD)
    else:
        group.full.data.zero_()
    if group.trainable:
        group.begin_gradient()


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in a pytree."""
    tensors = (t for t in tree_leaves(value) if isinstance(t, torch.Tensor))
    return sum(t.numel() * t.element_size() for t in tensors)
