"""Memory of a CPU process, counted and capped like a device's."""

from gpumix.hardware.memory_limit.limit import (
    MemoryLimit,
    count_as_host_memory,
    is_fragmented,
    is_out_of_memory,
    limit_memory,
)

__all__ = [
    "MemoryLimit",
    "count_as_host_memory",
    "is_fragmented",
    "is_out_of_memory",
    "limit_memory",
]
