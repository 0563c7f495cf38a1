"""Ragged flat shards: parameters in one buffer that ranks own in unequal parts.

The gathered buffer *is* the unit: its parameters are views into it, and their gradients are views
into one gradient buffer, so nothing is copied in or out. Buffers lie in memory that is given out
once, before the first step; at ZeRO stage 3 several units take turns in the same memory.

Who owns what, and when it is valid: `master` (this rank's interval in fp32, the whole run; a view
of `full` where that is resident and in fp32); `full` (from gather to release, or the whole run);
`gradient` (from the first backward of a step until its reduction is done), and this rank's
interval of the sum (at stages 0 and 1 a view of `gradient`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from zlib import crc32

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gpumix.engine.away import Away
from gpumix.engine.comm import Pending
from gpumix.engine.division import Division
from gpumix.engine.host import empty_on_host
from gpumix.engine.units import Slot
from gpumix.engine.window import Window

# Gives the initial values of a parameter's flat interval [start, end), in any dtype and device.
Source = Callable[[str, nn.Parameter, int, int], torch.Tensor]


# What gradients are multiplied with, once it is known.
Scale = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Piece:
    """This rank's part of one parameter: elements [start, end) of its window, flattened.

    `local` is what the optimizer sees: 1-D, a view into the master shard; empty where this rank
    owns none of the parameter, so that every rank has a piece of every parameter. Of the ranks that
    have the same elements one is the `first`, which stands for them; of their `copies` this one is
    that of number `copy`.
    """

    name: str
    window: Window
    start: int
    end: int
    local: nn.Parameter
    copy: int = 0
    copies: int = 1

    @property
    def first(self) -> bool:
        return self.copy == 0

    @property
    def has_begin(self) -> bool:
        """Whether this rank has the parameter's first element, of whatever is there once for all of
        it."""
        return self.start == 0 and self.window.part == 0

    @property
    def is_saved_here(self) -> bool:
        """Of several copies of a piece one is saved, by its name, so that each rank saves some."""
        return self.copy == crc32(self.name.encode()) % self.copies

    @property
    def shape(self) -> torch.Size:
        """Of the whole parameter."""
        return self.window.shape


@dataclass(frozen=True)
class Dtypes:
    """What this rank computes in, and what all ranks gather parameters in."""

    compute: torch.dtype
    communication: torch.dtype


ROUND_NUMEL = 64  # of which a multiple keeps the next parameter aligned, in every dtype


class Alike:
    """Parameters that lie in one flat buffer: alike in dtype and in being trained or not.

    Args:
        slots: the parameters.
        dtypes: of the buffer, and in which it is gathered; frozen parameters that are not floats
            keep theirs.
    """

    def __init__(self, slots: list[Slot], dtypes: Dtypes) -> None:
        first = slots[0].parameter
        self.slots = sorted(slots, key=lambda slot: slot.summed)
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
    def among(cls, slots: list[Slot], dtypes: Dtypes) -> list[Alike]:
        """Group parameters; trained ones first."""
        alike: dict[tuple[bool, torch.dtype | None], list[Slot]] = {}
        # Odd sizes last: kernels want the others to begin at round addresses.
        for slot in sorted(slots, key=lambda s: s.parameter.numel() % ROUND_NUMEL != 0):
            p = slot.parameter
            kind = (p.requires_grad, None if p.is_floating_point() else p.dtype)
            alike.setdefault(kind, []).append(slot)
        ordered = sorted(alike.items(), key=lambda item: str(item[0]), reverse=True)
        return [cls(of_kind, dtypes) for _, of_kind in ordered]

    @property
    def full_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def arriving_bytes(self) -> int:
        """Of what is gathered in another dtype than it is computed with."""
        return 0 if self._as_gathered else self.numel * self.gathered_dtype.itemsize

    @property
    def _as_gathered(self) -> bool:
        return self.dtype == self.gathered_dtype

    @property
    def own_masters(self) -> bool:
        """Whether what is computed with is what is updated, with nothing rounded between."""
        return self._as_gathered and self.dtype == self.master_dtype

    @property
    def gradient_bytes(self) -> int:
        """Gradients are accumulated in fp32."""
        return self.numel * 4 if self.trainable else 0


@dataclass
class _Gradient:
    """Where the gradient of a parameter is summed, and the hook that copies the first one there;
    None where somebody else than autograd adds to it."""

    view: nn.Parameter
    place: torch.Tensor
    put: RemovableHandle | None


class FlatGroup:
    """One flat buffer, divided among ranks.

    Args:
        label: for error messages: the unit's name.
        alike: the parameters; their places in the modules get views of the buffer instead.
        full, gradient: 1-D memory for the gathered parameters and, if trained, their gradients.
        arriving: memory in which the parameters are gathered, where that is in another dtype; it is
            this group's from its gather's beginning to its end.
    """

    def __init__(
        self,
        label: str,
        alike: Alike,
        division: Division,
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
        self._division = division
        self.offsets = division.offsets(self.numel)
        self.start, self.end = division.interval(self.numel)
        self._on_host = division.on_host and alike.trainable
        own_masters = alike.own_masters and not self._on_host
        # Whether an update of the masters is none of `full` yet.
        self.diverges = alike.trainable and not (division.replicated and own_masters)
        self._masters_in_full = division.whole_parameters and own_masters
        self.master = self._masters(alike.master_dtype)
        self.pieces = list(self._fill(alike, source))
        self._install(alike)
        self._gradients: list[_Gradient] = []
        self._carried: torch.Tensor | None = None
        self._summed = False
        self._in_place = division.whole_gradients and not self._on_host
        if self.trainable:
            self._point_gradients(alike.numels)

    def _own(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory for this rank's interval alone, uninitialised."""
        if self._on_host:
            return empty_on_host(numel, dtype, self.full.device)
        return torch.empty(numel, dtype=dtype, device=self.full.device)

    def _masters(self, dtype: torch.dtype) -> torch.Tensor:
        """Memory for this rank's interval of the masters."""
        if self._masters_in_full:
            return self.full[self.start : self.end]
        return self._own(self.end - self.start, dtype)

    def _fill(self, alike: Alike, source: Source) -> Iterator[Piece]:
        """Put initial values into the master shard, and cut it into pieces."""
        begin, division = 0, self._division
        for slot, numel in zip(alike.slots, alike.numels):
            start, end, offset = self._part(begin, numel)
            view = self.master[offset : offset + end - start]
            if end > start:
                view.copy_(_values(source, slot, start, end))
            local = nn.Parameter(view.detach(), requires_grad=self.trainable)
            copy, copies = division.copy
            if division.team is not None and slot.window.whole:
                copy = copy * division.team.world + division.team.rank
                copies *= division.team.world
            yield Piece(slot.name, slot.window, start, end, local, copy, copies)
            begin += numel

    def _part(self, begin: int, numel: int) -> tuple[int, int, int]:
        """Of a parameter at `begin` of the buffer: where this rank's part of it starts and ends,
        and where that is in the masters."""
        start = min(max(self.start - begin, 0), numel)
        end = min(max(self.end - begin, start), numel)
        return start, end, min(max(begin + start - self.start, 0), self.end - self.start)

    def _install(self, alike: Alike) -> None:
        """Put views of the buffer in the places of the parameters."""
        self.views: list[nn.Parameter] = []
        self._places: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter, Away]] = []
        for slot, view in zip(alike.slots, self.full.data.split(alike.numels)):
            # `.data` gives the view a version counter of its own: the next gather is no in-place
            # change of what autograd saved.
            shaped = nn.Parameter(
                view.view(slot.window.local_shape).data, slot.parameter.requires_grad
            )
            away = Away.of(shaped, slot.name)
            for module, attribute in slot.places:
                self._places.append((module._parameters, attribute, shaped, away))
            self.views.append(shaped)
        self.remove()

    def _point_gradients(self, numels: list[int]) -> None:
        """Make autograd accumulate in fp32 into views of the gradient buffer.

        The first gradient of a step is copied there as soon as autograd has it: nothing has to be
        made zero before, and nothing read to be added to.
        """
        for view in self.views:
            if view.dtype != torch.float32:
                view.grad_dtype = torch.float32  # type: ignore[attr-defined]
        self._own_gradients()
        for view, gradient in zip(self.views, self.gradient.split(numels)):
            place = gradient.view(view.shape)
            view.grad = place
            put = view.register_post_accumulate_grad_hook(partial(_put, place))
            self._gradients.append(_Gradient(view, place, put))

    def _own_gradients(self) -> None:
        """Memory for this rank's interval of the gradients' sums."""
        own, size = self.gradient[self.start : self.end], self.end - self.start
        self.master_gradient = own if self._in_place else self._own(size, torch.float32).zero_()
        self._piece_gradients = self.master_gradient.split(
            [piece.end - piece.start for piece in self.pieces]
        )

    def divide(self, division: Division, masters: torch.Tensor) -> None:
        """From now on this rank has what `division` says, and there these values. Pieces' `local`
        are the same parameters, of other elements. Between two steps, without gradients."""
        self._division = division
        self.offsets = division.offsets(self.numel)
        self.start, self.end = division.interval(self.numel)
        dtype = self.master.dtype
        del self.master
        self.master = self._masters(dtype).copy_(masters)
        begin, pieces = 0, []
        for piece in self.pieces:
            numel = piece.window.numel
            start, end, offset = self._part(begin, numel)
            piece.local.grad = None
            piece.local.data = self.master[offset : offset + end - start]
            pieces.append(replace(piece, start=start, end=end))
            begin += numel
        self.pieces = pieces
        if self.trainable:
            self._own_gradients()

    def names_by_parameter(self) -> Iterator[tuple[nn.Parameter, str]]:
        """What the modules may hold in the places of parameters, with the name of the piece."""
        for _, _, view, away in self._places:
            yield view, away.parameter_name
            yield away, away.parameter_name

    # -- parameters ---------------------------------------------------------------------------

    def gather(self) -> Pending:
        """Start to fill the buffer from all ranks' shards."""
        label = f"all-gather of unit '{self.label}'"
        comm = self._division.comm
        into = self.full if self._arriving is None else self._arriving
        if self._division.replicated:
            into.copy_(self.master)
            pending = Pending((), label, comm)
        else:
            pending = comm.gather(into, self.master, self.offsets, label)
        return pending if into is self.full else pending.then(self._cast)

    def _cast(self) -> None:
        """What has arrived, in the dtype that this rank computes in."""
        assert self._arriving is not None
        self.full.copy_(self._arriving)

    def install(self) -> None:
        """Give the modules their parameters."""
        for parameters, attribute, view, _ in self._places:
            parameters[attribute] = view

    def remove(self) -> None:
        """Until the next gather the modules hold what says that the parameters are away."""
        for parameters, attribute, _, away in self._places:
            parameters[attribute] = away

    def gather_masters(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Every parameter, whole: views of temporary memory. Collective."""
        flat, team = self._all_masters(), self._division.team
        if team is None:
            rows = flat[None]
        else:
            rows, told = team.exchange(flat, f"exchange of the state of unit '{self.label}'")
            told.wait()
        numels = [piece.window.numel for piece in self.pieces]
        for piece, *parts in zip(self.pieces, *(row.split(numels) for row in rows)):
            yield piece, _put_together(piece.window, parts)

    def _all_masters(self) -> torch.Tensor:
        """Those of all ranks, in memory of its own. Collective."""
        if self._division.replicated:
            return self.master.clone()
        buffer = torch.empty(self.numel, dtype=self.master.dtype, device=self.full.device)
        label = f"all-gather of the state of unit '{self.label}'"
        self._division.comm.gather(buffer, self.master, self.offsets, label).wait()
        return buffer

    # -- gradients ----------------------------------------------------------------------------

    def begin_gradient(self) -> None:
        """Nothing is in the gradient buffer yet; but remember what earlier steps have left to be
        added."""
        if self._in_place and not all(fresh := self._fresh()):
            self._zero(fresh)
            self._carried = self.master_gradient.clone()
        for gradient in self._gradients:
            gradient.view.grad = gradient.place.zero_() if gradient.put is None else None

    def end_gradient(self) -> None:
        """What got no gradient has one of zero."""
        for gradient in self._gradients:
            if gradient.view.grad is None:
                gradient.view.grad = gradient.place.zero_()

    def others_add(self, module: nn.Module) -> None:
        """`module` adds to the gradients of its own parameters by itself: they begin with zero."""
        added = {id(v) for held, _, v, _ in self._places if held is module._parameters}
        for gradient in self._gradients:
            if id(gradient.view) in added and gradient.put is not None:
                gradient.put.remove()
                gradient.put = None

    def reduce(self, scale: Scale | None) -> Iterator[Pending]:
        """Sum the gradient over ranks; each collective begins when the next value is asked for.
        At the end this rank's part, times `scale`, is in the pieces' `grad`: added to those that
        there are, as autograd does. Without a scale it is added to those of this step, and not
        theirs before it is `settle`d."""
        division, label = self._division, f"reduction of unit '{self.label}'"
        if division.team is not None and self._summed_from < self.numel:
            # At once, for the buffer is another bucket's soon; and it is little.
            parts = self.gradient[self._summed_from :]
            division.team.all_reduce(parts, f"{label} in its team")
        if division.repeats > 1:
            self.gradient.div_(division.repeats)
        if division.replicated:
            yield division.comm.start_all_reduce(self.gradient, label)
            self._deliver(self.gradient[None], scale)
        elif division.copies is None:
            yield division.comm.reduce(
                self.gradient, self.offsets, label, lambda rows: self._deliver(rows, scale)
            )
        else:
            room = division.comm.borrow("copies", self.gradient, 1, self.end - self.start)
            part = room.tensor[0]
            yield division.comm.reduce(
                self.gradient, self.offsets, label, lambda rows: _sum(rows, part)
            )
            yield division.copies.start_sum(part, self.numel, f"{label} over hosts")
            self._deliver(room.tensor, scale)
            room.give_back()

    def expect_reduce(self) -> None:
        """This is the largest group that will be reduced: let all memory for it be there."""
        division = self._division
        if division.replicated:
            return
        division.comm.expect_reduce(self.gradient, self.offsets)
        if division.copies is not None:  # one bucket is summed over hosts, the next inside them
            own = self.end - self.start
            rooms = [division.comm.borrow("copies", self.gradient, 1, own) for _ in range(2)]
            division.copies.expect_sum(rooms[0].tensor[0], self.numel)
            for room in rooms:
                room.give_back()

    def _deliver(self, rows: torch.Tensor, scale: Scale | None) -> None:
        """The sum of `rows` of shape [n, own interval] is this rank's part, before scaling."""
        if scale is None:
            self._add(rows)
            return
        fresh, own = self._fresh(), self.master_gradient
        if self._on_host:
            part = _summed(rows).mul_(scale())
            if all(fresh):
                own.copy_(part, non_blocking=True)
            else:
                self._zero(fresh)
                own.add_(part.to(own.device))
        elif all(fresh) or self._in_place:
            _sum(rows, own)
            _multiply(own, scale())
            if self._carried is not None:
                own.add_(self._carried)
                self._carried = None
        else:
            self._zero(fresh)
            own.addcmul_(_summed(rows), scale())
        self._hand_out()

    def _add(self, rows: torch.Tensor) -> None:
        own = self.master_gradient
        if not self._summed and not self._in_place:
            fresh = self._fresh()
            if not all(fresh):
                self._zero(fresh)
                self._carried = own.clone()
        if rows.device != own.device:
            rows = _summed(rows)[None].to(own.device)
        if self._summed:
            own.add_(_summed(rows))
        else:
            _sum(rows, own)
        self._summed = True

    def settle(self, scale: Scale) -> None:
        """All that a step reduced without a scale is there: it is multiplied with it, and in the
        pieces' `grad`."""
        if self._summed:
            _multiply(self.master_gradient, scale().to(self.master_gradient.device))
            if self._carried is not None:
                self.master_gradient.add_(self._carried)
            self._hand_out()
        self.forget_sums()

    def forget_sums(self) -> None:
        """Nothing of this step counts."""
        self._summed, self._carried = False, None

    def _hand_out(self) -> None:
        for piece, gradient in zip(self.pieces, self._piece_gradients):
            piece.local.grad = gradient

    def _fresh(self) -> list[bool]:
        """Of each piece, whether nothing is there to be added to."""
        return [piece.local.grad is None for piece in self.pieces]

    def _zero(self, fresh: list[bool]) -> None:
        for is_fresh, gradient in zip(fresh, self._piece_gradients):
            if is_fresh:
                gradient.zero_()


def _values(source: Source, slot: Slot, start: int, end: int) -> torch.Tensor:
    """Initial values of elements [start, end) of a parameter's window."""
    parameter = slot.parameter
    if slot.window.whole:
        return source(slot.name, parameter, start, end)
    every = source(slot.name, parameter, 0, parameter.numel()).view(parameter.shape)
    return slot.window.of(every).reshape(-1)[start:end]


def _put_together(window: Window, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A parameter, of whose windows these are the elements."""
    if window.whole:
        return parts[0].view(window.shape)
    found = parts[0].new_empty(window.shape)
    for number, part in enumerate(parts):
        shown = window.of_member(number)
        shown.put(part.view(shown.local_shape), found)
    return found


def _put(place: torch.Tensor, view: torch.Tensor) -> None:
    """Copy the first gradient of `view` to where the next ones are added."""
    if view.grad is not place:
        assert view.grad is not None, "it has just been accumulated"
        place.copy_(view.grad)
        view.grad = place


def _multiply(value: torch.Tensor, scale: torch.Tensor) -> None:
    """In place; by 1 not at all, where looking at it does not wait for a device."""
    if scale.device.type != "cpu" or scale.item() != 1.0:
        value.mul_(scale)


def _summed(rows: torch.Tensor) -> torch.Tensor:
    """The sum of the rows, in the first of them."""
    for row in rows[1:]:
        rows[0].add_(row)
    return rows[0]


def _sum(rows: torch.Tensor, out: torch.Tensor) -> None:
    if rows.shape[0] > 1:
        torch.sum(rows, 0, out=out)
    elif rows.data_ptr() != out.data_ptr():
        out.copy_(rows[0])
