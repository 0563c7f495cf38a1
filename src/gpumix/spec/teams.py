"""Which devices may compute units together: those of one class on one host."""

from __future__ import annotations

from collections import Counter

from gpumix.spec.cluster import Cluster
from gpumix.spec.space import Space


def degrees_of(cluster: Cluster, space: Space) -> dict[str, tuple[int, ...]]:
    """Of each class the tensor parallel degrees above 1 that a space allows and its hosts have
    enough devices for."""
    there = Counter((device.host, device.device_class) for device in cluster.devices)
    most: dict[str, int] = {}
    for (_, name), count in there.items():
        most[name] = max(count, most.get(name, 0))
    return {
        name: tuple(sorted(degree for degree in set(space.tensor) if 1 < degree <= count))
        for name, count in most.items()
    }
