"""Ragged flat shards: parameters in one buffer that ranks own in unequal parts.

The gathered buffer *is* the unit: its parameters are views into it, and their gradients are views
into one gradient buffer, so nothing is copied in or out. Buffers lie in memory that is given out
once, before the first step; at ZeRO stage 3 several units take turns in the same memory.

Who owns what, and when it is valid: a shard's `master` (this rank's interval in fp32, the whole
run; a view of `full` where that is resident and in fp32); `full` (from gather to release, or the
whole run); `gradient` (from the first backward of a step until its reduction is done), and this
rank's interval of the sum (at stages 0 and 1 a view of `gradient`).

A rank that computes several of the parts into which others divide units has a shard of each part;
then, and only then, parameters and gradients are copied between the buffers and these parts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gpumix.engine.away import AtRest, Away, refuse_thawed
from gpumix.engine.comm import Borrowed, Pending
from gpumix.engine.coroutine import ModelError
from gpumix.engine.division import Division, Kind
from gpumix.engine.shard import Member, Piece, Scale, Shard, Source
from gpumix.engine.units import Slot
from gpumix.engine.window import Window


@dataclass(frozen=True)
class Dtypes:
    """What this rank computes in, and what all ranks gather parameters in."""

    compute: torch.dtype
    communication: torch.dtype


ROUND_NUMEL = 64  # of which a multiple keeps the next parameter aligned, in every dtype


class Alike:
    """Parameters that lie in one flat buffer: alike in dtype, in being trained or not, and in who
    divides them.

    Args:
        slots: the parameters.
        dtypes: of the buffer, and in which it is gathered; frozen parameters that are not floats
            keep theirs.
        divisions: of each part of the parameters that this rank has; usually one.
    """

    def __init__(self, slots: list[Slot], dtypes: Dtypes, divisions: tuple[Division, ...]) -> None:
        first = slots[0].parameter
        self.slots = sorted(slots, key=lambda slot: slot.summed)
        self.divisions = divisions
        self.trainable = first.requires_grad
        self.numels = [slot.window.numel for slot in self.slots]
        self.numel = sum(self.numels)
        # From here on ranks that compute together each have a part of the gradient.
        self.summed_from = sum(s.window.numel for s in slots if not s.summed)
        floating = first.is_floating_point()
        self.dtype = dtypes.compute if floating else first.dtype
        self.gathered_dtype = dtypes.communication if floating else first.dtype
        # Frozen ones have no other value than the one that is gathered.
        self.master_dtype = torch.float32 if self.trainable else self.gathered_dtype

    @classmethod
    def among(cls, slots: list[Slot], dtypes: Dtypes, division: Division) -> list[Alike]:
        """Group parameters; trained ones first."""
        alike: dict[tuple[bool, torch.dtype | None, Kind], list[Slot]] = {}
        # Odd sizes last: kernels want the others to begin at round addresses.
        for slot in sorted(slots, key=lambda s: s.parameter.numel() % ROUND_NUMEL != 0):
            p = slot.parameter
            kind = (p.requires_grad, None if p.is_floating_point() else p.dtype)
            alike.setdefault((*kind, division.kind_of(slot)), []).append(slot)
        ordered = sorted(alike.items(), key=lambda item: str(item[0]), reverse=True)
        return [cls(of_kind, dtypes, division.by_kind(kind[-1])) for kind, of_kind in ordered]

    def members(self, number: int) -> list[Member]:
        """What is in the vector of a division."""
        windows = [(s.parts[number] if len(self.divisions) > 1 else s.window) for s in self.slots]
        return [Member(s.name, s.parameter, w) for s, w in zip(self.slots, windows)]

    @property
    def full_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def arriving_bytes(self) -> int:
        """Of what is gathered in another dtype than it is computed with, or in parts."""
        return 0 if self._as_gathered else self.numel * self.gathered_dtype.itemsize

    @property
    def _as_gathered(self) -> bool:
        return self.dtype == self.gathered_dtype and len(self.divisions) == 1

    @property
    def own_masters(self) -> bool:
        """Whether what is computed with is what is updated, with nothing rounded between."""
        return self._as_gathered and self.dtype == self.master_dtype

    @property
    def gradient_bytes(self) -> int:
        """Gradients are accumulated in fp32."""
        return self.numel * 4 if self.trainable else 0


@dataclass
class Receiving:
    """Whether gradients of a group's parameters are summed now: from the begin of its backward to
    that of its reduction. Those that come at another time are of another part of the model, and
    would be lost."""

    label: str
    now: bool = False

    def refuse_other(self) -> None:
        """
        Raises:
            ModelError: this is another time.
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
class OwnGradient:
    """Where the gradient of a parameter is summed, and the hook that copies the first one there.

    Until the first one comes the parameter's `grad` is None, and what is in `place` means nothing.
    """

    name: str
    view: nn.Parameter
    place: torch.Tensor
    put: RemovableHandle

    @property
    def has_other_hooks(self) -> bool:
        """Whether somebody else wants to see when autograd has added to the gradient."""
        hooks = self.view._post_accumulate_grad_hooks or ()
        return any(number != self.put.id for number in hooks)


class FlatGroup:
    """One flat buffer, divided among ranks.

    Args:
        label: for error messages: the unit's name.
        alike: the parameters; their places in the modules get views of the buffer instead.
        full, gradient: 1-D memory for the gathered parameters and, if trained, their gradients.
        arriving: memory in which the parameters are gathered, where that is in another dtype or in
            parts; it is this group's from its gather's beginning to its end.
    """

    def __init__(
        self,
        label: str,
        alike: Alike,
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
        self.on_host = on_host = self._division.on_host and alike.trainable
        own_masters = alike.own_masters and not on_host
        # Whether an update of the masters is none of `full` yet.
        self.diverges = alike.trainable and not (self._division.replicated and own_masters)
        in_parts = len(alike.divisions) > 1
        in_place = self._division.whole_gradients and not (on_host or in_parts)
        self.shards = [
            Shard(
                label,
                alike.members(number),
                division,
                dtypes=(alike.master_dtype, alike.gathered_dtype),
                device=full.device,
                masters_in=full if division.whole_parameters and own_masters else None,
                sums_in=gradient if in_place else None,
                source=source,
            )
            for number, division in enumerate(alike.divisions)
        ]
        # Between steps a rank that has all of the masters has an ordinary model.
        self.is_whole = (
            not (in_parts or on_host)
            and self._division.team is None
            and (self._division.replicated or self._division.comm.world == 1)
        )
        self._install(alike)
        self._parts = _Parts(self.views, alike) if in_parts else None
        self._gradients: list[OwnGradient] = []
        self._receiving = Receiving(label)
        self.unused: set[str] | None = None  # since the step began; None: no backward has ended
        if self.trainable:
            self._point_gradients(alike)

    @property
    def pieces(self) -> list[Piece]:
        return [piece for shard in self.shards for piece in shard.pieces]

    @property
    def division(self) -> Division:
        """Who divides it; of several parts, the first."""
        return self._division

    def _install(self, alike: Alike) -> None:
        """Put views of the buffer in the places of the parameters."""
        self.views: list[nn.Parameter] = []
        self._places: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter, Away]] = []
        self._at_rest: list[tuple[dict[str, nn.Parameter | None], str, AtRest]] = []
        masters: Sequence[torch.Tensor | None] = [None] * len(alike.slots)
        if self.is_whole:
            masters = self.shards[0].master.split(alike.numels)
        for number, (slot, view, master) in enumerate(
            zip(alike.slots, self.full.data.split(alike.numels), masters)
        ):
            # `.data` gives the view a version counter of its own: the next gather is no in-place
            # change of what autograd saved.
            shaped = nn.Parameter(
                view.view(slot.window.local_shape).data, slot.parameter.requires_grad
            )
            away = Away.of(shaped, slot.name)
            for module, attribute in slot.places:
                self._places.append((module._parameters, attribute, shaped, away))
            if master is not None:
                rest = AtRest.of(
                    master.view(slot.window.local_shape), self.shards[0].pieces[number]
                )
                self._at_rest += [(m._parameters, attribute, rest) for m, attribute in slot.places]
            self.views.append(shaped)
        self.remove()
        self.rest()

    def _point_gradients(self, alike: Alike) -> None:
        """Make autograd accumulate in fp32 into views of the gradient buffer.

        The first gradient of a step is copied there as soon as autograd has it: nothing has to be
        made zero before, and nothing read to be added to.
        """
        for view in self.views:
            if view.dtype != torch.float32:
                view.grad_dtype = torch.float32  # type: ignore[attr-defined]
        places = self.gradient.split(alike.numels)
        for slot, view, gradient in zip(alike.slots, self.views, places):
            place = gradient.view(view.shape)
            view.grad = place
            put = view.register_post_accumulate_grad_hook(partial(_put, place, self._receiving))
            self._gradients.append(OwnGradient(slot.name, view, place, put))

    def names_by_parameter(self) -> Iterator[tuple[nn.Parameter, str]]:
        """What the modules may hold in the places of parameters, with the name of the piece."""
        for _, _, view, away in self._places:
            yield view, away.parameter_name
            yield away, away.parameter_name

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
        """A step begins, in which masters do not change before they are gathered."""
        for shard in self.shards:
            shard.round_ahead()

    def may_change(self) -> None:
        """A step is over: somebody may write into masters before they are gathered again."""
        for shard in self.shards:
            shard.may_change()

    def _take(self) -> None:
        """All has arrived: it is put where this rank computes with it, in its dtype."""
        assert self._arriving is not None
        if self._parts is None:
            self.full.copy_(self._arriving)
            return
        for number, part in enumerate(self._arriving.split([s.numel for s in self.shards])):
            self._parts.put(number, part)

    def install(self) -> None:
        """Give the modules their parameters."""
        for parameters, attribute, view, _ in self._places:
            parameters[attribute] = view

    def remove(self) -> None:
        """Until the next gather the modules hold what says that the parameters are away."""
        for parameters, attribute, _, away in self._places:
            parameters[attribute] = away

    def rest(self) -> None:
        """Between steps the modules hold parameters with the values of the masters, where this rank
        has all of them."""
        for parameters, attribute, rest in self._at_rest:
            parameters[attribute] = rest

    def begin_step(self) -> None:
        """A step begins: no parameter has a gradient yet, or may be used before it is gathered.

        Raises:
            InputError: parameters were frozen or thawed since the model was sharded, or have
                gradients of somebody else's backward pass.
        """
        self.unused = None
        for _, _, rest in self._at_rest:
            refuse_thawed(rest, self.trainable)
            rest.refuse_changes()
        if self._at_rest:
            self.remove()
            return
        for _, _, _, away in self._places:
            refuse_thawed(away, self.trainable)

    def gather_masters(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Every parameter, whole: views of temporary memory. Collective."""
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
            yield piece, _put_together(piece.window, parts)

    # -- gradients ----------------------------------------------------------------------------

    def begin_gradient(self) -> None:
        """Nothing is in the gradient buffer yet; but remember what earlier steps have left to be
        added."""
        self._receiving.now = True
        for shard in self.shards:
            shard.begin_gradient()
        for gradient in self._gradients:
            gradient.view.grad = None

    def end_gradient(self) -> None:
        """What got no gradient has one of zero, and is remembered."""
        self._receiving.now = False
        absent = set()
        for gradient in self._gradients:
            if gradient.view.grad is None:
                gradient.view.grad = gradient.place.zero_()
                absent.add(gradient.name)
        self.unused = absent if self.unused is None else self.unused & absent

    def unused_names(self) -> Collection[str]:
        """Parameters that got no gradient on this rank since the step began."""
        if self.unused is None:
            return [gradient.name for gradient in self._gradients]
        return self.unused

    def gradients_of(self, module: nn.Module) -> list[OwnGradient]:
        """Those of a module's own parameters, for who adds to them by itself."""
        own = {id(v) for held, _, v, _ in self._places if held is module._parameters}
        return [gradient for gradient in self._gradients if id(gradient.view) in own]

    def reduce(self, scale: Scale | None) -> Iterator[list[Pending]]:
        """Sum the gradient over ranks; collectives begin when the next value is asked for.
        At the end this rank's part, times `scale`, is in the pieces' `grad`: added to those that
        there are, as autograd does. Without a scale it is added to those of this step, and not
        theirs before it is `settle`d."""
        division = self._division
        if division.team is not None and self._summed_from < self.numel:
            # At once, for the buffer is another bucket's soon; and it is little.
            parts = self.gradient[self._summed_from :]
            division.team.all_reduce(parts, f"reduction of unit '{self.label}' in its team")
        if division.repeats > 1:
            self.gradient.div_(division.repeats)
        if self._parts is None:
            yield from together([self.shards[0].reduce(self.gradient, scale)])
            return
        # All at once: others, who have one part, go on to what comes after it.
        rooms = self._rooms()
        for number, room in enumerate(rooms):
            self._parts.copy_gradient(number, room.tensor[0])
        yield from together([s.reduce(r.tensor[0], scale) for s, r in zip(self.shards, rooms)])
        for room in rooms:
            room.give_back()

    def _rooms(self) -> list[Borrowed]:
        """Memory for the gradients of each part."""
        comm = self._division.comm
        return [comm.borrow("parts", self.gradient, 1, shard.numel) for shard in self.shards]

    def expect_reduce(self) -> None:
        """This is the largest group that will be reduced: let all memory for it be there."""
        if self._parts is None:
            self.shards[0].expect_reduce(self.gradient)
            return
        rooms = self._rooms()
        for shard, room in zip(self.shards, rooms):
            shard.expect_reduce(room.tensor[0])
        for room in rooms:
            room.give_back()

    def settle(self, scale: Scale) -> None:
        """All that a step reduced without a scale is there: it is multiplied with it, and in the
        pieces' `grad`."""
        for shard in self.shards:
            shard.settle(scale)

    def forget_sums(self) -> None:
        """Nothing of this step counts."""
        self._receiving.now = False
        for shard in self.shards:
            shard.forget_sums()


def storage_of(tensor: torch.Tensor) -> int:
    """Which storage a tensor lies in, by identity."""
    return tensor.untyped_storage()._cdata


def together(reductions: Sequence[Iterator[Pending]]) -> Iterator[list[Pending]]:
    """The n-th collective of all of them at once."""
    while started := [pending for one in reductions if (pending := next(one, None)) is not None]:
        yield started


def expect_largest(trained: Sequence[FlatGroup]) -> None:
    """These will be reduced: let all memory for it be there; of those that the same ranks divide,
    the largest has it for all."""
    largest: dict[int, FlatGroup] = {}
    for group in trained:
        ranks = id(group.division.comm)
        if ranks not in largest or largest[ranks].numel < group.numel:
            largest[ranks] = group
    for group in largest.values():
        group.expect_reduce()


class _Parts:
    """Where the parts of parameters are that other ranks divide, and this one has several of.

    Args:
        views: of the parameters, as this rank computes with them.
    """

    def __init__(self, views: Sequence[nn.Parameter], alike: Alike) -> None:
        parts = len(alike.divisions)
        self._views = views
        self._windows = [
            [
                Window(s.window.local_shape, s.parts[0].dim, parts, number, s.parts[0].packed)
                for s in alike.slots
            ]
            for number in range(parts)
        ]

    def put(self, number: int, flat: torch.Tensor) -> None:
        """Write a part of each parameter from a vector of them."""
        windows = self._windows[number]
        rows = flat.split([window.numel for window in windows])
        for view, window, row in zip(self._views, windows, rows):
            window.put(row.view(window.local_shape), view.data)

    def copy_gradient(self, number: int, flat: torch.Tensor) -> None:
        """Write a part of each gradient into a vector of them."""
        windows = self._windows[number]
        rows = flat.split([window.numel for window in windows])
        for view, window, row in zip(self._views, windows, rows):
            assert view.grad is not None, "what got no gradient has one of zero"
            row.view(window.local_shape).copy_(window.of(view.grad))


def _put_together(window: Window, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A parameter, of whose windows these are the elements."""
    if window.whole:
        return parts[0].view(window.shape)
    found = parts[0].new_empty(window.shape)
    for number, part in enumerate(parts):
        shown = window.of_member(number)
        shown.put(part.view(shown.local_shape), found)
    return found


def _put(place: torch.Tensor, receiving: Receiving, view: torch.Tensor) -> None:
    """Copy the first gradient of `view` to where the next ones are added."""
    receiving.refuse_other()
    if view.grad is not place:
        assert view.grad is not None, "it has just been accumulated"
        place.copy_(view.grad)
        view.grad = place
