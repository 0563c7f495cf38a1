"""Collectives between GPUs over gloo, through host memory.

For tensors on GPUs, gloo lacks the collectives that uneven shares need. Staging serves where NCCL
cannot: several ranks on one GPU, or GPUs of makers without a common library. Every collective waits
for the device, so staging is slow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from gpumix.engine.comm.communicator import Communicator, Pending, PooledTensor
from gpumix.schema.plan.splitting import ShardIntervals


class StagedCommunicator(Communicator):
    """Communicator for tensors on `device`, over a process group for CPU tensors."""

    @cached_property
    def _host(self) -> Communicator:
        return Communicator(
            self.group,
            rank=self.rank,
            world=self.world,
            forms=self.forms,
            of=self,
            members=self.members,
        )

    def gather(
        self, full: torch.Tensor, shard: torch.Tensor, intervals: ShardIntervals, label: str
    ) -> Pending:
        staged = self._borrow_like(full)
        pending = self._host.gather(staged.tensor[0], shard.to("cpu", full.dtype), intervals, label)

        def finish() -> None:
            full.copy_(staged.tensor[0])
            staged.give_back()

        return pending.then(finish)

    def reduce(
        self,
        full: torch.Tensor,
        intervals: ShardIntervals,
        label: str,
        deliver: Callable[[torch.Tensor], None],
    ) -> Pending:
        staged = self._borrow_like(full)
        staged.tensor[0].copy_(full)

        def arrived(rows: torch.Tensor) -> None:
            deliver(rows.to(self.device))

        return self._host.reduce(staged.tensor[0], intervals, label, arrived).then(staged.give_back)

    def expect_reduce(self, full: torch.Tensor, intervals: ShardIntervals) -> None:
        staged = self._borrow_like(full)
        self._host.expect_reduce(staged.tensor[0], intervals)
        staged.give_back()

    def start_all_reduce(self, value: torch.Tensor, label: str, *, flags: bool = False) -> Pending:
        staged = value.to("cpu", copy=True)
        pending = self._host.start_all_reduce(staged, label, flags=flags)
        return pending.then(lambda: _copy_from_host(value, staged))

    def exchange(
        self, row: torch.Tensor, label: str, *, into: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Pending]:
        table = row.new_empty(self.world, row.numel()) if into is None else into
        staged, pending = self._host.exchange(row.cpu(), label)
        return table, pending.then(lambda: _copy_from_host(table, staged))

    def exchange_parts(
        self,
        sent: torch.Tensor,
        send_splits: Sequence[int],
        receive_splits: Sequence[int],
        label: str,
        *,
        into: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Pending]:
        received = sent.new_empty(sum(receive_splits)) if into is None else into
        staged, pending = self._host.exchange_parts(sent.cpu(), send_splits, receive_splits, label)
        return received, pending.then(lambda: _copy_from_host(received, staged))

    def pass_on(self, value: torch.Tensor, source: int, label: str) -> Pending:
        if self.rank == source:
            return self._host.pass_on(value.cpu(), source, label)
        staged = torch.empty_like(value, device="cpu")
        return self._host.pass_on(staged, source, label).then(
            lambda: _copy_from_host(value, staged)
        )

    def broadcast(self, value: torch.Tensor, source: int, label: str) -> None:
        staged = value.to("cpu", copy=True)
        self._host.broadcast(staged, source, label)
        _copy_from_host(value, staged)

    def _borrow_like(self, full: torch.Tensor) -> PooledTensor:
        return self._host.borrow("staged", torch.empty(0, dtype=full.dtype), 1, full.numel())


def _copy_from_host(value: torch.Tensor, staged: torch.Tensor) -> None:
    value.copy_(staged)
