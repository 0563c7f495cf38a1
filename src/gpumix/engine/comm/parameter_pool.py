"""Parameters in memory shared by the ranks of a host, one copy a host, instead of gathers and
reductions between devices.

Each rank updates its own interval of a vector in place, and copies the whole vector to its device
when it needs it. The order of steps makes this safe without locks:

* Values are read after all ranks have written theirs: the first copy of a vector in a step begins
  behind a small collective.
* Values are written after all ranks have read them: a vector is updated once its gradient is
  summed, for which every rank has computed with it. Reads without a sum of gradients after them,
  as in an evaluation, end in a small collective.
* Gradients are copied into a row of each rank. Rows are of two rooms in turn, because a rank may
  still sum the rows of one reduction while others copy those of the next.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from gpumix.cost.memory_layout.buffer_slots import GRADIENT_ROOMS
from gpumix.engine.comm.communicator import Communicator, Pending
from gpumix.engine.offload.copy_lanes import CopyLane, LaneMark
from gpumix.engine.offload.host_offload import allocate_on_host
from gpumix.hardware import runtime
from gpumix.hardware.host.shared_segment import (
    SegmentPlace,
    create_segment,
    map_segment,
)
from gpumix.schema.errors import MachineError
from gpumix.schema.plan.splitting import ShardIntervals

if TYPE_CHECKING:
    from gpumix.hardware.emulation.link import LinkArrival


@dataclass
class PooledVector:
    """A flat vector in shared memory. Its owners write their intervals of `values`."""

    values: torch.Tensor
    pool: ParameterPool
    _is_agreed: bool = field(default=False, init=False)  # all have written, in this step
    _read: LaneMark | None = field(default=None, init=False)  # after this rank's last copy

    def fetch(self, into: torch.Tensor, label: str) -> Pending:
        """Start to copy the vector to the device. The first time in a step this is collective."""
        comm = self.pool.comm
        comm.count_copy("fetch", into)
        agreed = Pending((), label, comm) if self._is_agreed else self.pool.meet(label)
        self._is_agreed = self.pool.is_read = True
        lane = comm.transfers.to_device
        carried = lane.carry(into.nbytes)
        pending = agreed.then(partial(self._copy, into, lane, carried))
        if self.pool.is_queued(lane):
            pending = pending.finish_on(lane)
        return pending.then(self._arrived)

    def _copy(self, into: torch.Tensor, lane: CopyLane, carried: LaneMark) -> None:
        with lane.active():
            into.copy_(self.values, non_blocking=True)
        self._read = lane.mark() if lane.is_stream else carried

    def _arrived(self) -> None:
        assert self._read is not None, "it was copied"
        with self.pool.comm.clock:
            self._read.block_current_stream()

    def may_change(self) -> None:
        """End a step, or another pass: owners may write from now on."""
        if self._read is not None:
            self._read.wait()
        self.pool.end_reads()
        self._is_agreed = False


class ParameterPool:
    """Memory shared by the ranks of `comm`, which are on one host.

    Attributes:
        is_read: whether ranks may have read vectors since gradients were summed.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.is_read = False
        self._rooms: list[torch.Tensor] = []  # [ranks, elements of the largest vector]
        self._turn = 0
        self._brought: tuple[torch.Tensor, torch.Tensor] | None = None

    def allocate_vector(self, numel: int, dtype: torch.dtype) -> PooledVector:
        """Allocate a vector. Collective.

        Raises:
            MachineError: a rank cannot have the memory.
        """
        return PooledVector(self._allocate(numel, dtype), self)

    def expect_reduce(self, full: torch.Tensor) -> None:
        """Allocate the memory to reduce `full`, the largest vector. Collective."""
        if self._rooms and self._rooms[0].shape[1] >= full.numel():
            return
        self._rooms.clear()
        ranks = self.comm.world
        self._rooms += [
            self._allocate(ranks * full.numel(), full.dtype).view(ranks, -1)
            for _ in range(GRADIENT_ROOMS)
        ]

    def reduce(
        self,
        full: torch.Tensor,
        intervals: ShardIntervals,
        label: str,
        deliver: Callable[[torch.Tensor], None],
    ) -> Pending:
        """Sum `full` over ranks; see `Communicator.reduce`. Rows are in memory of the host."""
        comm, lane = self.comm, self.comm.transfers.to_host
        self.is_read = False
        comm.count_copy("put", full)
        rows = self._rooms[self._turn][:, : full.numel()]
        self._turn = (self._turn + 1) % GRADIENT_ROOMS
        carried = lane.carry(full.nbytes)
        with lane.active():
            rows[comm.rank].copy_(full, non_blocking=True)
        begin, end = intervals.of(comm.rank)
        own = rows[:, begin:end]
        if self.is_queued(lane):
            # On the lane, behind the copy; the host waits for both.
            with lane.active(at_once=True):
                self.meet(label).wait()
            mark = lane.mark()
            return Pending((), label, comm).then(mark.wait).then(partial(deliver, own))
        if lane.is_stream:
            lane.mark().wait()
        if carried.arrival is None:
            return self.meet(label).then(partial(deliver, own))
        return self._meet_at_arrival(carried.arrival, label).then(partial(deliver, own))

    def _meet_at_arrival(self, arrival: LinkArrival, label: str) -> Pending:
        """Start to wait until copies of all ranks have come over their emulated links."""
        at_s = torch.tensor([arrival.at_s], dtype=torch.float64)
        table, met = self.comm.exchange(at_s, label)

        def wait() -> None:
            with self.comm.clock:
                arrival.link.wait_until(float(table.max()))

        return met.then(wait)

    def meet(self, label: str) -> Pending:
        """Start to wait for all ranks to come to the same point."""
        flag = torch.zeros(1, dtype=torch.uint8, device=self.comm.device)
        return self.comm.start_all_reduce(flag, label, flags=True)

    def end_reads(self) -> None:
        """Wait until all ranks have read what they read since gradients were summed. Collective."""
        if not self.is_read:
            return
        self.is_read = False
        if self.comm.world == 1:
            return
        lane, label = self.comm.transfers.to_device, "end of reads of the host's parameters"
        if self.is_queued(lane):
            with lane.active(at_once=True):  # behind the copies
                self.meet(label).wait()
            lane.mark().wait()
        else:
            lane.mark().wait()
            self.meet(label).wait()

    def is_queued(self, lane: CopyLane) -> bool:
        """Return whether waits for collectives block the lane, not the host."""
        return lane.is_stream and not self.comm.on_gloo

    def bring(self, value: torch.Tensor) -> torch.Tensor:
        """Return a value on the host, copied once however often it is asked for."""
        if value.device.type == "cpu":
            return value
        if self._brought is None or self._brought[0] is not value:
            self._brought = value, value.cpu()
        return self._brought[1]

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        size, comm = numel * dtype.itemsize, self.comm
        if comm.world == 1 or not size:
            return allocate_on_host(numel, dtype, comm.device)
        memory = self._share(size, named=False)
        if memory is None:
            memory = self._share(size, named=True)
        if memory is None:
            raise MachineError(
                "the ranks of this host share no memory, which `parameters_on: host` needs",
                code="host-memory-not-shared",
                why="they see neither each other's open files (/proc) nor one /dev/shm",
                fix="start them in one container, or with one process namespace (docker run "
                "--pid=host --ipc=host), or plan without `parameters_on: host`",
            )
        return memory.view(dtype)

    def _share(self, size: int, *, named: bool) -> torch.Tensor | None:
        """Map memory made by the first rank on all ranks; None if a rank cannot see it."""
        comm, made, failed = self.comm, None, None
        label = "search for shared memory"
        with ExitStack() as stack:
            try:
                if comm.rank == 0:
                    made = stack.enter_context(create_segment(size, named=named))
            except MachineError as error:
                failed = error
            told = [0, 0, 0, 0]
            if made is not None:
                told = [made.process, made.descriptor, made.number, made.token]
            row = comm.exchanged(torch.tensor(told, device=comm.device), label)[0].tolist()
            memory = None
            if row[0]:
                try:
                    pinned = runtime.is_gpu(comm.device)
                    memory = map_segment(SegmentPlace(*row), size, pinned=pinned)
                except MachineError as error:
                    failed = error
            state = 2 if failed is not None else int(memory is not None)
            states = comm.exchanged(torch.tensor([state], device=comm.device), label)[:, 0].tolist()
        if failed is not None:
            raise failed
        if 2 in states:
            raise MachineError(
                f"rank {comm.members[states.index(2)]} of this host cannot have memory that all "
                "of its ranks share",
                code="host-memory-not-shared",
                fix="see the error of that rank, or plan without `parameters_on: host`",
            )
        return memory if all(states) else None
