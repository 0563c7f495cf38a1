"""Shard of a flat vector: this rank's interval of the elements, in fp32, and of their gradients.

Ranks divide a vector into unequal parts; at ZeRO stage 0, each rank has all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple
from zlib import crc32

import torch
from torch import nn

from gpumix.engine.comm.communicator import Pending, PooledTensor
from gpumix.engine.comm.parameter_pool import PooledVector
from gpumix.engine.model.piece_parameter import PieceParameter
from gpumix.engine.offload.copy_lanes import CopyLane
from gpumix.engine.offload.host_offload import allocate_on_host
from gpumix.engine.offload.state_transfers import HostMasters
from gpumix.engine.sharding.parameter_slice import ParameterSlice
from gpumix.engine.sharding.shard_layout import HostSums, ShardLayout

# Returns initial values of a parameter's flat interval [start, end), in any dtype, on any device.
Source = Callable[[str, nn.Parameter, int, int], torch.Tensor]


# Returns the factor of gradients, once known.
Scale = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Piece:
    """Part of a parameter on one rank: elements [start, end) of its window, flattened.

    `local` is a 1-D view into the master shard, and `exposed` the same for programs. Both are empty
    where this rank owns nothing of the parameter, so that every rank has a piece of every
    parameter. If several ranks have the same elements, there are `copies`; this is number `copy`.
    Number 0 is the `first`, which represents all.
    """

    name: str
    window: ParameterSlice
    start: int
    end: int
    local: nn.Parameter
    copy: int = 0
    copies: int = 1
    exposed: PieceParameter | None = None

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter for optimizers and programs."""
        return self.local if self.exposed is None else self.exposed

    @property
    def first(self) -> bool:
        return self.copy == 0

    @property
    def has_begin(self) -> bool:
        """True if this rank has the parameter's first element, and so the values existing once
        per parameter."""
        return self.start == 0 and self.window.part == 0

    @property
    def is_saved_here(self) -> bool:
        """True if this copy of the piece is saved: chosen by name, so each rank saves some."""
        return self.copy == crc32(self.name.encode()) % self.copies

    @property
    def shape(self) -> torch.Size:
        """Shape of the full parameter."""
        return self.window.shape


class ShardMember(NamedTuple):
    """Parameter in a flat vector: the content of its window, flattened."""

    name: str
    parameter: nn.Parameter
    window: ParameterSlice


@dataclass(frozen=True)
class ShardMemory:
    """Memory of a shard.

    Attributes:
        device: of the gathered vector.
        master_dtype, gathered_dtype: dtypes of the masters, and of gathered values.
        masters_in, sums_in: full vectors whose interval of this rank serves as masters, or as sums
            of gradients; None: separate memory.
    """

    device: torch.device
    master_dtype: torch.dtype
    gathered_dtype: torch.dtype
    masters_in: torch.Tensor | None = None
    sums_in: torch.Tensor | None = None


class Shard:
    """This rank's interval of a flat vector.

    Args:
        label: the unit's name, for error messages.
        members: the vector's parameters, in order.
        source: of initial values.
    """

    def __init__(
        self,
        label: str,
        members: Sequence[ShardMember],
        layout: ShardLayout,
        memory: ShardMemory,
        source: Source,
    ) -> None:
        self.label = label
        self.numels = tuple(member.window.numel for member in members)
        self.numel = sum(self.numels)
        self.trainable = members[0].parameter.requires_grad
        self._memory = memory
        self._on_host = layout.on_host and self.trainable
        self._host: HostMasters | None = None  # masters on the host
        self._pooled: PooledVector | None = None  # the whole vector, in memory of the host
        if layout.pool is not None:
            self._pooled = layout.pool.allocate_vector(self.numel, memory.gathered_dtype)
        self._set_layout(layout)
        self.master = self._masters()
        self.pieces = list(self._fill(members, source))
        self._carried: torch.Tensor | None = None
        self._summed = False
        self._new: list[bool] = []  # by piece: True if its gradient is of the last step alone
        # True if sums share the memory of gradients, which then must be saved before a step.
        self.sums_in_place = self.trainable and memory.sums_in is not None
        # True if masters must not be written into between a gather and the end of a step.
        self.is_read_late = self._pooled is not None or self._host is not None
        if self.trainable:
            self._own_gradients()

    def _set_layout(self, layout: ShardLayout) -> None:
        self._layout = layout
        self.intervals = layout.intervals(self.numels)
        self.start, self.end = layout.interval(self.numels)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Places in the vector where one rank's part ends and another's begins."""
        return () if self._layout.replicated else self.intervals.offsets[1:-1]

    def _masters(self) -> torch.Tensor:
        """Return memory for this rank's interval of the masters, uninitialized."""
        own, memory = self.end - self.start, self._memory
        if memory.masters_in is not None:
            return memory.masters_in[self.start : self.end]
        values = None if self._pooled is None else self._pooled.values[self.start : self.end]
        if self._on_host:
            transfers = self._layout.comm.transfers
            dtypes = memory.master_dtype, memory.gathered_dtype
            self._host = HostMasters(own, dtypes, transfers, memory.device, values)
            return self._host.master
        if values is not None:
            return values  # frozen
        return torch.empty(own, dtype=memory.master_dtype, device=memory.device)

    def _fill(self, members: Sequence[ShardMember], source: Source) -> Iterator[Piece]:
        """Fill the masters with initial values, and yield the pieces."""
        begin, layout = 0, self._layout
        for member in members:
            numel = member.window.numel
            start, end, offset = self._part(begin, numel)
            view = self.master[offset : offset + end - start]
            if end > start:
                view.copy_(_read_initial_values(source, member, start, end))
            local = nn.Parameter(view.detach(), requires_grad=self.trainable)
            copy, copies = layout.copy
            if member.window.whole:
                copy = copy * layout.parts + layout.part
                copies *= layout.parts
            exposed = PieceParameter.of(local, member.name, member.window.shape)
            yield Piece(member.name, member.window, start, end, local, copy, copies, exposed)
            begin += numel

    def _part(self, begin: int, numel: int) -> tuple[int, int, int]:
        """Locate this rank's part of a parameter at `begin` of the vector: start and end in the
        parameter, and offset in the masters."""
        start = min(max(self.start - begin, 0), numel)
        end = min(max(self.end - begin, start), numel)
        return start, end, min(max(begin + start - self.start, 0), self.end - self.start)

    def _own_gradients(self) -> None:
        """Allocate this rank's interval of the sums of gradients."""
        own, memory = self.end - self.start, self._memory
        if memory.sums_in is not None:
            self.gradient = memory.sums_in[self.start : self.end]
        elif self._on_host:
            self.gradient = allocate_on_host(own, torch.float32, memory.device).zero_()
        else:
            self.gradient = torch.empty(own, dtype=torch.float32, device=memory.device).zero_()
        self._piece_gradients = self.gradient.split(
            [piece.end - piece.start for piece in self.pieces]
        )
        for piece, gradient in zip(self.pieces, self._piece_gradients):
            if piece.exposed is not None:
                piece.exposed.expect_gradient(gradient)

    def divide(self, layout: ShardLayout, masters: torch.Tensor) -> None:
        """Switch to `layout`, with `masters` as this rank's values. The pieces' `local` stay the
        same parameters, with other elements. Between two steps, without gradients."""
        self._set_layout(layout)
        del self.master
        self._host = None  # free the old masters first
        self.master = self._masters().copy_(masters)
        begin, pieces = 0, []
        for piece in self.pieces:
            numel = piece.window.numel
            start, end, offset = self._part(begin, numel)
            piece.local.grad = None
            piece.local.data = self.master[offset : offset + end - start]
            if piece.exposed is not None:
                piece.exposed.follow_local()
            pieces.append(replace(piece, start=start, end=end))
            begin += numel
        self.pieces = pieces
        if self.trainable:
            self._own_gradients()

    # -- parameters ---------------------------------------------------------------------------

    def gather(self, into: torch.Tensor) -> Pending:
        """Start to fill a vector from all ranks' masters."""
        if self._pooled is not None:
            if self._host is not None:
                self._host.values()  # rounded, before others read them
            return self._pooled.fetch(into, f"copy of unit '{self.label}' from the host")
        if self._host is None:
            return self._gather(into, self.master)
        pending = []
        mark = self._host.send(lambda values: pending.append(self._gather(into, values)))
        return pending[0].then(mark.block_current_stream)

    def _gather(self, into: torch.Tensor, values: torch.Tensor) -> Pending:
        """Start to gather `values` as this rank's interval, behind the current stream."""
        label, comm = f"all-gather of unit '{self.label}'", self._layout.comm
        if not self._layout.replicated:
            return comm.gather(into, values, self.intervals, label)
        into.copy_(values, non_blocking=True)
        return Pending((), label, comm)

    def round_ahead(self) -> None:
        """Round host masters ahead in a step: masters stay unchanged until gathered."""
        if self._host is not None:
            self._host.round_ahead()

    def may_change(self) -> None:
        """Allow writes into masters after a step, before the next gather."""
        if self._pooled is not None:
            self._pooled.may_change()
        if self._host is not None:
            self._host.may_change()

    def all_masters(self) -> torch.Tensor:
        """Gather the masters of all ranks into separate memory. Collective."""
        if self._layout.replicated:
            return self.master.clone()
        buffer = torch.empty(self.numel, dtype=self.master.dtype, device=self._memory.device)
        label = f"all-gather of the state of unit '{self.label}'"
        self._layout.comm.gather(buffer, self.master, self.intervals, label).wait()
        return buffer

    # -- gradients ----------------------------------------------------------------------------

    def begin_gradient(self) -> None:
        """Begin the gradient of a step, if `sums_in_place`: save the gradients left by earlier
        steps, to be added."""
        if not all(fresh := self._fresh()):
            self._zero(fresh)
            self._carried = self.gradient.clone()

    def reduce(self, flat: torch.Tensor, scale: Scale | None) -> list[Pending]:
        """Start to sum the gradient of the vector over ranks; see
        `FlatGroup.make_reduction`."""
        layout, label = self._layout, f"reduction of unit '{self.label}'"
        reduce = layout.comm.reduce if layout.pool is None else layout.pool.reduce
        # On NCCL, all work behind the collective is queued on the lane at once, and done while the
        # next unit computes; when that is through, the buffer is free. Gloo's waits are the host's.
        at_once = (
            self._on_host
            and layout.pool is None
            and self._lane.is_stream
            and not layout.comm.on_gloo
        )
        if at_once and scale is not None:
            scale()  # here: the computing stream needs its result and its waits too
        deliver = partial(self._deliver, scale)
        if layout.replicated:
            pending = layout.comm.start_all_reduce(flat, label)
            return [pending.then(partial(deliver, flat[None]))]
        if layout.copies is None:
            pending = reduce(flat, self.intervals, label, deliver)
            return [pending.finish_on(self._lane) if at_once else pending]
        room = layout.comm.borrow("copies", flat, 1, self.end - self.start)
        pending = reduce(flat, self.intervals, label, partial(_sum, out=room.tensor[0]))
        pending.following = partial(self._sum_over_hosts, layout.copies, room, label, deliver)
        return [pending]

    def _sum_over_hosts(
        self,
        copies: HostSums,
        room: PooledTensor,
        label: str,
        deliver: Callable[[torch.Tensor], None],
    ) -> Pending:
        """Start to sum this rank's interval, summed within the host, over hosts."""
        pending = copies.start_sum(room.tensor[0], self.numels, f"{label} over hosts")
        return pending.then(partial(deliver, room.tensor)).then(room.give_back)

    @property
    def _lane(self) -> CopyLane:
        """Lane for gradients on the way to the host."""
        return self._layout.comm.transfers.to_host

    def expect_reduce(self, flat: torch.Tensor) -> None:
        """Reserve the memory of reductions, for the largest vector to be reduced."""
        layout = self._layout
        if layout.replicated:
            return
        if layout.pool is not None:
            layout.pool.expect_reduce(flat)
        else:
            layout.comm.expect_reduce(flat, self.intervals)
        if layout.copies is not None:  # one bucket is summed over hosts, the next within
            own = self.end - self.start
            rooms = [layout.comm.borrow("copies", flat, 1, own) for _ in range(2)]
            layout.copies.expect_sum(rooms[0].tensor[0], self.numels)
            for room in rooms:
                room.give_back()

    def _deliver(self, scale: Scale | None, rows: torch.Tensor) -> None:
        """Take the sum of `rows`, [n, own interval], as this rank's part, before scaling."""
        if self._on_host and (self._layout.pool is None or self._layout.copies is not None):
            self._deliver_to_host(rows, scale)
            return
        if scale is None:
            self._add(rows)
            return
        fresh, own, pool = self._fresh(), self.gradient, self._layout.pool
        factor = scale() if pool is None else pool.bring(scale())
        if all(fresh) or self._memory.sums_in is not None:
            _sum(rows, own)
            _multiply(own, factor)
            if self._carried is not None:
                own.add_(self._carried)
                self._carried = None
        else:
            self._zero(fresh)
            own.addcmul_(_sum_into_first(rows), factor)
        self._assign_gradients(fresh)

    def _deliver_to_host(self, rows: torch.Tensor, scale: Scale | None) -> None:
        """Deliver on the host: the sum is copied there, and behind the copy, `rows` are free for
        the computing stream."""
        if scale is None:
            self._remember()
        fresh = self._fresh()
        is_first = all(fresh) if scale is not None else not self._summed
        self._lane.carry(self.gradient.nbytes)
        with self._lane.active():
            part = _sum_into_first(rows)
            if scale is not None:
                part.mul_(self._lane.uses(scale()))
            if is_first:
                self.gradient.copy_(part, non_blocking=True)
            else:
                if scale is not None:
                    self._zero(fresh)
                self.gradient.add_(part.to(self.gradient.device))  # the host waits
        if not self._layout.replicated:  # else rows are the gradient, used once in a step
            self._lane.mark().block_current_stream()
        if scale is None:
            self._summed = True
        else:
            self._assign_gradients(fresh)

    def _add(self, rows: torch.Tensor) -> None:
        self._remember()
        if self._summed:
            self.gradient.add_(_sum_into_first(rows))
        else:
            _sum(rows, self.gradient)
        self._summed = True

    def _remember(self) -> None:
        """Save gradients left by earlier steps, before a step's first sum without a scale."""
        if not self._summed and self._memory.sums_in is None and not all(fresh := self._fresh()):
            self._zero(fresh)
            self._carried = self.gradient.clone()

    def settle(self, scale: Scale) -> None:
        """Multiply all sums reduced in a step without a scale by `scale`, and put the result into
        the pieces' `grad`."""
        if self._summed:
            if self._on_host:
                self._layout.comm.transfers.arrived()
            _multiply(self.gradient, scale().to(self.gradient.device))
            if self._carried is not None:
                self.gradient.add_(self._carried)
            self._assign_gradients(self._fresh())
        self.forget_sums()

    def forget_sums(self) -> None:
        """Discard the sums of this step."""
        self._summed, self._carried = False, None

    def drop_new_gradients(self, names: Collection[str]) -> None:
        """Drop the gradients of this step of the named parameters, unless added to gradients of
        earlier steps."""
        for piece, is_new in zip(self.pieces, self._new):
            if is_new and piece.name in names:
                piece.local.grad = None

    def _assign_gradients(self, fresh: list[bool]) -> None:
        """Put the sums into the pieces' `grad`; `fresh` are those without a gradient so far."""
        self._new = fresh
        for piece, gradient in zip(self.pieces, self._piece_gradients):
            piece.local.grad = gradient

    def _fresh(self) -> list[bool]:
        """Return, for each piece, True if there is no gradient to add to."""
        return [piece.local.grad is None for piece in self.pieces]

    def _zero(self, fresh: list[bool]) -> None:
        for is_fresh, gradient in zip(fresh, self._piece_gradients):
            if is_fresh:
                gradient.zero_()


def _read_initial_values(source: Source, member: ShardMember, start: int, end: int) -> torch.Tensor:
    """Return initial values of elements [start, end) of a parameter's window."""
    parameter = member.parameter
    if member.window.whole:
        return source(member.name, parameter, start, end)
    every = source(member.name, parameter, 0, parameter.numel()).view(parameter.shape)
    return member.window.of(every).reshape(-1)[start:end]


def _multiply(value: torch.Tensor, scale: torch.Tensor) -> None:
    """Multiply in place; skip a factor of 1, if reading the factor does not wait for a device."""
    if scale.device.type != "cpu" or scale.item() != 1.0:
        value.mul_(scale)


def _sum_into_first(rows: torch.Tensor) -> torch.Tensor:
    """Sum the rows, into the first row."""
    for row in rows[1:]:
        rows[0].add_(row)
    return rows[0]


def _sum(rows: torch.Tensor, out: torch.Tensor) -> None:
    if rows.device != out.device:
        out.copy_(_sum_into_first(rows))
    elif rows.shape[0] > 1:
        torch.sum(rows, 0, out=out)
    elif rows.data_ptr() != out.data_ptr():
        out.copy_(rows[0])
