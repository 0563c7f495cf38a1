"""What each class of a cluster is worth: the same search without it, and with more of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from gpumix.planner.base import PlanRequest, ranked_devices
from gpumix.planner.optimal import least_step_s
from gpumix.planner.options import Paces
from gpumix.spec.cluster import Device
from gpumix.spec.profile import Profile
from gpumix.spec.reasons import Worth

ONE_IN = 64  # devices: what a single one adds to more than these is lost in the search's own gap


@dataclass(frozen=True)
class Cluster:
    """The cluster that classes are worth something to: its optimal plan takes `step_s`."""

    profile: Profile
    request: PlanRequest
    step_s: float
    paces: Paces

    def worths(self) -> tuple[Worth, ...]:
        """The worth of each class, by name."""
        names = sorted({d.device_class for d in self._devices})
        return tuple(
            Worth(device_class=name, whole=self._whole(name), one_more=self._one_more(name))
            for name in names
        )

    @cached_property
    def _devices(self) -> tuple[Device, ...]:
        return ranked_devices(self.profile, self.request)

    def _whole(self, name: str) -> float | None:
        rest = tuple(d.id for d in self._devices if d.device_class != name)
        if not rest:
            return None
        request = self.request.model_copy(update={"devices": rest})
        without_s = least_step_s(self.profile, request, self.paces)
        return None if without_s is None else without_s / self.step_s - 1.0

    def _one_more(self, name: str) -> float:
        """In a large cluster the mean over several more."""
        new = tuple(_more(self._devices, name, ceil(len(self._devices) / ONE_IN)))
        devices = (*self._devices, *new)
        cluster = self.profile.cluster.model_copy(update={"devices": devices})
        larger = self.profile.model_copy(update={"cluster": cluster})
        request = self.request.model_copy(update={"devices": ()})
        # It may as well stay idle, so only what is faster counts.
        with_more_s = least_step_s(larger, request, self.paces, below_s=self.step_s)
        if with_more_s is None or with_more_s <= 0:
            return 0.0
        return max(0.0, self.step_s / with_more_s - 1.0) / len(new)


def _more(devices: tuple[Device, ...], name: str, count: int) -> Iterator[Device]:
    """One more beside those that there are, or more hosts like the first that has any."""
    on_host = Counter(d.host for d in devices if d.device_class == name)
    host, size = min(on_host.items())
    new = [host] if count == 1 else [f"new-host-{k}" for k in range(ceil(count / size))]
    for host in new:
        for ordinal in range(1 if count == 1 else size):
            yield Device(id=f"new {host} {ordinal}", device_class=name, host=host, ordinal=ordinal)
