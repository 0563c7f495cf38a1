"""Who keeps what of the state: a ZeRO stage, shares, and the ranks that divide and that repeat it.

Stage 0 repeats everything on every rank. Stage 1 divides the optimizer's state and the fp32
parameters beside a narrower copy, 2 the gradients too, 3 the parameters too. With hierarchical
sharding the ranks of each host divide the whole between them, and every host repeats it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch

from gpumix.engine.comm import Borrowed, Communicator, Pending
from gpumix.spec.cut import Intervals, cut
from gpumix.spec.plan import Plan, ZeroStage
from gpumix.spec.stage import Worker

if TYPE_CHECKING:
    from gpumix.engine.units import Slot

Kind = Literal["divided", "whole", "summed"]


@dataclass(frozen=True)
class Division:
    """How the flat buffers of a plan are divided, as one rank sees it.

    Attributes:
        shares: of the ranks of `comm`, in their order.
        comm: the ranks that divide the state between them; all ranks at stage 0, where each has it.
        ranks: of the world, in the order of `comm`, that divide the state; this one at stage 0.
        copies: what joins the hosts, where each of them has all of the state.
        first: whether this rank's part is the first of its copies, which stands for all of them.
        on_host: whether this rank keeps its part of masters and optimizer state on the host.
        team: the ranks that compute the units together with this one.
        repeats: so many ranks of `comm` come to each gradient, all of them to the same.
        part, parts: which part of units it is of, and of how many.
        others: of the other parts that this rank has.
        undivided: of parameters that no team divides, where teams differ in size: all ranks of all
            teams divide these.
    """

    zero_stage: ZeroStage
    shares: tuple[float, ...]
    comm: Communicator
    ranks: tuple[int, ...] = ()
    copies: Copies | None = None
    first: bool = True
    on_host: bool = False
    team: Communicator | None = None
    repeats: int = 1
    part: int = 0
    parts: int = 1
    others: tuple[Division, ...] = ()
    undivided: Division | None = None

    def kind_of(self, slot: Slot) -> Kind:
        """With which other parameters one is divided."""
        if self.undivided is None or slot.divided:
            return "divided"
        return "summed" if slot.summed else "whole"

    def by_kind(self, kind: Kind) -> tuple[Division, ...]:
        """How parameters of a kind are divided: of each part that this rank has."""
        if self.undivided is None or kind == "divided":
            return (self, *self.others)
        # Of these each rank of a team has a part of the gradient.
        return (replace(self.undivided, repeats=1) if kind == "summed" else self.undivided,)

    @property
    def whole_parameters(self) -> bool:
        return self.zero_stage < 3

    @property
    def whole_gradients(self) -> bool:
        return self.zero_stage < 2

    @property
    def replicated(self) -> bool:
        """Nothing is divided."""
        return self.zero_stage == 0

    @property
    def copy(self) -> tuple[int, int]:
        """Of so many ranks that have the same and take turns in standing for all of them, the
        number of this one; that of the copies of other hosts is none of these."""
        if self.replicated:
            return self.comm.rank, self.comm.world
        return 0 if self.first else 1, 1

    def intervals(self, numel: int) -> Intervals:
        """Each rank's interval of a flat buffer of `numel` elements: one value for all buffers of
        this length, since it has a number for each rank."""
        if numel not in self._intervals:
            self._intervals[numel] = Intervals(cut(numel, self.shares))
        return self._intervals[numel]

    @cached_property
    def _intervals(self) -> dict[int, Intervals]:
        return {}

    def interval(self, numel: int) -> tuple[int, int]:
        """The begin and the end of this rank's interval of a flat buffer."""
        if self.replicated:
            return 0, numel
        return self.intervals(numel).of(self.comm.rank)

    def by(self, plan: Plan) -> Division:
        """The same with the shares of a plan that has no others than this one's."""
        return replace(self, shares=plan.stages[0].shares)

    @classmethod
    def of_stage(
        cls, plan: Plan, comm: Communicator, stage: int, team: Communicator | None
    ) -> Division | None:
        """Of what one stage divides between its workers; None where this rank is none of them.
        Collective: it makes process groups."""
        parts, zero_stage = plan.stages[stage].tensor, plan.zero_stage
        together = team if team is not None and team.world > 1 else None
        of_parts = []
        for part in range(parts):
            shares, more = plan.shares_among([stage], part), {"team": together, "part": part}
            of_parts.append(cls._among(plan, comm, shares, zero_stage, parts=parts, **more))
        undivided = None
        if plan.stages[stage].unlike_teams:
            repeats = team.world if team is not None else 1
            shares = plan.shares_among([stage])
            undivided = cls._among(plan, comm, shares, zero_stage, repeats=repeats)
        own = [division for division in of_parts if division is not None]
        return replace(own[0], others=tuple(own[1:]), undivided=undivided) if own else None

    @classmethod
    def of_stages(cls, plan: Plan, comm: Communicator, stages: Sequence[int]) -> Division | None:
        """Of what several stages divide between them; see `of_stage`."""
        own = [number for number in plan.stages_of(comm.rank) if number in stages]
        repeats = [len(plan.team_of(comm.rank, number)) for number in own]
        # Ranks of several stages do not meet in the middle of a step.
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
    ) -> Division | None:
        own = comm.among(tuple(shares))
        if own is None:
            return None
        on_host = plan.workers[comm.rank].state_on == "host"
        first = zero_stage > 0 or own.rank == 0
        ranks, of_ranks = tuple(shares), tuple(shares.values())
        return cls(zero_stage, of_ranks, own, ranks, first=first, on_host=on_host, **more)

    @classmethod
    def of(cls, plan: Plan, comm: Communicator, team: Communicator | None = None) -> Division:
        """Of a plan of one stage on the ranks of `comm`. Collective: it makes process groups."""
        if team is not None:
            division = cls.of_stage(plan, comm, 0, team)
            assert division is not None, "every rank is a worker"
            return division
        workers = plan.workers
        on_host = workers[comm.rank].state_on == "host"
        if plan.zero_stage == 0 or plan.sharding == "all":
            first = plan.zero_stage > 0 or comm.rank == 0
            return cls(plan.zero_stage, plan.stages[0].shares, comm, first=first, on_host=on_host)
        hosts = ranks_by_host(workers)
        own = next(number for number, ranks in enumerate(hosts) if comm.rank in ranks)
        shares = [tuple(workers[rank].state_share for rank in ranks) for ranks in hosts]
        inside = comm.subgroup(hosts)
        copies = _copies(hosts, own, shares, comm)
        ranks = tuple(hosts[own])
        return cls(plan.zero_stage, shares[own], inside, ranks, copies, own == 0, on_host)


def ranks_by_host(workers: Sequence[Worker]) -> list[list[int]]:
    """Ranks of each host, hosts in the order of their first ranks."""
    hosts: dict[str, list[int]] = {}
    for rank, worker in enumerate(workers):
        hosts.setdefault(worker.host, []).append(rank)
    return list(hosts.values())


class Copies(ABC):
    """Sums over the hosts what each of them has summed for itself."""

    @abstractmethod
    def start_sum(self, part: torch.Tensor, numel: int, label: str) -> Pending:
        """Begin to sum this rank's interval `part` of a buffer of `numel` elements, in place. All
        copies get the same to the last bit."""

    @abstractmethod
    def expect_sum(self, part: torch.Tensor, numel: int) -> None:
        """`part` is the largest that will be summed: let all memory for it be there."""


@dataclass(frozen=True)
class _Likes(Copies):
    """All hosts cut alike: each rank meets its likes."""

    likes: Communicator

    def start_sum(self, part: torch.Tensor, numel: int, label: str) -> Pending:
        return self.likes.start_all_reduce(part, label)

    def expect_sum(self, part: torch.Tensor, numel: int) -> None:
        """It is summed in place."""


@dataclass(frozen=True)
class _Overlaps(Copies):
    """Ranks send each other what they have in common, and each sums in the order of the hosts."""

    hosts: list[list[int]]
    shares: list[tuple[float, ...]]  # by host
    own: int
    comm: Communicator

    def start_sum(self, part: torch.Tensor, numel: int, label: str) -> Pending:
        common = self._common(numel)
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

    def expect_sum(self, part: torch.Tensor, numel: int) -> None:
        common = sum(high - low for _, _, low, high in self._common(numel))
        for room in self._borrow(part, common):
            room.give_back()

    def _borrow(self, part: torch.Tensor, common: int) -> list[Borrowed]:
        """Memory for what is sent, for what arrives, and for the sum."""
        lengths = {"sent to hosts": common, "from hosts": common, "sum": part.numel()}
        return [self.comm.borrow(purpose, part, 1, n) for purpose, n in lengths.items()]

    def _common(self, numel: int) -> list[tuple[int, int, int, int]]:
        """In the order of ranks: a rank of another host, the host, and the elements of this rank's
        interval that it has too, counted from the interval's beginning."""
        cuts = [cut(numel, shares) for shares in self.shares]
        place = self.hosts[self.own].index(self.comm.rank)
        begin, end = cuts[self.own][place : place + 2]
        return sorted(
            (rank, host, max(begin, low) - begin, min(end, high) - begin)
            for host, ranks in enumerate(self.hosts)
            for rank, (low, high) in zip(ranks, pairwise(cuts[host]))
            if host != self.own and max(begin, low) < min(end, high)
        )


def _copies(
    hosts: list[list[int]], own: int, shares: list[tuple[float, ...]], comm: Communicator
) -> Copies | None:
    if len(hosts) == 1:
        return None
    if all(of_host == shares[0] for of_host in shares):
        return _Likes(comm.subgroup([list(ranks) for ranks in zip(*hosts)]))
    return _Overlaps(hosts, shares, own, comm)
