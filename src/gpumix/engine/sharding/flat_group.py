"""Ragged flat shards: parameters in one buffer, owned by ranks in unequal parts.

The gathered buffer *is* the unit: its parameters are views into it, and their gradients are views
into one gradient buffer, so nothing is copied in or out. Buffers lie in memory allocated once,
before the first step; at ZeRO stage 3 several units take turns in the same memory.

Ownership and lifetime: a shard's `master` (this rank's interval in fp32, the whole run; a view of
`full` where resident and in fp32); `full` (from gather to release, or the whole run); `gradient`
(from the first backward of a step until its reduction is done), and this rank's interval of the sum
(at stages 0 and 1 a view of `gradient`).

A rank computing several of the parts into which other ranks divide units has a shard of each part;
only here are parameters and gradients copied, between the buffers and the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from gpumix.engine.comm.communicator import Pending, PooledTensor
from gpumix.engine.model.backward_hooks import (
    GradientAccumulation,
    ParameterGradient,
    copy_first_gradient,
)
from gpumix.engine.quantised.quantised_parameter import QuantisedParameter
from gpumix.engine.quantised.quantised_parameter_view import QuantisedParameterView
from gpumix.engine.quantised.weight_formats import casts_its_bias
from gpumix.engine.sharding.absent_parameter import AbsentParameter, MasterParameter
from gpumix.engine.sharding.parameter_slice import LocalParts, ParameterSlice, assemble_parameter
from gpumix.engine.sharding.shard import Piece, Scale, Shard, ShardMember, ShardMemory, Source
from gpumix.engine.sharding.shard_layout import Kind, ShardLayout
from gpumix.engine.sharding.unit_discovery import ParameterSlot


@dataclass(frozen=True)
class Dtypes:
    """Dtype of this rank's computation, and dtype in which all ranks gather parameters."""

    compute: torch.dtype
    communication: torch.dtype


ROUND_NUMEL = 64  # a multiple keeps the next parameter aligned, in every dtype


class FlatGroupSpec:
    """Parameters of one flat buffer: alike in dtype, in being trained, and in shard layout.

    Args:
        slots: the parameters.
        dtypes: dtype of the buffer, and of gathers; frozen parameters that are not floats keep
            their own.
        layouts: shard layout of each part of the parameters on this rank; usually one.
    """

    def __init__(
        self, slots: list[ParameterSlot], dtypes: Dtypes, layouts: tuple[ShardLayout, ...]
    ) -> None:
        first = slots[0].parameter
        for slot in slots:
            if isinstance(slot.parameter, QuantisedParameter):
                slot.parameter.format.check_compute_dtype(dtypes.compute)
        self.slots = sorted(slots, key=lambda slot: slot.summed)
        self.layouts = layouts
        self.trainable = first.requires_grad
        self.numels = [slot.window.numel for slot in self.slots]
        self.numel = sum(self.numels)
        # From here on, each rank of a tensor-parallel group has a partial gradient.
        self.summed_from = sum(s.window.numel for s in slots if not s.summed)
        floating = first.is_floating_point()
        self.dtype = dtypes.compute if floating else first.dtype
        self.gathered_dtype = dtypes.communication if floating else first.dtype
        # Frozen parameters have no values other than the gathered ones.
        self.master_dtype = torch.float32 if self.trainable else self.gathered_dtype

    @classmethod
    def among(
        cls, slots: list[ParameterSlot], dtypes: Dtypes, layout: ShardLayout
    ) -> list[FlatGroupSpec]:
        """Group parameters by buffer; trained groups first."""
        alike: dict[tuple[bool, torch.dtype | None, Kind], list[ParameterSlot]] = {}
        # Odd sizes last: kernels want all other parameters to begin at round addresses.
        for slot in sorted(slots, key=lambda s: s.parameter.numel() % ROUND_NUMEL != 0):
            p = slot.parameter
            kind = (p.requires_grad, None if p.is_floating_point() else p.dtype)
            alike.setdefault((*kind, layout.kind_of(slot)), []).append(slot)
        ordered = sorted(alike.items(), key=lambda item: str(item[0]), reverse=True)
        return [cls(of_kind, dtypes, layout.select_layouts(kind[-1])) for kind, of_kind in ordered]

    def members(self, number: int) -> list[ShardMember]:
        """Return the members of the vector of a shard layout."""
        windows = [(s.parts[number] if len(self.layouts) > 1 else s.window) for s in self.slots]
        return [ShardMember(s.name, s.parameter, w) for s, w in zip(self.slots, windows)]

    def divide_into_parts(self) -> list[list[ParameterSlice]]:
        """Return the slice of each parameter in each part, relative to the values on this rank."""
        parts = len(self.layouts)
        return [
            [
                ParameterSlice(s.window.local_shape, s.parts[0].dim, parts, n, s.parts[0].packed)
                for s in self.slots
            ]
            for n in range(parts)
        ]

    @property
    def full_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def arriving_bytes(self) -> int:
        """Bytes gathered in a dtype other than the compute dtype, or in parts."""
        return 0 if self._as_gathered else self.numel * self.gathered_dtype.itemsize

    @property
    def _as_gathered(self) -> bool:
        return self.dtype == self.gathered_dtype and len(self.layouts) == 1

    @property
    def own_masters(self) -> bool:
        """True if computing uses the updated values directly, without rounding in between."""
        return self._as_gathered and self.dtype == self.master_dtype

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients, which are accumulated in fp32."""
        return self.numel * 4 if self.trainable else 0


class FlatGroup:
    """Flat buffer divided among ranks. Its bucket takes it through a step.

    Attributes:
        gathers: each starts to fill a part of the buffer from all ranks' shards; `take` follows
            their end, if they arrive elsewhere.
        places: of the parameters in modules: a module's parameters, the name there, the view of the
            buffer, and the placeholder while it is empty.
        at_rest: places of parameters with the masters' values between two steps, if this rank has
            all masters.
        packed, recast: quantised weights, and biases that their modules cast for good.
        unused: parameters without a gradient on this rank since the step began, of `trained` ones.

    Args:
        label: the unit's name, for error messages.
        alike: the parameters; modules get views of the buffer instead.
        full, gradient: 1-D memory for the gathered parameters and, if trained, their gradients.
        arriving: memory for gathers in another dtype or in parts; this group's from the begin of
            its gather to the end.
    """

    def __init__(
        self,
        label: str,
        alike: FlatGroupSpec,
        *,
        full: torch.Tensor,
        gradient: torch.Tensor,
        arriving: torch.Tensor | None = None,
        source: Source,
    ) -> None:
        self.label = label
        self.trainable = alike.trainable
        self.numel = alike.numel
        self._summed_from = alike.summed_from
        self.full = full
        self.gradient = gradient
        self.arriving = arriving
        self._layout = alike.layouts[0]
        of_host = alike.trainable or self._layout.pool is not None
        self.on_host = on_host = self._layout.on_host and of_host
        own_masters = alike.own_masters and not on_host
        # True if an update of the masters does not reach `full` by itself.
        self.diverges = alike.trainable and not (self._layout.replicated and own_masters)
        in_parts = len(alike.layouts) > 1
        in_place = self._layout.whole_gradients and not (on_host or in_parts)
        self.shards = [
            Shard(
                label,
                alike.members(number),
                layout,
                ShardMemory(
                    full.device,
                    alike.master_dtype,
                    alike.gathered_dtype,
                    masters_in=full if layout.whole_parameters and own_masters else None,
                    sums_in=gradient if in_place else None,
                ),
                source,
            )
            for number, layout in enumerate(alike.layouts)
        ]
        # Between steps, a rank with all masters has an ordinary model.
        self.is_whole = (
            not (in_parts or on_host)
            and self._layout.tp_group is None
            and (self._layout.replicated or self._layout.comm.world == 1)
        )
        self._replace_parameters(alike)
        self._parts = LocalParts(self.views, alike.divide_into_parts()) if in_parts else None
        into = self.full if arriving is None else arriving
        parts = into.split([shard.numel for shard in self.shards])
        self.gathers = [partial(shard.gather, part) for shard, part in zip(self.shards, parts)]
        tp_group = self._layout.tp_group
        self._sums_in_tp_group = tp_group is not None and self._summed_from < self.numel
        self.gradients: list[ParameterGradient] = []
        self.receiving = GradientAccumulation(label)
        if self.trainable:
            self._point_gradients(alike)
        self.trained = frozenset(gradient.name for gradient in self.gradients)
        self.unused = self.trained

    @property
    def pieces(self) -> list[Piece]:
        return [piece for shard in self.shards for piece in shard.pieces]

    @property
    def layout(self) -> ShardLayout:
        """Shard layout of the buffer; of several parts, the first."""
        return self._layout

    def _replace_parameters(self, alike: FlatGroupSpec) -> None:
        """Replace the modules' parameters by views of the buffer."""
        self.views: list[nn.Parameter] = []
        self.places: list[
            tuple[dict[str, nn.Parameter | None], str, nn.Parameter, AbsentParameter]
        ] = []
        self.at_rest: list[tuple[dict[str, nn.Parameter | None], str, MasterParameter]] = []
        self.packed: list[QuantisedParameterView] = []
        self.recast: list[tuple[nn.Parameter, torch.Tensor]] = []
        masters: Sequence[torch.Tensor | None] = [None] * len(alike.slots)
        if self.is_whole:
            masters = self.shards[0].master.split(alike.numels)
        for number, (slot, view, master) in enumerate(
            zip(alike.slots, self.full.data.split(alike.numels), masters)
        ):
            if isinstance(slot.parameter, QuantisedParameter):
                form = slot.parameter.format
                packed = QuantisedParameterView.of(slot.places, form, view, master)
                self.packed.append(packed)
                shaped = packed.shown.parameter
                away = AbsentParameter.of(packed.make_placeholder(), slot.name)
                for key in form.asked_first:
                    setattr(away, key, getattr(shaped, key))
            else:
                # `.data` gives the view a separate version counter: to autograd, the next gather is
                # no in-place change of saved tensors.
                shape = slot.window.local_shape
                shaped = nn.Parameter(view.view(shape).data, slot.parameter.requires_grad)
                away = AbsentParameter.of(shaped, slot.name)
                if any(map(casts_its_bias, (module for module, _ in slot.places))):
                    self.recast.append((shaped, shaped.data))
                if master is not None:
                    rest = MasterParameter.of(master.view(shape), self.shards[0].pieces[number])
                    self.at_rest += [(m._parameters, name, rest) for m, name in slot.places]
            for module, attribute in slot.places:
                self.places.append((module._parameters, attribute, shaped, away))
            self.views.append(shaped)

    def _point_gradients(self, alike: FlatGroupSpec) -> None:
        """Make autograd accumulate in fp32 into views of the gradient buffer.

        The first gradient of a step is copied as soon as autograd has it: the buffer need not be
        zeroed before, nor read for an addition.
        """
        for view in self.views:
            if view.dtype != torch.float32:
                view.grad_dtype = torch.float32  # type: ignore[attr-defined]
        places = self.gradient.split(alike.numels)
        for slot, view, gradient in zip(alike.slots, self.views, places):
            place = gradient.view(view.shape)
            view.grad = place
            put = view.register_post_accumulate_grad_hook(
                partial(copy_first_gradient, place, self.receiving)
            )
            self.gradients.append(ParameterGradient(slot.name, view, place, put))

    def names_by_parameter(self) -> Iterator[tuple[nn.Parameter, str]]:
        """Yield the parameters that modules may contain, with the names of the pieces."""
        for _, _, view, away in self.places:
            yield view, away.parameter_name
            yield away, away.parameter_name

    @torch.no_grad()
    def fill(
        self, floats: Callable[[torch.Tensor], object], generator: torch.Generator | None = None
    ) -> None:
        """Fill the buffer with values for measurements: floats by `floats`, quantised parameters
        with typical ones, and everything else with zeros."""
        if self.full.is_floating_point():
            floats(self.full.data)
        else:
            self.full.data.zero_()
            for packed in self.packed:
                packed.fill(generator)

    # -- parameters ---------------------------------------------------------------------------

    def take(self) -> None:
        """Copy the arrived parameters to where this rank computes, in the compute dtype."""
        assert self.arriving is not None
        if self._parts is None:
            self.full.copy_(self.arriving)
            return
        for number, part in enumerate(self.arriving.split([s.numel for s in self.shards])):
            self._parts.put(number, part)

    def install_copies(self) -> None:
        """Install copies of the arrived parameters in the modules: the buffer may be filled with
        other parameters from now on. Copies take no gradients."""
        copies = {}
        packed = {id(one.shown.parameter): one.install_copy() for one in self.packed}
        for view in self.views:
            copy = packed.get(id(view))
            if copy is None:
                copy = nn.Parameter(view.detach().clone(), view.requires_grad)
            copies[id(view)] = copy
            if copy.requires_grad:
                copy.register_post_accumulate_grad_hook(lambda _: self.receiving.check_active())
        for parameters, attribute, view, _ in self.places:
            parameters[attribute] = copies[id(view)]

    def gather_masters(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Yield every full parameter, as a view of temporary memory. Collective."""
        rows, tp_group = [shard.all_masters() for shard in self.shards], self._layout.tp_group
        if tp_group is not None:
            label = f"exchange of the state of unit '{self.label}'"
            tables = []
            for flat in rows:
                table, told = tp_group.exchange(flat, label)
                told.wait()
                tables.append(table)
            rows = [table[member] for member in range(tp_group.world) for table in tables]
        pieces = self.shards[0].pieces
        numels = [piece.window.numel for piece in pieces]
        for piece, *parts in zip(pieces, *(row.split(numels) for row in rows)):
            yield piece, assemble_parameter(piece.window, parts)

    # -- gradients ----------------------------------------------------------------------------

    def gradients_of(self, module: nn.Module) -> list[ParameterGradient]:
        """Return the gradients of a module's own parameters, for code adding to gradients."""
        own = {id(v) for held, _, v, _ in self.places if held is module._parameters}
        return [gradient for gradient in self.gradients if id(gradient.view) in own]

    def make_reduction(self) -> Callable[[Scale | None], list[Pending]]:
        """Return what starts to sum the gradient over ranks. At the end, this rank's part, times
        the scale, is in the pieces' `grad`: added to gradients already there, as autograd does.
        Without a scale, sums are added up over the step, and reach `grad` only when `settle`d."""
        if self._sums_in_tp_group or self._layout.repeats > 1 or self._parts is not None:
            return self._reduce_in_parts
        return partial(self.shards[0].reduce, self.gradient)

    def _reduce_in_parts(self, scale: Scale | None) -> list[Pending]:
        """Reduce the gradient in a tensor-parallel group, or of several parts; see
        `make_reduction`."""
        layout = self._layout
        if self._sums_in_tp_group:
            # At once: another bucket needs the buffer soon, and the amount is small.
            assert layout.tp_group is not None
            parts = self.gradient[self._summed_from :]
            label = f"reduction of unit '{self.label}' in its tensor-parallel group"
            layout.tp_group.all_reduce(parts, label)
        if layout.repeats > 1:
            self.gradient.div_(layout.repeats)
        if self._parts is None:
            return self.shards[0].reduce(self.gradient, scale)
        # All parts at once: ranks with a single part continue with the next collective.
        rooms = self._rooms()
        for number, room in enumerate(rooms):
            self._parts.copy_gradient(number, room.tensor[0])
        return [
            pending.at_end(room.give_back)
            for shard, room in zip(self.shards, rooms)
            for pending in shard.reduce(room.tensor[0], scale)
        ]

    def _rooms(self) -> list[PooledTensor]:
        """Borrow memory for the gradients of each part."""
        comm = self._layout.comm
        return [comm.borrow("parts", self.gradient, 1, shard.numel) for shard in self.shards]

    def expect_reduce(self) -> None:
        """Reserve the memory of reductions, for the largest group to be reduced."""
        if self._parts is None:
            self.shards[0].expect_reduce(self.gradient)
            return
        rooms = self._rooms()
        for shard, room in zip(self.shards, rooms):
            shard.expect_reduce(room.tensor[0])
        for room in rooms:
            room.give_back()

    def settle(self, scale: Scale) -> None:
        """Multiply all sums reduced in a step without a scale by `scale`, and put the result into
        the pieces' `grad`."""
        for shard in self.shards:
            shard.settle(scale)

    def forget_sums(self) -> None:
        """Discard the sums of this step."""
        self.receiving.now = False
        for shard in self.shards:
            shard.forget_sums()


def reserve_reduction_memory(trained: Sequence[FlatGroup]) -> None:
    """Reserve the memory for reducing `trained` groups. Of groups divided by the same ranks, the
    largest reserves for all."""
    largest: dict[int, FlatGroup] = {}
    for group in trained:
        ranks = id(group.layout.comm)
        if ranks not in largest or largest[ranks].numel < group.numel:
            largest[ranks] = group
    for group in largest.values():
        group.expect_reduce()
