"""Manners of running a stage: the tensor parallel degree and the mode of its devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from gpumix.cost.step_time import can_predict_mode, is_chunked_cross_entropy_free
from gpumix.planner.common.stage_preconditions import Refusal
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.cluster.link_islands import Near, find_smallest_place
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.plan import Schedule
from gpumix.schema.plan.stage import Head, Mode
from gpumix.schema.profile.profile import Profile


class GroupKind(NamedTuple):
    """The makeup of a group: devices by host and class, each island apart; and their nearness."""

    hosts: tuple[tuple[tuple[str, int], ...], ...]
    near: Near = "all"


WorkerCounts = tuple[tuple[str, int], ...]
"""By class, the number of a stage's workers, or of its tensor-parallel groups."""


class TensorParallelDegree(NamedTuple):
    """The number of devices computing units together; `sequence` divides positions as well."""

    degree: int
    sequence: bool = False


NO_TENSOR_PARALLEL = TensorParallelDegree(1)
MEASURE_FIX = "allow more `techniques`, or profile again: `gpumix profile JOB.yaml --fresh`"


def list_tp_degrees(space: Space) -> list[TensorParallelDegree]:
    """Return the tensor parallel degrees of a space, small ones first."""
    degrees = sorted(set(space.tensor_parallel_size))
    sequence = sorted(set(space.sequence_parallel))
    of_several = product((degree for degree in degrees if degree > 1), sequence)
    return [
        *([NO_TENSOR_PARALLEL] if 1 in degrees else []),
        *(TensorParallelDegree(*tp) for tp in of_several),
    ]


def get_measured_tp_degrees(profile: Profile) -> set[TensorParallelDegree]:
    """Return the tensor parallel degrees with known speed and known needs between calls."""
    return {
        TensorParallelDegree(tp_profile.degree, tp_profile.sequence)
        for tp_profile in profile.tp_profiles
        if tp_profile.model.needs
    }


@dataclass(frozen=True)
class StageMode:
    """The tensor parallel degree and the mode in which devices compute."""

    tp: TensorParallelDegree
    mode: Mode


def get_group_kind(group: Sequence[Device]) -> GroupKind:
    """Return the kind of a group. Groups of a kind do equal work in equal time, sends apart."""
    hosts: dict[str, Counter[tuple[str, str]]] = {}
    for device in group:
        hosts.setdefault(device.host, Counter())[device.device_class, device.island] += 1
    counts = ([(name, n) for (name, _), n in count.items()] for count in hosts.values())
    return GroupKind(
        tuple(sorted(tuple(sorted(of_host)) for of_host in counts)), find_smallest_place(group)
    )


def count_workers_by_class(kind: GroupKind, degree: int) -> WorkerCounts:
    """Count the tensor-parallel groups of `degree` by class; all devices of a stage are in one."""
    found: Counter[str] = Counter()
    for host in kind.hosts:
        for name, count in host:
            found[name] += count // degree
    return tuple(sorted(found.items()))


class StageModes:
    """The measured manners of a space.

    Args:
        profiles: by tensor parallel degree, of the work of a rank.
    """

    def __init__(self, profiles: Mapping[TensorParallelDegree, Profile], space: Space) -> None:
        wanted = list_tp_degrees(space)
        self._profiles = {tp: profiles[tp] for tp in wanted if tp in profiles}
        self._space = space
        self.of = lru_cache(maxsize=None)(self._of)
        self.largest = lru_cache(maxsize=None)(self._largest)

    def _largest(self, kind: GroupKind, tp: TensorParallelDegree) -> float:
        """Return the largest micro-batch of a kind of group at a degree; infinite if unlimited."""
        classes = (self._profiles[tp].of_class(name) for name in _classes(kind))
        limits = (of_class.largest_micro_batch for of_class in classes)
        return min((limit for limit in limits if limit is not None), default=float("inf"))

    def of_class(
        self, name: str, schedule: Schedule = "1f1b", *, last: bool = False
    ) -> list[StageMode]:
        """Return all manners of a class in groups of a single class."""
        return [
            StageMode(tp, mode)
            for tp in self._list_tp_degrees([name])
            for mode in self._modes(self._profiles[tp], [name], schedule, last=last)
        ]

    def largest_of_class(self, name: str) -> float:
        """Return the largest micro-batch of a class in any manner."""
        return max(
            self.largest(GroupKind((((name, 1),),)), manner.tp) for manner in self.of_class(name)
        )

    def find_refusal(self, names: Iterable[str], schedule: Schedule) -> Refusal | None:
        """Return the reason why classes cannot have stages by a schedule; None if possible."""
        there = sorted(names)
        if schedule == "zero-bubble" and False not in self._space.gradient_checkpointing:
            return Refusal(
                "it splits the backward of graphs that are kept, and "
                "`gradient_checkpointing: true` keeps none",
                "allow `techniques: {gradient_checkpointing: [true, false]}` or another of "
                "`pipeline_schedules`",
            )
        for name in there:
            if not self.of_class(name):
                return Refusal(f"kept graphs were not measured on class '{name}'", MEASURE_FIX)
            if not self.of_class(name, schedule):
                what = f"the two parts of a split backward were not measured on class '{name}'"
                return Refusal(what, MEASURE_FIX)
        if not any(self.of_class(name, schedule, last=True) for name in there):
            classes = " or ".join(map(repr, there))
            return Refusal(
                f"chunked cross-entropy was not measured on class {classes}", MEASURE_FIX
            )
        return None

    def get_smallest_tp_size(self) -> int:
        """Return the size of the smallest tensor-parallel groups."""
        return min((tp.degree for tp in self._profiles), default=1)

    def can_form_tp_groups(self, kind: GroupKind) -> bool:
        """Return True if tensor-parallel groups of a single size can take all of its devices."""
        return any(
            all(count % tp.degree == 0 for host in kind.hosts for _, count in host)
            for tp in self._list_tp_degrees(_classes(kind))
        )

    def _of(self, kind: GroupKind, schedule: Schedule, *, last: bool) -> tuple[StageMode, ...]:
        """Return the manners of a kind of group, the least demanding first."""
        found, names = [], _classes(kind)
        for tp in self._list_tp_degrees(names):
            if any(count % tp.degree for host in kind.hosts for _, count in host):
                continue
            modes = self._modes(self._profiles[tp], names, schedule, last=last)
            found += [StageMode(tp, mode) for mode in modes]
        return tuple(found)

    def _list_tp_degrees(self, names: Collection[str]) -> list[TensorParallelDegree]:
        """Return the tensor parallel degrees measured on all given classes, small ones first."""
        known = {
            tp: {c.device_class for c in profile.classes} for tp, profile in self._profiles.items()
        }
        return sorted(tp for tp, there in known.items() if there.issuperset(names))

    def _modes(
        self, profile: Profile, names: Sequence[str], schedule: Schedule, *, last: bool
    ) -> Iterator[Mode]:
        heads: list[Head] = self._heads(profile, names) if last else ["whole"]
        splits = schedule == "zero-bubble"
        if splits and not _may_split(profile, names):
            return
        for recompute in (True, False):
            if recompute not in self._space.gradient_checkpointing or (recompute and splits):
                continue
            for head in heads:
                mode = Mode(recompute=recompute, head=head)
                if all(can_predict_mode(profile, name, mode) for name in names):
                    yield mode

    def _heads(self, profile: Profile, names: Sequence[str]) -> list[Head]:
        chunks = "chunked" in self._space.cross_entropy and all(
            can_predict_mode(profile, name, Mode(head="chunked")) for name in names
        )
        if chunks and all(is_chunked_cross_entropy_free(profile, name) for name in names):
            return ["chunked"]
        chunked: list[Head] = ["chunked"] if chunks else []
        whole: list[Head] = ["whole"] if "whole" in self._space.cross_entropy else []
        return [*whole, *chunked]


def _classes(kind: GroupKind) -> list[str]:
    return sorted({name for host in kind.hosts for name, _ in host})


def _may_split(profile: Profile, names: Sequence[str]) -> bool:
    """Return True if both parts of a split backward were measured."""
    kinds = set(profile.model.kind_of_call)
    times = (profile.of_class(name).units[kind] for name in names for kind in kinds)
    return all(t.inputs and t.weights for t in times)
