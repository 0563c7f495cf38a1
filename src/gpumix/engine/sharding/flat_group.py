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
from torch.utils.hooks import RemovableHandle

from gpumix.engine.comm.communicator import Pending, PooledTensor
from gpumix.engine.model.forward_coroutine import ModelError
from gpumix.engine.quantised.packed_places import PackedPlace
from gpumix.engine.quantised.packed_weight import PackedWeight
from gpumix.engine.quantised.weight_formats import casts_its_bias
from gpumix.engine.sharding.absent_parameter import (
    AbsentParameter,
    MasterParameter,
    check_parameters,
)
from gpumix.engine.sharding.parameter_slice import LocalParts, ParameterSlice, put_together
from gpumix.engine.sharding.shard import Piece, Scale, Shard, ShardMember, ShardMemory, Source
from gpumix.engine.sharding.shard_layout import Division, Kind
from gpumix.engine.sharding.unit_discovery import ParameterSlot


@dataclass(frozen=True)
class Dtypes:
    """Dtype of this rank's computation, and dtype in which all ranks gather parameters."""

    compute: torch.dtype
    communication: torch.dtype


ROUND_NUMEL = 64  # a multiple keeps the next parameter aligned, in every dtype


class FlatGroupSpec:
    """Parameters of one flat buffer: alike in dtype, in being trained, and in division.

    Args:
        slots: the parameters.
        dtypes: dtype of the buffer, and of gathers; frozen parameters that are not floats keep
            their own.
        divisions: division of each part of the parameters on this rank; usually one.
    """

    def __init__(
        self, slots: list[ParameterSlot], dtypes: Dtypes, divisions: tuple[Division, ...]
    ) -> None:
        first = slots[0].parameter
        for slot in slots:
            if isinstance(slot.parameter, PackedWeight):
                slot.parameter.format.check_compute_dtype(dtypes.compute)
        self.slots = sorted(slots, key=lambda slot: slot.summed)
        self.divisions = divisions
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
        cls, slots: list[ParameterSlot], dtypes: Dtypes, division: Division
    ) -> list[FlatGroupSpec]:
        """Group parameters by buffer; trained groups first."""
        alike: dict[tuple[bool, torch.dtype | None, Kind], list[ParameterSlot]] = {}
        # Odd sizes last: kernels want all other parameters to begin at round addresses.
        for slot in sorted(slots, key=lambda s: s.parameter.numel() % ROUND_NUMEL != 0):
            p = slot.parameter
            kind = (p.requires_grad, None if p.is_floating_point() else p.dtype)
            alike.setdefault((*kind, division.kind_of(slot)), []).append(slot)
        ordered = sorted(alike.items(), key=lambda item: str(item[0]), reverse=True)
        return [
            cls(of_kind, dtypes, division.select_divisions(kind[-1])) for kind, of_kind in ordered
        ]

    def members(self, number: int) -> list[ShardMember]:
        """Return the members of the vector of a division."""
        windows = [(s.parts[number] if len(self.divisions) > 1 else s.window) for s in self.slots]
        return [ShardMember(s.name, s.parameter, w) for s, w in zip(self.slots, windows)]

    def divide_into_parts(self) -> list[list[ParameterSlice]]:
        """Return the slice of each parameter in each part, relative to the values on this rank."""
        parts = len(self.divisions)
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
        return self.dtype == self.gathered_dtype and len(self.divisions) == 1

    @property
    def own_masters(self) -> bool:
        """True if computing uses the updated values directly, without rounding in between."""
        return self._as_gathered and self.dtype == self.master_dtype

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients, which are accumulated in fp32."""
        return self.numel * 4 if self.trainable else 0


@dataclass
class GradientAccumulation:
    """Flag for gradients of a group's parameters being summed: from the begin of the group's
    backward to the begin of its reduction. Gradients at another time come from another part of the
    model, and would be lost."""

    label: str
    now: bool = False

    def check_active(self) -> None:
        """Refuse a gradient while gradients are not summed.

        Raises:
            ModelError: gradients are not summed now.
        """
        if not self.now:
            raise ModelError(
                f"a parameter of unit '{self.label}' gets a gradient from outside of the unit",
                why="another part of the model, or a term of the loss, uses it too, when the "
                "unit's gradient is not summed",
                fix="use it inside of the unit alone, or move it out of the blocks; for decay use "
                "weight_decay of the optimizer",
            )


@dataclass
class ParameterGradient:
    """Place where a parameter's gradient is summed, and the hook copying the first gradient there.

    Until the first gradient, the parameter's `grad` is None, and the content of `place` is
    meaningless.
    """

    name: str
    view: nn.Parameter
    place: torch.Tensor
    put: RemovableHandle

    @property
    def has_other_hooks(self) -> bool:
        """True if another hook observes the accumulation of the gradient."""
        hooks = self.view._post_accumulate_grad_hooks or ()
        return any(number != self.put.id for number in hooks)


class FlatGroup:
    """Flat buffer divided among ranks.

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
        self._arriving = arriving
        self._division = alike.divisions[0]
        of_host = alike.trainable or self._division.pool is not None
        self.on_host = on_host = self._division.on_host and of_host
        own_masters = alike.own_masters and not on_host
        # True if an update of the masters does not reach `full` by itself.
        self.diverges = alike.trainable and not (self._division.replicated and own_masters)
        in_parts = len(alike.divisions) > 1
        in_place = self._division.whole_gradients and not (on_host or in_parts)
        self.shards = [
            Shard(
                label,
                alike.members(number),
                division,
                ShardMemory(
                    full.device,
                    alike.master_dtype,
                    alike.gathered_dtype,
                    masters_in=full if division.whole_parameters and own_masters else None,
                    sums_in=gradient if in_place else None,
                ),
                source,
            )
            for number, division in enumerate(alike.divisions)
        ]
        # Between steps, a rank with all masters has an ordinary model.
        self.is_whole = (
            not (in_parts or on_host)
            and self._division.team is None
            and (self._division.replicated or self._division.comm.world == 1)
        )
        self._install(alike)
        self._parts = LocalParts(self.views, alike.divide_into_parts()) if in_parts else None
        self._gradients: list[ParameterGradient] = []
        self._receiving = GradientAccumulation(label)
        if self.trainable:
            self._point_gradients(alike)
        self._trained = frozenset(gradient.name for gradient in self._gradients)
        # Parameters without a gradient on this rank since the step began.
        self.unused = self._trained

    @property
    def pieces(self) -> list[Piece]:
        return [piece for shard in self.shards for piece in shard.pieces]

    @property
    def division(self) -> Division:
        """Division of the buffer; of several parts, the first."""
        return self._division

    def _install(self, alike: FlatGroupSpec) -> None:
        """Replace the modules' parameters by views of the buffer."""
        self.views: list[nn.Parameter] = []
        self._places: list[
            tuple[dict[str, nn.Parameter | None], str, nn.Parameter, AbsentParameter]
        ] = []
        self._at_rest: list[tuple[dict[str, nn.Parameter | None], str, MasterParameter]] = []
        self._packed: list[PackedPlace] = []
        # Biases that their modules cast for good.
        self._recast: list[tuple[nn.Parameter, torch.Tensor]] = []
        masters: Sequence[torch.Tensor | None] = [None] * len(alike.slots)
        if self.is_whole:
            masters = self.shards[0].master.split(alike.numels)
        for number, (slot, view, master) in enumerate(
            zip(alike.slots, self.full.data.split(alike.numels), masters)
        ):
            if isinstance(slot.parameter, PackedWeight):
                form = slot.parameter.format
                packed = PackedPlace.of(slot.places, form, view, master)
                self._packed.append(packed)
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
                    self._recast.append((shaped, shaped.data))
                if master is not None:
                    rest = MasterParameter.of(master.view(shape), self.shards[0].pieces[number])
                    self._at_rest += [(m._parameters, name, rest) for m, name in slot.places]
            for module, attribute in slot.places:
                self._places.append((module._parameters, attribute, shaped, away))
            self.views.append(shaped)
        self.remove()
        self.rest()

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
                partial(_copy_first_gradient, place, self._receiving)
            )
            self._gradients.append(ParameterGradient(slot.name, view, place, put))

    def names_by_parameter(self) -> Iterator[tuple[nn.Parameter, str]]:
        """Yield the parameters that modules may contain, with the names of the pieces."""
        for _, _, view, away in self._places:
            yield view, away.parameter_name
            yield away, away.parameter_name

    @torch.no_grad()
    def fill(
        self, floats: Callable[[torch.Tensor], object], generator: torch.Generator | None = None
    ) -> None:
        """Fill the buffer with values for measurements: floats by `floats`, packed weights with
        typical ones, and everything else with zeros."""
        if self.full.is_floating_point():
            floats(self.full.data)
        else:
            self.full.data.zero_()
            for packed in self._packed:
                packed.fill(generator)

    # -- parameters ---------------------------------------------------------------------------

    def gather(self) -> list[Pending]:
        """Start to fill the buffer from all ranks' shards."""
        into = self.full if self._arriving is None else self._arriving
        if len(self.shards) == 1:
            pending = [self.shards[0].gather(into)]
        else:
            parts = into.split([shard.numel for shard in self.shards])
            pending = [shard.gather(part) for shard, part in zip(self.shards, parts)]
        if into is not self.full:
            pending[-1].then(self._take)
        return pending

    def round_ahead(self) -> None:
        """Round host masters ahead in a step: masters stay unchanged until gathered."""
        for shard in self.shards:
            shard.round_ahead()

    def may_change(self) -> None:
        """Allow writes into masters after a step, before the next gather."""
        for shard in self.shards:
            shard.may_change()

    def _take(self) -> None:
        """Copy the arrived parameters to where this rank computes, in the compute dtype."""
        assert self._arriving is not None
        if self._parts is None:
            self.full.copy_(self._arriving)
            return
        for number, part in enumerate(self._arriving.split([s.numel for s in self.shards])):
            self._parts.put(number, part)

    def install(self) -> None:
        """Install the parameters in the modules."""
        for parameters, attribute, view, _ in self._places:
            parameters[attribute] = view
        for view, values in self._recast:
            view.data = values
        for packed in self._packed:
            packed.install()

    def install_copies(self) -> None:
        """Install copies of the arrived parameters in the modules: the buffer may be filled with
        other parameters from now on. Copies take no gradients."""
        copies = {}
        packed = {id(one.shown.parameter): one.install_copy() for one in self._packed}
        for view in self.views:
            copy = packed.get(id(view))
            if copy is None:
                copy = nn.Parameter(view.detach().clone(), view.requires_grad)
            copies[id(view)] = copy
            if copy.requires_grad:
                copy.register_post_accumulate_grad_hook(lambda _: self._receiving.check_active())
        for parameters, attribute, view, _ in self._places:
            parameters[attribute] = copies[id(view)]

    def remove(self) -> None:
        """Install placeholders in the modules until the next gather: the parameters are away."""
        for parameters, attribute, _, away in self._places:
            parameters[attribute] = away
        for packed in self._packed:
            packed.remove()

    def rest(self) -> None:
        """Install parameters with the masters' values in the modules between steps, if this rank
        has all masters."""
        for parameters, attribute, rest in self._at_rest:
            parameters[attribute] = rest
        for packed in self._packed:
            packed.rest()

    def begin_step(self, *, trains: bool) -> None:
        """Begin a step: no parameter has a gradient yet, or may be used before being gathered.

        Args:
            trains: False for an evaluation, in which parameters may be frozen, as those of adapters
                that are switched off are.

        Raises:
            InputError: parameters were frozen or thawed since the model was sharded, or have
                gradients of a foreign backward pass.
        """
        self.unused = self._trained
        trained = self.trainable if trains else None
        check_parameters([rest for _, _, rest in self._at_rest], trained=trained)
        if self.is_whole:
            self.remove()
            return
        with torch._C.DisableTorchFunctionSubclass():  # which takes most of the time of the checks
            check_parameters([away for *_, away in self._places], trained=trained)

    def gather_masters(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Yield every full parameter, as a view of temporary memory. Collective."""
        rows, team = [shard.all_masters() for shard in self.shards], self._division.team
        if team is not None:
            label = f"exchange of the state of unit '{self.label}'"
            tables = []
            for flat in rows:
                table, told = team.exchange(flat, label)
                told.wait()
                tables.append(table)
            rows = [table[member] for member in range(team.world) for table in tables]
        pieces = self.shards[0].pieces
        numels = [piece.window.numel for piece in pieces]
        for piece, *parts in zip(pieces, *(row.split(numels) for row in rows)):
            yield piece, put_together(piece.window, parts)

    # -- gradients ----------------------------------------------------------------------------

    def begin_gradient(self) -> None:
        """Begin the gradient of a step: the buffer counts as empty, but gradients left by earlier
        steps are saved, to be added."""
        self._receiving.now = True
        for shard in self.shards:
            shard.begin_gradient()
        for gradient in self._gradients:
            gradient.view.grad = None

    def end_gradient(self) -> None:
        """Set missing gradients to zero, and note their parameters."""
        self._receiving.now = False
        absent = set()
        for gradient in self._gradients:
            if gradient.view.grad is None:
                gradient.view.grad = gradient.place.zero_()
                absent.add(gradient.name)
        self.unused &= absent

    def gradients_of(self, module: nn.Module) -> list[ParameterGradient]:
        """Return the gradients of a module's own parameters, for code adding to gradients."""
        own = {id(v) for held, _, v, _ in self._places if held is module._parameters}
        return [gradient for gradient in self._gradients if id(gradient.view) in own]

    def reduce(self, scale: Scale | None) -> Iterator[list[Pending]]:
        """Sum the gradient over ranks; each next value starts further collectives. At the end, this
        rank's part, times `scale`, is in the pieces' `grad`: added to gradients already there, as
        autograd does. Without a scale, sums are added up over the step, and reach `grad` only when
        `settle`d."""
        division = self._division
        if division.team is not None and self._summed_from < self.numel:
            # At once: another bucket needs the buffer soon, and the amount is small.
            parts = self.gradient[self._summed_from :]
            division.team.all_reduce(parts, f"reduction of unit '{self.label}' in its team")
        if division.repeats > 1:
            self.gradient.div_(division.repeats)
        if self._parts is None:
            for pending in self.shards[0].reduce(self.gradient, scale):
                yield [pending]
            return
        # All parts at once: ranks with a single part continue with the next collective.
        rooms = self._rooms()
        for number, room in enumerate(rooms):
            self._parts.copy_gradient(number, room.tensor[0])
        yield from zip_collectives(
            [s.reduce(r.tensor[0], scale) for s, r in zip(self.shards, rooms)]
        )
        for room in rooms:
            room.give_back()

    def _rooms(self) -> list[PooledTensor]:
        """Borrow memory for the gradients of each part."""
        comm = self._division.comm
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
        self._receiving.now = False
        for shard in self.shards:
            shard.forget_sums()


def storage_of(tensor: torch.Tensor) -> int:
    """Return the storage of a tensor, by identity."""
    return tensor.untyped_storage()._cdata


def zip_collectives(reductions: Sequence[Iterator[Pending]]) -> Iterator[list[Pending]]:
    """Yield the n-th collectives of all reductions at once."""
    while started := [pending for one in reductions if (pending := next(one, None)) is not None]:
        yield started


def reserve_reduction_memory(trained: Sequence[FlatGroup]) -> None:
    """Reserve the memory for reducing `trained` groups. Of groups divided by the same ranks, the
    largest reserves for all."""
    largest: dict[int, FlatGroup] = {}
    for group in trained:
        ranks = id(group.division.comm)
        if ranks not in largest or largest[ranks].numel < group.numel:
            largest[ranks] = group
    for group in largest.values():
        group.expect_reduce()


def _copy_first_gradient(
    place: torch.Tensor, receiving: GradientAccumulation, view: torch.Tensor
) -> None:
    """Copy the first gradient of `view` to the place where later gradients are added."""
    if not receiving.now:
        receiving.check_active()
    gradient = view.grad
    if gradient is not place:
        assert gradient is not None, "it has just been accumulated"
        place.copy_(gradient)
        view.grad = place
