"""Check of the memory of this host for reading weights, before anything is measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from gpumix.cost.loading_memory import count_fp32_bytes
from gpumix.engine.sharding.unit_discovery import (
    ModelUnits,
    ParameterSlot,
    count_frozen_bytes,
    count_packed_bytes,
)
from gpumix.hardware.host.environment import available_host_bytes
from gpumix.schema.cluster.cluster import Cluster
from gpumix.schema.errors import MachineError
from gpumix.schema.units import show_bytes


def check_loading_memory(anatomy: ModelUnits, cluster: Cluster) -> None:
    """Refuse a model whose blocks this host has no memory to read, in as many processes as the host
    with the fewest devices has; plans check what they need in full.

    Raises:
        MachineError: less is free.
    """
    parts = [unit.slots for unit in anatomy.units] + [[slot] for slot in anatomy.root.slots]
    loading = max(map(_count_loading_bytes, parts), default=0)
    processes = min(Counter(device.host for device in cluster.devices).values())
    free = available_host_bytes()
    if processes * loading > free:
        raise MachineError(
            f"reading weights takes {show_bytes(processes * loading)} of RAM, {show_bytes(free)} "
            "are free",
            code="host-memory-short",
            why=f"each of {processes} processes reads a block at a time, which takes "
            f"{show_bytes(loading)}; limits of a container or a job count too",
            fix="free memory, raise the limit of the container or job, or name fewer devices of "
            "this host in `cluster`",
        )


def _count_loading_bytes(slots: Sequence[ParameterSlot]) -> int:
    """Return `compute_loading_bytes` of a part of the model, computing in 16 bits."""
    trained = sum(slot.window.numel for slot in slots if slot.parameter.requires_grad)
    return count_fp32_bytes(
        trained, count_frozen_bytes(slots, torch.bfloat16), count_packed_bytes(slots)
    )
