"""All communication of a step.

Backends disagree about uneven sizes: some refuse, gloo accepts a message of the wrong length and
leaves stale data behind, or aborts the process. So nothing else in gpumix calls a collective on the
data group, and sizes and dtypes are checked here before every call. All that depends on the number
of ranks is in `ShardIntervals`, which a buffer keeps: preparing a collective takes no longer with
more ranks, unless its form itself names a part for each rank.

Forms of a gather: `native` (equal shares only), `broadcast` (one per owner into views of the
buffer, no copies), `list` (the backend's uneven list form; NCCL), `padded` (native on a buffer in
which every interval has the maximal length). Forms of a reduction: `native` (equal shares only),
`all_to_all` (each rank sends each owner its part; the owner sums in fp32 in rank order, hence
bitwise repeatable), `list` (NCCL), `padded`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from math import ceil
from weakref import WeakSet

import torch
import torch.distributed as dist

from gpumix.engine.comm.collective_progress import ActivityScope, begin_collective
from gpumix.engine.comm.failure_report import CommunicationError, FailureReports
from gpumix.engine.comm.hang_attribution import AwaitedCollective
from gpumix.engine.comm.step_recorder import CurrentRecorder, SilentRecorder
from gpumix.engine.comm.wait_clock import WaitClock
from gpumix.engine.offload.copy_lanes import CopyLane
from gpumix.engine.offload.state_transfers import StateTransfers
from gpumix.hardware import runtime
from gpumix.hardware.memory_limit import is_out_of_memory
from gpumix.schema.errors import get_first_line
from gpumix.schema.plan.plan import Collectives
from gpumix.schema.plan.splitting import ShardIntervals


class Pending:
    """A collective in flight. `wait` blocks until the result may be used.

    Attributes:
        is_over: True if there is nothing to wait for, and nothing to do behind it.
        following: starts a further collective of the same operation, after the wait.
    """

    following: Callable[[], Pending] | None = None

    def __init__(
        self,
        works: Sequence[dist.Work],
        label: str,
        comm: Communicator,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self.works = works
        self.comm = comm
        self._label = label
        self._wait = comm.begun
        self._finish = [] if finish is None else [finish]
        self.is_over = not works and finish is None

    def then(self, finish: Callable[[], None]) -> Pending:
        """Add a callback that runs at the end of the wait."""
        self._finish.append(finish)
        self.is_over = False
        return self

    def at_end(self, act: Callable[[], None]) -> Pending:
        """Add a callback that runs at the end of the wait for the last collective."""
        start = self.following
        if start is None:
            return self.then(act)
        self.following = lambda: start().at_end(act)
        return self

    def finish_on(self, lane: CopyLane) -> Pending:
        """Give the callbacks to `lane` at once. Only for backends whose wait blocks streams, not
        the host."""
        with lane.active(), CollectiveScope(self._label, self._wait):
            for work in self.works:
                self.comm.words.wait(work)
            finish, self._finish = self._finish, []
            for act in finish:
                act()
        return self.then(lane.mark().block_current_stream)

    def wait(self) -> None:
        if self.works:
            with CollectiveScope(self._label, self._wait), self.comm.clock:
                for work in self.works:
                    self.comm.words.wait(work)
            self.works = ()
        self.is_over = True
        finish, self._finish = self._finish, []
        for act in finish:
            act()


class CollectiveScope(ActivityScope):
    """Context that reports failures as failures of the collective `label`. Out-of-memory errors
    pass unchanged.

    Args:
        wait: the wait under way.
    """

    def __init__(self, label: str, wait: AwaitedCollective | None = None) -> None:
        super().__init__(f"in the {label}", wait)
        self._label = label

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        super().__exit__(kind, error, trace)
        if not isinstance(error, RuntimeError):
            return
        if is_out_of_memory(error) or isinstance(error, torch.AcceleratorError):
            return  # an error of this device's own work that only shows here
        what = f"the {self._label} failed"
        raise CommunicationError(
            what, code="collective-failed", why=get_first_line(error), wait=self.wait
        ) from error


_live_communicators: WeakSet[Communicator] = WeakSet()  # all that exist


def leave_groups() -> None:
    """Leave all process groups and drop all references, so that gloo's threads end. A thread that
    still has a tensor to drop when the interpreter has ended takes the process with it: `terminate
    called without an active exception`."""
    dist.destroy_process_group()
    for comm in list(_live_communicators):
        comm.group = None


@dataclass(frozen=True)
class PooledTensor:
    """A tensor in memory of a pool, until returned."""

    tensor: torch.Tensor
    memory: torch.Tensor
    pool: list[torch.Tensor]

    def give_back(self) -> None:
        self.pool.append(self.memory)


class Communicator:
    """The collectives of a group of ranks.

    Args:
        group: the data group, None for a single process.
        rank, world: this rank's number in the group, and the group's size.
        forms: the form of each collective where shares are unequal.
        device: device of the communicated tensors.
        of: the parent group; both share counters.
        members: the ranks' numbers in the group of all ranks; default: this is the group of all.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        rank: int,
        world: int,
        forms: Collectives | None = None,
        device: torch.device | str = "cpu",
        of: Communicator | None = None,
        members: Sequence[int] | None = None,
    ) -> None:
        if world > 1 and group is None:
            raise ValueError("several ranks need a process group")
        self.group = group
        _live_communicators.add(self)
        self.rank = rank
        self.world = world
        self.members = tuple(range(world)) if members is None else tuple(members)
        self.forms = forms or Collectives()
        self.counts: Counter[str] = Counter() if of is None else of.counts
        self.bytes: Counter[str] = Counter() if of is None else of.bytes
        self.sent: Counter[str] = Counter() if of is None else of.sent  # bytes
        self.device = runtime.add_device_index(device)
        self.clock: WaitClock = WaitClock(self.device) if of is None else of.clock
        self.words: FailureReports = FailureReports() if of is None else of.words  # of an engine
        self.begun: AwaitedCollective | None = None  # the last collective
        self._of = of
        self.recorder: CurrentRecorder = CurrentRecorder() if of is None else of.recorder
        # Memory for data received before it is put in place, kept for the next collective.
        self._pools: dict[str, list[torch.Tensor]] = {}
        # By device: a group may have a backend for each.
        self._name: str = getattr(group, "group_name", "")
        self.on_gloo = group is not None and group._get_backend(self.device).name() == "gloo"

    @cached_property
    def transfers(self) -> StateTransfers:
        """Copies of state between device and host, shared by a group and its parts."""
        return StateTransfers(self.device) if self._of is None else self._of.transfers

    @property
    def record(self) -> SilentRecorder:
        """Record of the current step, if traced; shared by a group and its parts."""
        return self.recorder.now

    @record.setter
    def record(self, record: SilentRecorder) -> None:
        self.recorder.now = record

    def gather(
        self, full: torch.Tensor, shard: torch.Tensor, intervals: ShardIntervals, label: str
    ) -> Pending:
        """Fill the 1-D buffer `full` from every rank's interval.

        Args:
            full: the full buffer.
            shard: this rank's interval, of any floating dtype; cast to the dtype of `full`.
        """
        mine = self._own_part(full, intervals)
        if shard.shape != mine.shape:
            raise AssertionError(f"{label}: shard {shard.shape} for interval {mine.shape}")
        self._count("gather", full)
        mine.copy_(shard, non_blocking=True)  # the shard may be in pinned host memory
        if self.world == 1:
            return Pending((), label, self)
        with CollectiveScope(label):
            if self.forms.gather == "padded" and not intervals.equal:
                return self._start_padded_gather(full, mine, intervals, label)
            return Pending(self._start_gather(full, mine, intervals), label, self)

    def _start_gather(
        self, full: torch.Tensor, mine: torch.Tensor, intervals: ShardIntervals
    ) -> list[dist.Work]:
        form = "native" if intervals.equal else self.forms.gather
        if form == "native" and self.on_gloo:
            form = "broadcast"  # gloo's own gather makes a full-size temporary: twice as slow
        if form == "native":
            return [_all_gather_single(full, mine, self.group)]
        parts = full.split(intervals.sizes)
        if form == "list":
            return [dist.all_gather(list(parts), mine, group=self.group, async_op=True)]
        # The group's own call: wrapping it in `torch.distributed` takes a fifth of the time.
        assert self.group is not None, "several ranks have one"
        return [
            self.group.broadcast([part], _broadcast_from(owner))
            for owner, part in enumerate(parts)
            if part.numel()
        ]

    def _start_padded_gather(
        self, full: torch.Tensor, mine: torch.Tensor, intervals: ShardIntervals, label: str
    ) -> Pending:
        room = self.borrow("gather", full, self.world, self._padded_length(intervals))
        rows = room.tensor
        row = rows[self.rank].clone() if self.on_gloo else rows[self.rank]  # NCCL gathers in place
        row[: len(mine)] = mine
        work = _all_gather_single(rows.view(-1), row, self.group)

        def finish() -> None:
            for owner, part in enumerate(full.split(intervals.sizes)):
                if owner != self.rank:
                    part.copy_(rows[owner, : len(part)])
            room.give_back()

        return Pending([work], label, self, finish)

    def _padded_length(self, intervals: ShardIntervals) -> int:
        """Return the padded length of an interval in elements; a cut may round an interval up."""
        equal = ceil(intervals.numel * self.forms.padding / self.world)
        return max(equal, intervals.longest)

    def reduce(
        self,
        full: torch.Tensor,
        intervals: ShardIntervals,
        label: str,
        deliver: Callable[[torch.Tensor], None],
    ) -> Pending:
        """Sum the 1-D buffer `full` over ranks, each rank its own interval.

        `deliver` is called at the end of the wait with rows of shape [n, own interval], whose sum
        over the first dimension is the result. It must not keep the rows. Until then `full` must
        not change.
        """
        mine = self._own_part(full, intervals)
        self._count("reduce", full)
        if self.world == 1:
            return Pending((), label, self, partial(deliver, full[None]))
        with CollectiveScope(label):
            return self._start_reduce(full, mine, intervals, label, deliver)

    def _start_reduce(
        self,
        full: torch.Tensor,
        mine: torch.Tensor,
        intervals: ShardIntervals,
        label: str,
        deliver: Callable[[torch.Tensor], None],
    ) -> Pending:
        form = self._reduce_form(intervals)
        if form == "all_to_all":
            room = self.borrow("reduce", full, self.world, mine.numel())
            assert self.group is not None, "several ranks have one"
            rows, sizes = room.tensor.view(-1), intervals.sizes
            # Equal lengths arrive from all ranks.
            work = self.group.alltoall_base(rows, full, [], sizes, dist.AllToAllOptions())

            def finish() -> None:
                deliver(room.tensor)
                room.give_back()

            return Pending([work], label, self, finish)
        # In place: the sum lands in this rank's own interval of the gradient buffer.
        if form == "padded":
            return self._start_padded_reduce(full, intervals, label, deliver)
        if form == "native":
            work = _reduce_scatter_single(mine, full, self.group)
        else:
            parts = list(full.split(intervals.sizes))
            work = dist.reduce_scatter(mine, parts, group=self.group, async_op=True)
        return Pending([work], label, self, partial(deliver, mine[None]))

    def _start_padded_reduce(
        self,
        full: torch.Tensor,
        intervals: ShardIntervals,
        label: str,
        deliver: Callable[[torch.Tensor], None],
    ) -> Pending:
        length = self._padded_length(intervals)
        room = self.borrow("reduce", full, self.world + 1, length)
        rows, mine = room.tensor[:-1], room.tensor[-1]
        for row, part in zip(rows, full.split(intervals.sizes)):
            row[: len(part)] = part
        work = _reduce_scatter_single(mine, rows.view(-1), self.group)

        def finish() -> None:
            deliver(mine[None, : intervals.sizes[self.rank]])
            room.give_back()

        return Pending([work], label, self, finish)

    def _reduce_form(self, intervals: ShardIntervals) -> str:
        form = "native" if intervals.equal else self.forms.reduce
        return "all_to_all" if form == "native" and self.on_gloo else form

    def expect_reduce(self, full: torch.Tensor, intervals: ShardIntervals) -> None:
        """Allocate pool memory to reduce `full`, the largest buffer. A pool that grows later needs
        the old and the new memory for a moment."""
        mine = self._own_part(full, intervals)
        if self.world == 1:
            return
        form = self._reduce_form(intervals)
        if form == "all_to_all":
            self.borrow("reduce", full, self.world, mine.numel()).give_back()
        elif form == "padded":
            rows = self.world + 1
            self.borrow("reduce", full, rows, self._padded_length(intervals)).give_back()

    def borrow(self, purpose: str, like: torch.Tensor, rows: int, length: int) -> PooledTensor:
        """Borrow an uninitialized [rows, length] tensor with the dtype of `like` from a purpose's
        pool. The pool grows to the number of tensors borrowed at once."""
        needed = rows * length * like.element_size()
        pool = self._pools.setdefault(purpose, [])
        fitting = [memory for memory in pool if memory.numel() >= needed]
        if fitting:
            memory = min(fitting, key=torch.Tensor.numel)
            pool.pop(next(n for n, held in enumerate(pool) if held is memory))
        else:
            if pool:  # too small; replaced by the larger one
                pool.pop()
            memory = torch.empty(needed, dtype=torch.uint8, device=like.device)
        return PooledTensor(memory[:needed].view(like.dtype).view(rows, length), memory, pool)

    def start_all_reduce(self, value: torch.Tensor, label: str, *, flags: bool = False) -> Pending:
        """Start to sum `value` over ranks in place, or for flags (uint8) to take the maximum."""
        self._count("flags" if flags else "all_reduce", value)
        if self.world == 1:
            return Pending((), label, self)
        operation = dist.ReduceOp.MAX if flags else dist.ReduceOp.SUM
        with CollectiveScope(label):
            work = dist.all_reduce(value, operation, group=self.group, async_op=True)
        return Pending([work], label, self)

    def all_reduce(self, value: torch.Tensor, label: str) -> torch.Tensor:
        """Sum `value` over ranks in place."""
        self.start_all_reduce(value, label).wait()
        return value

    def alone(self) -> Communicator:
        """Return a group of this rank only."""
        own = self.members[self.rank : self.rank + 1]
        return Communicator(None, rank=0, world=1, device=self.device, of=self, members=own)

    def subgroup(self, groups: Sequence[Sequence[int]]) -> Communicator:
        """Return the collectives of this rank's group among `groups`, lists of ranks. Collective:
        every rank makes all groups."""
        made = [self.among(ranks) for ranks in groups]
        return next((own for own in made if own is not None), self)

    def among(self, ranks: Sequence[int]) -> Communicator | None:
        """Return the collectives of some ranks, None on ranks outside. Collective on all ranks."""
        ranks = sorted(ranks)  # as in the group
        group = None
        if len(ranks) > 1 and self.group is not None:
            group = dist.new_group(
                [dist.get_global_rank(self.group, rank) for rank in ranks],
                timeout=self.group._get_backend(self.device).options._timeout,
            )
        if self.rank not in ranks:
            return None
        return type(self)(
            group,
            rank=ranks.index(self.rank),
            world=len(ranks),
            forms=self.forms,
            device=self.device,
            of=self,
            members=[self.members[rank] for rank in ranks],
        )

    def exchange(
        self, row: torch.Tensor, label: str, *, into: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Pending]:
        """Start to all-gather every rank's `row` (1-D, equal lengths). Returns a [world, len(row)]
        tensor, in its own memory or in `into`, valid after the wait."""
        self._count("exchange", row)
        table = row.new_empty(self.world, row.numel()) if into is None else into
        if self.world == 1:
            table[0] = row
            return table, Pending((), label, self)
        with CollectiveScope(label):
            work = _all_gather_single(table.view(-1), row, self.group)
        return table, Pending([work], label, self)

    def exchanged(self, row: torch.Tensor, label: str) -> torch.Tensor:
        """Return the table of an `exchange` after the wait."""
        table, pending = self.exchange(row, label)
        pending.wait()
        return table

    def exchange_parts(
        self,
        sent: torch.Tensor,
        send_splits: Sequence[int],
        receive_splits: Sequence[int],
        label: str,
        *,
        into: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Pending]:
        """Start an all-to-all of parts of the 1-D `sent`, of any dtype. Returns the parts for this
        rank in rank order, valid after the wait. Until then `sent` must not change.

        Args:
            send_splits: elements of `sent` for each rank.
            receive_splits: elements that each rank sends to this rank; some or all may be 0.
            into: receive buffer with the dtype of `sent`; default: new memory.
        """
        received = sent.new_empty(sum(receive_splits)) if into is None else into
        for tensor, splits in ((sent, send_splits), (received, receive_splits)):
            if tensor.dim() != 1 or sum(splits) != tensor.numel():
                raise AssertionError(f"{label}: {splits} do not cut a tensor of {tensor.shape}")
        self._count("exchange_parts", sent)
        if self.world == 1:
            received.copy_(sent)
            return received, Pending((), label, self)
        size = sent.element_size()
        with CollectiveScope(label):
            work = dist.all_to_all_single(
                received.view(torch.uint8),  # backends support different dtypes
                sent.view(torch.uint8),
                output_split_sizes=[n * size for n in receive_splits],
                input_split_sizes=[n * size for n in send_splits],
                group=self.group,
                async_op=True,
            )
        return received, Pending([work], label, self)

    def pass_on(self, value: torch.Tensor, source: int, label: str) -> Pending:
        """Start to send `value` (contiguous, any dtype) from rank `source` to all ranks, in place.
        Until the wait it must not change.

        Between two ranks this is a message. The backend's own messages cannot be waited for while
        watching other ranks (gloo closes the pair) and have no tags (NCCL); these arrive in order.
        """
        self._count("send" if self.rank == source else "receive", value)
        with CollectiveScope(label):
            work = dist.broadcast(
                value.view(-1).view(torch.uint8),
                group_src=source,
                group=self.group,
                async_op=True,
            )
        return Pending([work], label, self)

    def broadcast(self, value: torch.Tensor, source: int, label: str) -> None:
        """Broadcast `value` from rank `source` to all ranks, in place, of any dtype."""
        self._count("broadcast", value)
        if self.world > 1:
            sent = value.detach().reshape(-1).clone().view(torch.uint8)
            with CollectiveScope(label, self.begun), self.clock:
                self.words.wait(
                    dist.broadcast(sent, group_src=source, group=self.group, async_op=True)
                )
            value.copy_(sent.view(value.dtype).view(value.shape))

    def count_copy(self, operation: str, tensor: torch.Tensor) -> None:
        """Count a copy between the device and its host in place of a collective."""
        self.counts[operation] += 1
        self.bytes[operation] += tensor.nbytes

    def _own_part(self, full: torch.Tensor, intervals: ShardIntervals) -> torch.Tensor:
        """Return this rank's interval of a buffer."""
        offsets = intervals.offsets
        if full.dim() != 1 or len(offsets) - 1 != self.world or offsets[-1] != full.numel():
            raise AssertionError(f"{intervals} do not cut a buffer of shape {full.shape}")
        return full if self.world == 1 else full[offsets[self.rank] : offsets[self.rank + 1]]

    def _count(self, operation: str, tensor: torch.Tensor) -> None:
        if self.group is not None:
            self.begun = begin_collective(self._name, () if self._of is None else self.members)
        self.counts[operation] += 1
        size = tensor.numel() * tensor.element_size()
        self.bytes[operation] += size
        self.sent[operation] += _sent_bytes(operation, size, self.world)


def _sent_bytes(operation: str, size: int, world: int) -> int:
    """Return the minimal bytes sent per rank for a buffer of `size` bytes, averaged over the group.
    In a gather each other rank gets the rest of the buffer, in a reduction each owner gets all
    parts of its own; an all-reduce is both. One end sends a message; a row goes to all."""
    if operation in ("send", "receive"):
        return size if operation == "send" else 0
    if operation == "exchange":
        return size * (world - 1)
    return (2 if operation in ("all_reduce", "flags") else 1) * size * (world - 1) // world


@cache
def _broadcast_from(owner: int) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = owner
    return options


def _all_gather_single(
    out: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup | None
) -> dist.Work:
    # torch 2.13 renames these two; the old names warn there, the new ones are absent before.
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(out, part, group=group, async_op=True)


def _reduce_scatter_single(
    out: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup | None
) -> dist.Work:
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(out, full, group=group, async_op=True)
