"""Ragged flat shards: one unit's parameters in one buffer that ranks own in unequal parts.

The gathered buffer *is* the unit: its parameters are views into it, and their gradients are views
into one gradient buffer, so nothing is copied in or out. Buffers keep their tensor objects for
life; what comes and goes is their storage.

Who owns what, and when it dies: `master` and `master_gradient` (this rank's interval, the whole
run); `full` (from gather to release); `gradient` (from the first backward of a step until its
reduction is done).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from gpumix.engine.away import Away
from gpumix.engine.comm import Communicator, Pending
from gpumix.engine.units import Slot, Unit
from gpumix.spec.plan import cut

# Gives the initial values of a parameter's flat interval [start, end), in any dtype and device.
Source = Callable[[str, nn.Parameter, int, int], torch.Tensor]


@dataclass(frozen=True)
class Piece:
    """This rank's part of one parameter: elements [start, end) of it, flattened.

    `local` is what the optimizer sees: 1-D, a view into the master shard; empty where this rank
    owns none of the parameter, so that every rank has a piece of every parameter.
    """

    name: str
    shape: torch.Size
    start: int
    end: int
    local: nn.Parameter


ROUND_NUMEL = 64  # of which a multiple keeps the next parameter aligned, in every dtype


class FlatGroup:
    """The parameters of one unit that are alike in dtype and in being trained or not.

    Args:
        label: for error messages: the unit's name.
        slots: the parameters; their places in the modules get views of the buffer instead.
        compute_dtype: of the gathered buffer; frozen parameters that are not floats keep theirs.
        shares: state share of each rank.
    """

    def __init__(
        self,
        label: str,
        slots: list[Slot],
        *,
        shares: tuple[float, ...],
        comm: Communicator,
        device: torch.device,
        compute_dtype: torch.dtype,
        source: Source,
    ) -> None:
        self.label = label
        self.comm = comm
        self.trainable = slots[0].parameter.requires_grad
        numels = [s.parameter.numel() for s in slots]
        self.numel = sum(numels)
        self.offsets = cut(self.numel, shares)
        self.start, self.end = self.offsets[comm.rank], self.offsets[comm.rank + 1]
        floating = slots[0].parameter.is_floating_point()
        dtype = compute_dtype if floating else slots[0].parameter.dtype
        master_dtype = torch.float32 if self.trainable else dtype
        self.master = torch.empty(self.end - self.start, dtype=master_dtype, device=device)
        self.full = torch.empty(self.numel, dtype=dtype, device=device)
        self._full_bytes = self.full.untyped_storage().nbytes()
        self.pieces = list(self._fill(slots, numels, source))
        self._install(slots, numels)
        self.release()
        if self.trainable:
            self.master_gradient = torch.zeros_like(self.master)
            self._piece_gradients = self.master_gradient.split(
                [piece.end - piece.start for piece in self.pieces]
            )
            self.gradient = torch.empty(self.numel, device=device)
            self._gradient_bytes = self.gradient.untyped_storage().nbytes()
            self._point_gradients(numels)
            self.free_gradient()

    def _fill(self, slots: list[Slot], numels: list[int], source: Source) -> Iterator[Piece]:
        """Put initial values into the master shard, and cut it into pieces."""
        begin = 0
        for slot, numel in zip(slots, numels):
            start = min(max(self.start - begin, 0), numel)
            end = min(max(self.end - begin, start), numel)
            offset = min(max(begin + start - self.start, 0), self.master.numel())
            view = self.master[offset : offset + end - start]
            if end > start:
                view.copy_(source(slot.name, slot.parameter, start, end))
            local = nn.Parameter(view.detach(), requires_grad=self.trainable)
            yield Piece(slot.name, slot.parameter.shape, start, end, local)
            begin += numel

    def _install(self, slots: list[Slot], numels: list[int]) -> None:
        """Put views of the buffer in the places of the parameters."""
        self.views: list[nn.Parameter] = []
        self._places: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter, Away]] = []
        for slot, view in zip(slots, self.full.data.split(numels)):
            # `.data` gives the view a version counter of its own: the next gather is no in-place
            # change of what autograd saved.
            shaped = nn.Parameter(
                view.view(slot.parameter.shape).data, slot.parameter.requires_grad
            )
            away = Away.of(shaped, slot.name)
            for module, attribute in slot.places:
                self._places.append((module._parameters, attribute, shaped, away))
            self.views.append(shaped)

    def _point_gradients(self, numels: list[int]) -> None:
        """Make autograd accumulate in fp32 into views of the gradient buffer."""
        for view, gradient in zip(self.views, self.gradient.split(numels)):
            if view.dtype != torch.float32:
                view.grad_dtype = torch.float32  # type: ignore[attr-defined]
            view.grad = gradient.view(view.shape)

    def names_by_parameter(self) -> Iterator[tuple[nn.Parameter, str]]:
        """What the modules may hold in the places of parameters, with the name of the piece."""
        for _, _, view, away in self._places:
            yield view, away.parameter_name
            yield away, away.parameter_name

    # -- parameters ---------------------------------------------------------------------------

    def gather(self) -> Pending:
        """Start to fill the buffer from all ranks' shards."""
        self.allocate()
        return self.comm.gather(
            self.full, self.master, self.offsets, f"all-gather of unit '{self.label}'"
        )

    def allocate(self) -> None:
        """Give the buffer its memory, and the modules their parameters."""
        self.full.untyped_storage().resize_(self._full_bytes)
        for parameters, attribute, view, _ in self._places:
            parameters[attribute] = view

    def release(self) -> None:
        """Free the buffer; until the next gather the modules hold what says so."""
        for parameters, attribute, _, away in self._places:
            parameters[attribute] = away
        self.full.untyped_storage().resize_(0)

    # -- gradients ----------------------------------------------------------------------------

    def begin_gradient(self) -> None:
        """Allocate the gradient buffer, zeroed."""
        self.gradient.untyped_storage().resize_(self._gradient_bytes)
        self.gradient.zero_()

    def reduce(self, scale: Callable[[], torch.Tensor]) -> Pending:
        """Start to sum the gradient over ranks; afterwards this rank's part, times `scale`, is in
        the pieces' `grad`: added to those that there are, as autograd does."""

        def deliver(rows: torch.Tensor) -> None:
            fresh = [piece.local.grad is None for piece in self.pieces]
            if all(fresh):
                torch.sum(rows, 0, out=self.master_gradient)
                self.master_gradient.mul_(scale())
            else:
                for is_fresh, gradient in zip(fresh, self._piece_gradients):
                    if is_fresh:
                        gradient.zero_()
                self.master_gradient.addcmul_(rows.sum(0), scale())
            self.free_gradient()
            for piece, gradient in zip(self.pieces, self._piece_gradients):
                piece.local.grad = gradient

        return self.comm.reduce(
            self.gradient, self.offsets, f"reduction of unit '{self.label}'", deliver
        )

    def free_gradient(self) -> None:
        """Free the gradient buffer."""
        self.gradient.untyped_storage().resize_(0)


class ShardedUnit:
    """A unit whose parameters live in ragged shards. Its `forward` is the module's own."""

    def __init__(self, unit: Unit, groups: list[FlatGroup], comm: Communicator) -> None:
        self.name = unit.name
        self.kind = unit.kind
        self.module = unit.module
        self.forward = unit.module.forward
        self.groups = groups
        self.with_buffers = [module for module in unit.module.modules() if module._buffers]
        # Also where the unit's parameters are the root's, because it shares them with other units.
        self.trainable = any(p.requires_grad for p in unit.module.parameters())
        self.comm = comm
        self._gathering: list[Pending] | None = None
        self._reducing: list[Pending] = []

    def start_gather(self) -> None:
        """Start to gather the parameters, unless that is under way or done."""
        if self._gathering is None:
            self._gathering = []
            for group in self.groups:  # one by one: what has begun is known if the next one fails
                self._gathering.append(group.gather())
            self.comm.record.issued("gather", self.name, self._gathering)

    def gathered(self) -> None:
        """Wait until the parameters are here."""
        self.start_gather()
        self.comm.record.waits("gather", self.name)
        for pending in self._gathering or ():
            pending.wait()
        self._gathering = []

    def release(self) -> None:
        """Free the parameters."""
        for group in self.groups:
            group.release()
        self._gathering = None

    def begin_gradient(self) -> None:
        for group in self.groups:
            if group.trainable:
                group.begin_gradient()

    def start_reduce(self, scale: Callable[[], torch.Tensor]) -> None:
        """Start to sum the gradients over ranks."""
        for group in self.groups:
            if group.trainable:
                self._reducing.append(group.reduce(scale))
        self.comm.record.issued("reduce", self.name, self._reducing)

    def reduced(self) -> None:
        """Wait until this rank's part of the gradient is in its pieces."""
        self.comm.record.waits("reduce", self.name)
        for pending in self._reducing:
            pending.wait()
        self._reducing = []

    def abandon(self) -> None:
        """Leave nothing of a step that failed half-way: no parameters, no gradients."""
        self._reducing = []
        self.release()
        for group in self.groups:
            if group.trainable:
                group.free_gradient()

    @property
    def pieces(self) -> list[Piece]:
        return [piece for group in self.groups for piece in group.pieces]


def shard(
    unit: Unit,
    *,
    shares: tuple[float, ...],
    comm: Communicator,
    device: torch.device,
    compute_dtype: torch.dtype,
    source: Source,
) -> ShardedUnit:
    """Replace a unit's parameters by views of flat buffers that are sharded by `shares`."""
    alike: dict[tuple[bool, torch.dtype | None], list[Slot]] = {}
    # Odd sizes last: kernels want the others to begin at round addresses.
    for slot in sorted(unit.slots, key=lambda s: s.parameter.numel() % ROUND_NUMEL != 0):
        p = slot.parameter
        alike.setdefault((p.requires_grad, None if p.is_floating_point() else p.dtype), []).append(
            slot
        )
    groups = [
        FlatGroup(
            unit.name,
            slots,
            shares=shares,
            comm=comm,
            device=device,
            compute_dtype=compute_dtype,
            source=source,
        )
        for _, slots in sorted(alike.items(), key=lambda item: str(item[0]), reverse=True)
    ]
    return ShardedUnit(unit, groups, comm)
