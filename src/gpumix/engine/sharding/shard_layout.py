"""Shard layout of the state: ZeRO stage, shares, and groups that shard or replicate.

Stage 0 replicates everything on every rank. Stage 1 shards the optimizer state and the fp32 master
parameters of a narrower copy, stage 2 also gradients, stage 3 also parameters. With hierarchical
sharding the ranks of each host shard the full state, and every host replicates it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch

from gpumix.engine.comm.communicator import Communicator, Pending, PooledTensor
from gpumix.engine.comm.parameter_pool import ParameterPool
from gpumix.schema.plan.plan import Plan, ZeroStage
from gpumix.schema.plan.splitting import ShardIntervals, cut_parameters
from gpumix.schema.plan.stage import Worker

if TYPE_CHECKING:
    from gpumix.engine.sharding.unit_discovery import ParameterSlot

Kind = Literal["divided", "whole", "summed"]


@dataclass(frozen=True)
class ShardLayout:
    """Shard layout of a plan's flat buffers, as seen by a rank.

    Attributes:
        shares: of the ranks of `comm`, in their order.
        comm: the ranks that shard the state; all ranks at stage 0, which replicates it.
        ranks: world ranks that shard the state, in the order of `comm`; this rank at stage 0.
        copies: sums over hosts, if each host has the full state.
        first: whether this rank's part is the first of its copies, which represents all.
        on_host: whether this rank keeps its part of masters and optimizer state on the host.
        pool: memory of the host with one copy of all parameters, instead of gathers and reductions
            between devices.
        tp_group: the tensor-parallel group of this rank.
        repeats: number of ranks of `comm` that compute each gradient identically.
        part, parts: index of this rank's tensor-parallel part of units, and number of parts.
        others: layouts of other parts on this rank.
        undivided: for parameters that are not divided, where tensor-parallel groups differ in size:
            all ranks of all groups divide these.
        multiple: cuts are at multiples of so many elements of a parameter.
    """

    zero_stage: ZeroStage
    shares: tuple[float, ...]
    comm: Communicator
    ranks: tuple[int, ...] = ()
    copies: HostSums | None = None
    first: bool = True
    on_host: bool = False
    pool: ParameterPool | None = None
    tp_group: Communicator | None = None
    repeats: int = 1
    part: int = 0
    parts: int = 1
    others: tuple[ShardLayout, ...] = ()
    undivided: ShardLayout | None = None
    multiple: int = 1

    def kind_of(self, slot: ParameterSlot) -> Kind:
        """Return the kind of a parameter; parameters of a kind are divided together."""
        if self.undivided is None or slot.divided:
            return "divided"
        return "summed" if slot.summed else "whole"

    def select_layouts(self, kind: Kind) -> tuple[ShardLayout, ...]:
        """Return the layouts of parameters of a kind, for each part on this rank."""
        if self.undivided is None or kind == "divided":
            return (self, *self.others)
        # Each rank of a tensor-parallel group has a part of the gradient.
        return (replace(self.undivided, repeats=1) if kind == "summed" else self.undivided,)

    @cached_property
    def whole_parameters(self) -> bool:
        return self.zero_stage < 3

    @cached_property
    def whole_gradients(self) -> bool:
        return self.zero_stage < 2

    @cached_property
    def replicated(self) -> bool:
        """Nothing is sharded."""
        return self.zero_stage == 0

    @property
    def copy(self) -> tuple[int, int]:
        """Index of this rank among ranks with equal state that take turns, and number of ranks.
        Copies on hosts other than the first have index 1 of 1, and no turn."""
        if self.replicated:
            return self.comm.rank, self.comm.world
        return 0 if self.first else 1, 1

    def intervals(self, numels: Sequence[int]) -> ShardIntervals:
        """Return each rank's interval of a flat buffer of parameters. Buffers that are cut alike
        share one value, because it has a number for each rank."""
        key = tuple(numels) if self.multiple > 1 else (sum(numels),)
        if key not in self._intervals:
            offsets = cut_parameters(key, self.shares, self.multiple)
            self._intervals[key] = ShardIntervals(offsets)
        return self._intervals[key]

    @cached_property
    def _intervals(self) -> dict[tuple[int, ...], ShardIntervals]:
        return {}

    def interval(self, numels: Sequence[int]) -> tuple[int, int]:
        """Return begin and end of this rank's interval of a flat buffer."""
        if self.replicated:
            return 0, sum(numels)
        return self.intervals(numels).of(self.comm.rank)

    def with_shares_of(self, plan: Plan) -> ShardLayout:
        """Return the layout with the shares of a plan that differs in shares only."""
        return replace(self, shares=plan.stages[0].shares)

    @classmethod
    def of_stage(
        cls, plan: Plan, comm: Communicator, stage: int, tp_group: Communicator | None
    ) -> ShardLayout | None:
        """Make the layout of a stage among its workers; None if this rank is not a worker.
        Collective: creates process groups."""
        parts, zero_stage = plan.stages[stage].tensor, plan.zero_stage
        together = tp_group if tp_group is not None and tp_group.world > 1 else None
        of_parts = []
        for part in range(parts):
            shares, more = plan.shares_among([stage], part), {"tp_group": together, "part": part}
            of_parts.append(cls._among(plan, comm, shares, zero_stage, parts=parts, **more))
        undivided = None
        if plan.stages[stage].has_mixed_degrees:
            repeats = tp_group.world if tp_group is not None else 1
            shares = plan.shares_among([stage])
            undivided = cls._among(plan, comm, shares, zero_stage, repeats=repeats)
        own = [layout for layout in of_parts if layout is not None]
        return replace(own[0], others=tuple(own[1:]), undivided=undivided) if own else None

    @classmethod
    def of_stages(cls, plan: Plan, comm: Communicator, stages: Sequence[int]) -> ShardLayout | None:
        """Make the layout of several stages' common state; see `of_stage`."""
        own = [number for number in plan.stages_of(comm.rank) if number in stages]
        repeats = [len(plan.get_tp_group(comm.rank, number)) for number in own]
        # Ranks of several stages do not synchronize in the middle of a step.
        zero_stage = min(plan.zero_stage, 1)
        return cls._among(
            plan, comm, plan.shares_among(stages), zero_stage, repeats=max(repeats, default=1)
        )

    @classmethod
    def _among(
        cls,
        plan: Plan,
        comm: Communicator,
        shares: Mapping[int, float],
        zero_stage: ZeroStage,
        **more: Any,
    ) -> ShardLayout | None:
        own = comm.among(tuple(shares))
        if own is None:
            return None
        on_host = plan.workers[comm.rank].state_on == "host"
        first = zero_stage > 0 or own.rank == 0
        ranks, of_ranks = tuple(shares), tuple(shares.values())
        more["multiple"] = plan.cut_multiple
        return cls(zero_stage, of_ranks, own, ranks, first=first, on_host=on_host, **more)

    @classmethod
    def of(
        cls, plan: Plan, comm: Communicator, tp_group: Communicator | None = None
    ) -> ShardLayout:
        """Make the layout of a plan of one stage on the ranks of `comm`. Collective: creates
        process groups."""
        if tp_group is not None:
            layout = cls.of_stage(plan, comm, 0, tp_group)
            assert layout is not None, "every rank is a worker"
            return layout
        workers, multiple = plan.workers, plan.cut_multiple
        on_host = workers[comm.rank].state_on == "host"
        if plan.zero_stage == 0 or plan.sharding == "all":
            return cls(
                plan.zero_stage,
                plan.stages[0].shares,
                comm,
                first=plan.zero_stage > 0 or comm.rank == 0,
                on_host=on_host,
                pool=ParameterPool(comm) if plan.parameters_on == "host" else None,
                multiple=multiple,
            )
        hosts = ranks_by_host(workers)
        own = next(number for number, ranks in enumerate(hosts) if comm.rank in ranks)
        by_host = [tuple(workers[rank].state_share for rank in ranks) for ranks in hosts]
        inside = comm.subgroup(hosts)
        return cls(
            plan.zero_stage,
            by_host[own],
            inside,
            tuple(hosts[own]),
            _make_host_sums(hosts, own, by_host, comm, multiple),
            first=own == 0,
            on_host=on_host,
            pool=ParameterPool(inside) if plan.parameters_on == "host" else None,
            multiple=multiple,
        )


def ranks_by_host(workers: Sequence[Worker]) -> list[list[int]]:
    """Return the ranks of each host; hosts are in the order of their first ranks."""
    hosts: dict[str, list[int]] = {}
    for rank, worker in enumerate(workers):
        hosts.setdefault(worker.host, []).append(rank)
    return list(hosts.values())


class HostSums(ABC):
    """Sums over hosts of the sums within each host."""

    @abstractmethod
    def start_sum(self, part: torch.Tensor, numels: Sequence[int], label: str) -> Pending:
        """Start to sum this rank's interval `part` of a buffer of parameters in place. All
        copies get bitwise equal results."""

    @abstractmethod
    def expect_sum(self, part: torch.Tensor, numels: Sequence[int]) -> None:
        """Allocate all memory to sum `part`, the largest interval."""


@dataclass(frozen=True)
class _EqualHostSums(HostSums):
    """Copies cut equally on all hosts: ranks with equal intervals all-reduce."""

    likes: Communicator

    def start_sum(self, part: torch.Tensor, numels: Sequence[int], label: str) -> Pending:
        return self.likes.start_all_reduce(part, label)

    def expect_sum(self, part: torch.Tensor, numels: Sequence[int]) -> None:
        """Do nothing, because sums are in place."""


@dataclass(frozen=True)
class _OverlappingHostSums(HostSums):
    """Copies cut unequally: ranks exchange overlaps, and each rank sums in the order of hosts."""

    hosts: list[list[int]]
    shares: list[tuple[float, ...]]  # by host
    own: int
    comm: Communicator
    multiple: int

    def start_sum(self, part: torch.Tensor, numels: Sequence[int], label: str) -> Pending:
        common = self._find_overlaps(numels)
        sizes = [0] * self.comm.world
        for rank, _, low, high in common:
            sizes[rank] = high - low
        rooms = self._borrow(part, sum(sizes))
        sent, received, total = (room.tensor[0] for room in rooms)
        if common:
            torch.cat([part[low:high] for _, _, low, high in common], out=sent)
        _, pending = self.comm.exchange_parts(sent, sizes, sizes, label, into=received)

        def finish() -> None:
            pieces = received.split([high - low for _, _, low, high in common])
            terms = [(host, low, high, p) for p, (_, host, low, high) in zip(pieces, common)]
            terms.append((self.own, 0, part.numel(), part))
            total.zero_()
            for _, low, high, piece in sorted(terms, key=lambda term: term[:2]):
                total[low:high] += piece
            part.copy_(total)
            for room in rooms:
                room.give_back()

        return pending.then(finish)

    def expect_sum(self, part: torch.Tensor, numels: Sequence[int]) -> None:
        common = sum(high - low for _, _, low, high in self._find_overlaps(numels))
        for room in self._borrow(part, common):
            room.give_back()

    def _borrow(self, part: torch.Tensor, common: int) -> list[PooledTensor]:
        """Borrow memory for sent data, received data and the sum."""
        lengths = {"sent to hosts": common, "from hosts": common, "sum": part.numel()}
        return [self.comm.borrow(purpose, part, 1, n) for purpose, n in lengths.items()]

    def _find_overlaps(self, numels: Sequence[int]) -> list[tuple[int, int, int, int]]:
        """Return overlaps with ranks of other hosts, in the order of ranks: rank, host, begin and
        end relative to this rank's interval."""
        cuts = [cut_parameters(numels, shares, self.multiple) for shares in self.shares]
        place = self.hosts[self.own].index(self.comm.rank)
        begin, end = cuts[self.own][place : place + 2]
        return sorted(
            (rank, host, max(begin, low) - begin, min(end, high) - begin)
            for host, ranks in enumerate(self.hosts)
            for rank, (low, high) in zip(ranks, pairwise(cuts[host]))
            if host != self.own and max(begin, low) < min(end, high)
        )


def _make_host_sums(
    hosts: list[list[int]],
    own: int,
    shares: list[tuple[float, ...]],
    comm: Communicator,
    multiple: int,
) -> HostSums | None:
    if len(hosts) == 1:
        return None
    if all(of_host == shares[0] for of_host in shares):
        return _EqualHostSums(comm.subgroup([list(ranks) for ranks in zip(*hosts)]))
    return _OverlappingHostSums(hosts, shares, own, comm, multiple)
