"""Tensor-parallel groups of a cluster: devices sharing class, host and island."""

from __future__ import annotations

from collections import Counter

from gpumix.schema.cluster.cluster import Cluster
from gpumix.schema.errors import InputError
from gpumix.schema.job.search_space import Space


def get_allowed_degrees(cluster: Cluster, space: Space) -> dict[str, tuple[int, ...]]:
    """Return each class's tensor parallel degrees above 1 allowed by the space and by the number of
    devices per host."""
    return {
        name: tuple(
            sorted(degree for degree in set(space.tensor_parallel_size) if 1 < degree <= count)
        )
        for name, count in _count_most_per_host(cluster).items()
    }


def check_degrees_fit(cluster: Cluster, space: Space) -> None:
    """Raise InputError if the space requires larger tensor-parallel groups than any host allows."""
    if 1 in space.tensor_parallel_size or any(get_allowed_degrees(cluster, space).values()):
        return
    most = _count_most_per_host(cluster)
    there = ", ".join(f"{count} of class '{name}'" for name, count in most.items())
    largest = max(most.values())
    islands = any(device.island for device in cluster.devices)
    place, on = ("island", "in one island") if islands else ("host", "on one host")
    below = f"{largest} at most, or to 1" if largest > 1 else "1"
    raise InputError(
        f"no {place} has {min(space.tensor_parallel_size)} devices of one class for a "
        "tensor-parallel group",
        code="tensor-parallel-size-too-large",
        where="techniques.tensor_parallel_size",
        why=f"{on} there are at most {there}",
        fix=f"set `techniques: {{tensor_parallel_size: ...}}` to {below}",
    )


def _count_most_per_host(cluster: Cluster) -> dict[str, int]:
    """Return the largest number of devices on a host, or in an island, by class."""
    there = Counter((d.host, d.island, d.device_class) for d in cluster.devices)
    most: dict[str, int] = {}
    for (_, _, name), count in there.items():
        most[name] = max(count, most.get(name, 0))
    return most
