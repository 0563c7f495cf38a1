"""What each class of a cluster is worth: the same search without it, and with more of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import ceil

from gpumix.planner.base import PlanRequest, ranked_devices
from gpumix.planner.optimal import least_step_s
from gpumix.spec.cluster import Device
from gpumix.spec.profile import Profile
from gpumix.spec.reasons import Worth

ONE_IN = 64  # devices: what a single one adds to more than these is lost in the search's own gap


def worths(profile: Profile, request: PlanRequest, step_s: float) -> tuple[Worth, ...]:
    """The worth of each class, by name, to the optimal plan, whose step takes `step_s`."""
    devices = ranked_devices(profile, request)
    return tuple(
        Worth(
            device_class=name,
            whole=_whole(profile, request, devices, name, step_s),
            one_more=_one_more(profile, request, devices, name, step_s),
        )
        for name in sorted({d.device_class for d in devices})
    )


def _whole(
    profile: Profile, request: PlanRequest, devices: tuple[Device, ...], name: str, step_s: float
) -> float | None:
    rest = tuple(d.id for d in devices if d.device_class != name)
    if not rest:
        return None
    without = least_step_s(profile, request.model_copy(update={"devices": rest}))
    return None if without is None else without / step_s - 1.0


def _one_more(
    profile: Profile, request: PlanRequest, devices: tuple[Device, ...], name: str, step_s: float
) -> float:
    """In a large cluster the mean over several more."""
    new = tuple(_more(devices, name, ceil(len(devices) / ONE_IN)))
    cluster = profile.cluster.model_copy(update={"devices": (*devices, *new)})
    larger = profile.model_copy(update={"cluster": cluster})
    with_more = least_step_s(larger, request.model_copy(update={"devices": ()}))
    if with_more is None or with_more <= 0:
        return 0.0
    return max(0.0, step_s / with_more - 1.0) / len(new)


def _more(devices: tuple[Device, ...], name: str, count: int) -> Iterator[Device]:
    """One more beside those that there are, or more hosts like the first that has any."""
    on_host = Counter(d.host for d in devices if d.device_class == name)
    host, size = min(on_host.items())
    new = [host] if count == 1 else [f"new-host-{k}" for k in range(ceil(count / size))]
    for host in new:
        for ordinal in range(1 if count == 1 else size):
            yield Device(id=f"new {host} {ordinal}", device_class=name, host=host, ordinal=ordinal)
