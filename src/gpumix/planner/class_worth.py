"""The worth of each class of a cluster: the search without the class, and with more of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from gpumix.planner.common.strategy import PlanRequest, get_prediction, list_devices_by_rank
from gpumix.planner.data_parallel.class_options import TimeBounds
from gpumix.planner.data_parallel.search import compute_least_step_s
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.explanation import ClassWorth
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile

FEW_CLASSES = 3
DEVICES_PER_ADDED_DEVICE = (
    64  # devices: beyond, the gain of a single device is lost in the search's own gap
)


@dataclass(frozen=True)
class ClassWorths:
    """The worth of classes to a cluster with the optimal plan `best`.

    `alone` returns the optimal plan of one stage on a class alone, if it was found before. With
    many devices or classes, plans with the ZeRO stage and the sharding of the best are tried
    first; all others only if none of these fits.
    """

    profile: Profile
    request: PlanRequest
    best: Plan
    paces: TimeBounds
    alone: Callable[[str], Plan | None] | None = None

    def all(self) -> tuple[ClassWorth, ...]:
        """Return the worth of each class, by name."""
        names = sorted({d.device_class for d in self._devices})
        return tuple(
            ClassWorth(
                device_class=name,
                whole=self._whole(name),
                one_more=self._compute_addition_gain(name),
            )
            for name in names
        )

    @property
    def _step_s(self) -> float:
        return get_prediction(self.best).step_s

    @cached_property
    def _first_space(self) -> Space:
        """The space of plans tried first."""
        space, best = self.request.space, self.best
        classes = {d.device_class for d in self._devices}
        if len(self._devices) <= DEVICES_PER_ADDED_DEVICE and len(classes) <= FEW_CLASSES:
            return space
        like = {"zero_stages": (best.zero_stage,), "shardings": (best.sharding,)}
        return space.model_copy(update=like)

    @cached_property
    def _devices(self) -> tuple[Device, ...]:
        return list_devices_by_rank(self.profile, self.request)

    def _whole(self, name: str) -> float | None:
        rest = tuple(d.id for d in self._devices if d.device_class != name)
        if not rest:
            return None
        if all(worker.device_class != name for worker in self.best.workers):
            return 0.0
        others = {d.device_class for d in self._devices} - {name}
        if len(others) == 1 and self.alone is not None:
            found = self.alone(others.pop())
            return None if found is None else get_prediction(found).step_s / self._step_s - 1.0
        for space in dict.fromkeys((self._first_space, self.request.space)):
            request = self.request.model_copy(update={"devices": rest, "space": space})
            without_s = compute_least_step_s(self.profile, request, self.paces)
            if without_s is not None:
                return without_s / self._step_s - 1.0
        return None

    def _compute_addition_gain(self, name: str) -> float:
        """Return the gain of one more device; in a large cluster the mean over several more."""
        new = tuple(
            _make_new_devices(
                self._devices, name, ceil(len(self._devices) / DEVICES_PER_ADDED_DEVICE)
            )
        )
        devices = (*self._devices, *new)
        cluster = self.profile.cluster.model_copy(update={"devices": devices})
        larger = self.profile.model_copy(update={"cluster": cluster})
        request = self.request.model_copy(update={"devices": (), "space": self._first_space})
        # New devices may stay idle, so only faster plans count.
        with_more_s = compute_least_step_s(larger, request, self.paces, below_s=self._step_s)
        if with_more_s is None or with_more_s <= 0:
            return 0.0
        return max(0.0, self._step_s / with_more_s - 1.0) / len(new)


def _make_new_devices(devices: tuple[Device, ...], name: str, count: int) -> Iterator[Device]:
    """Yield another device on a host of the class, or more hosts like the first host of the class;
    if all devices are on one host, new devices are as well."""
    on_host = Counter(d.host for d in devices if d.device_class == name)
    host, size = min(on_host.items())
    there = count == 1 or len({d.host for d in devices}) == 1
    new = [(host, count)] if there else [(f"new-host-{k}", size) for k in range(ceil(count / size))]
    for host, number in new:
        for ordinal in range(number):
            yield Device(id=f"new {host} {ordinal}", device_class=name, host=host, ordinal=ordinal)
