"""Host memory for reading initial weights from files, in each process.

A process reads a parameter, or its part of one, at a time, and quantises a matrix at a time. So no
more than the largest block passes through its memory, beyond what the plan keeps.
"""

from __future__ import annotations

from collections import Counter

from gpumix.schema.errors import LoadingMemoryError
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import (
    EndParameters,
    ModelProfile,
    Profile,
    RootParameter,
    UnitKind,
)
from gpumix.schema.units import show_bytes

FP32_BYTES = 4
# Of a frozen value in 16 bits, its fp32 copy; of a quantised one in 4 bits, the fp32 value.
FROZEN_TIMES, PACKED_TIMES = 2, 8


def compute_loading_bytes(model: ModelProfile) -> int:
    """Return the bytes that reading weights takes in a process, at most: the fp32 values of a
    block, or of a parameter outside of blocks."""
    root = model.root.parameters or (model.root.before, model.root.after)
    return max(map(_fp32_bytes, (*model.kinds, *root)))


def count_fp32_bytes(trainable: int, frozen_bytes: int, packed_bytes: int) -> int:
    """Return the bytes of fp32 values: of trained elements, and of frozen bytes, of which some are
    of quantised parameters."""
    floats = frozen_bytes - packed_bytes
    return FP32_BYTES * trainable + FROZEN_TIMES * floats + PACKED_TIMES * packed_bytes


def _fp32_bytes(part: UnitKind | RootParameter | EndParameters) -> int:
    return count_fp32_bytes(part.trainable, part.frozen_bytes, part.packed_bytes)


def find_room_on_host(profile: Profile, name: str) -> int | None:
    """Return the host memory that a device of class `name` may keep data in, while its process
    reads weights too; None for no limit."""
    of_host = profile.of_class(name).host_bytes
    return None if of_host is None else max(0, of_host - compute_loading_bytes(profile.model))


def check_room_for_loading(profile: Profile, plan: Plan) -> None:
    """Check that hosts have the memory that the plan's processes take until the first step.

    Hosts without a part for devices are not checked: theirs is the memory of the devices.

    Raises:
        LoadingMemoryError: a host has less.
    """
    parts: dict[str, list[int | None]] = {}
    for device in profile.cluster.devices:
        parts.setdefault(device.host, []).append(profile.of_class(device.device_class).host_bytes)
    for host, needed in predict_host_bytes(plan).items():
        known = parts.get(host, [])
        room = sum(part for part in known if part is not None)
        if None in known or not room or needed <= room:
            continue
        assert plan.prediction is not None
        processes = sum(worker.host == host for worker in plan.workers)
        loading = plan.prediction.loading_bytes
        raise LoadingMemoryError(
            f"host '{host}' is short of {show_bytes(needed - room)} of RAM while weights load",
            code="loading-memory-short",
            why=f"it has {show_bytes(room)} for training; each of its {processes} processes reads "
            f"the weights a block at a time, which takes {show_bytes(loading)}"
            + (
                f", and {show_bytes(kept)} stay there"
                if (kept := needed - processes * loading)
                else ""
            ),
            fix="use fewer devices on this host, or give it more RAM"
            + ("; or keep less there, without CPU offload" if kept else ""),
        )


def predict_host_bytes(plan: Plan, *, on_cpu: bool = False) -> dict[str, int]:
    """Return the memory of each host that the plan's processes take until the first step, at most,
    beyond that of the libraries; empty without a prediction.

    Args:
        on_cpu: whether devices are CPUs, whose memory is that of the host.
    """
    if plan.prediction is None:
        return {}
    told, found = plan.expected_by_device, Counter[str]()
    for worker in plan.workers:
        of_device = told.get(worker.device)
        kept = 0 if of_device is None else of_device.host_bytes
        if on_cpu and of_device is not None:
            kept += of_device.peak_bytes
        found[worker.host] += kept + plan.prediction.loading_bytes
    return dict(found)
