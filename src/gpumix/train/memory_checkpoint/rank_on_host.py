"""Place of a rank among the hosts of a run, for copies in memory that ranks of a host share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankOnHost:
    """A rank, and the hosts of all ranks.

    Attributes:
        hosts: name of each rank's host, by rank.
    """

    rank: int
    hosts: Sequence[str]

    @property
    def world(self) -> int:
        return len(self.hosts)

    @property
    def ranks_here(self) -> int:
        """Number of ranks sharing the memory of this rank's host."""
        return self.hosts.count(self.hosts[self.rank])

    @property
    def is_first_here(self) -> bool:
        """True for the first rank of each host, which acts for all ranks of the host."""
        return self.hosts.index(self.hosts[self.rank]) == self.rank

    @property
    def has_other_hosts(self) -> bool:
        return self.ranks_here < self.world
