"""In which manners a group may run its stage: in teams of how many, and in which mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from gpumix.cost.time import can, chunks_cost_nothing
from gpumix.planner.no_stages import Refusal
from gpumix.spec.cluster import Device
from gpumix.spec.islands import Near, near
from gpumix.spec.plan import Schedule
from gpumix.spec.profile import Profile
from gpumix.spec.space import Space
from gpumix.spec.stage import Head, Mode


class Kind(NamedTuple):
    """What a group is made of: of each of its hosts, how many devices it has of each class, those
    of each island apart; and how near they are to each other."""

    hosts: tuple[tuple[tuple[str, int], ...], ...]
    near: Near = "all"


Teams = tuple[tuple[str, int], ...]
"""By class, how many workers of a stage are, or are led by, devices of it."""


class Team(NamedTuple):
    """How many devices compute units together, and whether they divide positions too."""

    degree: int
    sequence: bool = False


ALONE = Team(1)
MEASURE = "allow more `techniques`, or profile again: `gpumix profile JOB.yaml --fresh`"


def teams_of_space(space: Space) -> list[Team]:
    """What teams a space has, small ones first."""
    degrees, sequence = sorted(set(space.tensor)), sorted(set(space.sequence))
    of_several = product((degree for degree in degrees if degree > 1), sequence)
    return [*([ALONE] if 1 in degrees else []), *(Team(*team) for team in of_several)]


def measured_teams(profile: Profile) -> set[Team]:
    """Those of which it is known how fast they are, and what their calls need of each other."""
    return {Team(team.degree, team.sequence) for team in profile.teams if team.model.needs}


@dataclass(frozen=True)
class Manner:
    """Devices compute in such teams, in this mode."""

    team: Team
    mode: Mode


def kind_of(group: Sequence[Device]) -> Kind:
    """Groups of one kind do the same in the same time, but for where the next one is."""
    hosts: dict[str, Counter[tuple[str, str]]] = {}
    for device in group:
        hosts.setdefault(device.host, Counter())[device.device_class, device.island] += 1
    counts = ([(name, n) for (name, _), n in count.items()] for count in hosts.values())
    return Kind(tuple(sorted(tuple(sorted(of_host)) for of_host in counts)), near(group))


def teams_of(kind: Kind, degree: int) -> Teams:
    """A group's teams of so many; all of its devices are in one."""
    found: Counter[str] = Counter()
    for host in kind.hosts:
        for name, count in host:
            found[name] += count // degree
    return tuple(sorted(found.items()))


class Manners:
    """Those of a space, as far as they were measured.

    Args:
        profiles: of what ranks of a team compute.
    """

    def __init__(self, profiles: Mapping[Team, Profile], space: Space) -> None:
        wanted = teams_of_space(space)
        self._profiles = {team: profiles[team] for team in wanted if team in profiles}
        self._space = space
        self.of = lru_cache(maxsize=None)(self._of)

    def largest(self, kind: Kind, team: Team) -> float:
        """The largest micro-batch that such teams of a group run; infinite if nothing limits it."""
        classes = (self._profiles[team].of_class(name) for name in _classes(kind))
        limits = (of_class.largest_micro_batch for of_class in classes)
        return min((limit for limit in limits if limit is not None), default=float("inf"))

    def of_class(
        self, name: str, schedule: Schedule = "1f1b", *, last: bool = False
    ) -> list[Manner]:
        """All that devices of a class may do in groups of their own."""
        return [
            Manner(team, mode)
            for team in self._teams_of([name])
            for mode in self._modes(self._profiles[team], [name], schedule, last=last)
        ]

    def largest_of_class(self, name: str) -> float:
        """The largest micro-batch that devices of a class run in any of them."""
        return max(
            self.largest(Kind((((name, 1),),)), manner.team) for manner in self.of_class(name)
        )

    def lacking(self, names: Iterable[str], schedule: Schedule) -> Refusal | None:
        """Why devices of these classes cannot have stages by this schedule; None if they can."""
        there = sorted(names)
        if schedule == "zero-bubble" and False not in self._space.recompute:
            return Refusal(
                "it splits the backward of graphs that are kept, and `recompute: true` keeps none",
                "allow `techniques: {recompute: [true, false]}` or another of `schedules`",
            )
        for name in there:
            if not self.of_class(name):
                return Refusal(f"kept graphs were not measured on class '{name}'", MEASURE)
            if not self.of_class(name, schedule):
                what = f"the two parts of a split backward were not measured on class '{name}'"
                return Refusal(what, MEASURE)
        if not any(self.of_class(name, schedule, last=True) for name in there):
            classes = " or ".join(map(repr, there))
            return Refusal(f"a head in chunks was not measured on class {classes}", MEASURE)
        return None

    def smallest_team(self) -> int:
        """Of how many devices the smallest teams are."""
        return min((team.degree for team in self._profiles), default=1)

    def can_team_up(self, kind: Kind) -> bool:
        """Whether all devices of a group can be in teams of one size."""
        return any(
            all(count % team.degree == 0 for host in kind.hosts for _, count in host)
            for team in self._teams_of(_classes(kind))
        )

    def _of(self, kind: Kind, schedule: Schedule, *, last: bool) -> tuple[Manner, ...]:
        """Of a group of this kind, of which the first ones ask for least."""
        found, names = [], _classes(kind)
        for team in self._teams_of(names):
            if any(count % team.degree for host in kind.hosts for _, count in host):
                continue
            modes = self._modes(self._profiles[team], names, schedule, last=last)
            found += [Manner(team, mode) for mode in modes]
        return tuple(found)

    def _teams_of(self, names: Collection[str]) -> list[Team]:
        """Teams that were measured of all these classes, small ones first."""
        known = {
            team: {c.device_class for c in profile.classes}
            for team, profile in self._profiles.items()
        }
        return sorted(team for team, there in known.items() if there.issuperset(names))

    def _modes(
        self, profile: Profile, names: Sequence[str], schedule: Schedule, *, last: bool
    ) -> Iterator[Mode]:
        heads: list[Head] = self._heads(profile, names) if last else ["whole"]
        splits = schedule == "zero-bubble"
        if splits and not _may_split(profile, names):
            return
        for recompute in (True, False):
            if recompute not in self._space.recompute or (recompute and splits):
                continue
            for head in heads:
                mode = Mode(recompute=recompute, head=head)
                if all(can(profile, name, mode) for name in names):
                    yield mode

    def _heads(self, profile: Profile, names: Sequence[str]) -> list[Head]:
        chunks = "chunked" in self._space.heads and all(
            can(profile, name, Mode(head="chunked")) for name in names
        )
        if chunks and all(chunks_cost_nothing(profile, name) for name in names):
            return ["chunked"]
        chunked: list[Head] = ["chunked"] if chunks else []
        whole: list[Head] = ["whole"] if "whole" in self._space.heads else []
        return [*whole, *chunked]


def _classes(kind: Kind) -> list[str]:
    return sorted({name for host in kind.hosts for name, _ in host})


def _may_split(profile: Profile, names: Sequence[str]) -> bool:
    """Whether both parts of a backward in two parts were measured."""
    kinds = set(profile.model.kind_of_call)
    times = (profile.of_class(name).units[kind] for name in names for kind in kinds)
    return all(t.inputs and t.weights for t in times)
