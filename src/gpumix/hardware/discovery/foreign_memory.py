"""Use of this host's GPU memory by foreign programs, as reported by the driver.

Read before measuring, by the process starting the ranks, which uses no GPU itself. A plan must
leave this memory alone; if most of a GPU is taken, the run is refused.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpumix.hardware.discovery.amd_health import find_amd_handle, open_amdsmi, read_amd_health
from gpumix.hardware.discovery.gpu_health import GpuHealth, find_handle, open_nvml, read_health
from gpumix.hardware.host.environment import visible_cuda_devices
from gpumix.schema.cluster.cluster import Cluster, Device
from gpumix.schema.errors import MachineError
from gpumix.schema.files import read_log
from gpumix.schema.profile.profile import Profile
from gpumix.schema.units import show_bytes

MIN_FOREIGN_BYTES = 2**30  # more than a desktop or a driver uses
MIN_FREE_SHARE = 0.5  # of the memory planned for a class; a GPU with less is not worth a rank


@dataclass(frozen=True)
class OccupiedGpu:
    """A GPU with much memory used by other processes.

    Attributes:
        taken_bytes: memory used by other processes.
        holders: the processes, such as "4711 (python)", with their bytes if reported.
    """

    device: Device
    memory_bytes: int
    taken_bytes: int
    holders: tuple[str, ...]

    @property
    def left_bytes(self) -> int:
        return self.memory_bytes - self.taken_bytes

    def __str__(self) -> str:
        by = f" by process {', '.join(self.holders)}" if self.holders else ""
        return (
            f"{show_bytes(self.taken_bytes)} of the {show_bytes(self.memory_bytes)} of "
            f"{self.device.device_class} {self.device.ordinal} are taken{by}"
        )


def find_occupied_gpus(cluster: Cluster) -> tuple[OccupiedGpu, ...]:
    """Return the cluster's GPUs on this host with at least a GiB in foreign use.

    Raises:
        MachineError: less than half of a GPU's planned memory is free.
    """
    here = {socket.gethostname(), "localhost"}
    kinds = {device: cluster.class_named(device.device_class) for device in cluster.devices}
    makers = {
        device: kind.maker for device, kind in kinds.items() if device.host in here and kind.is_gpu
    }
    found = tuple(
        OccupiedGpu(
            device,
            told.memory_bytes,
            told.used_bytes,
            tuple(_format_process(pid, held) for pid, held in told.others),
        )
        for device, told in read_gpu_health(makers)
        if told.used_bytes >= MIN_FOREIGN_BYTES
    )
    full = next((one for one in found if _is_full(one, kinds[one.device].memory_bytes)), None)
    if full is not None:
        pids = " ".join(name.partition(" ")[0] for name in full.holders)
        raise MachineError(
            f"another program fills a GPU of this run: {full}",
            code="gpu-filled-by-others",
            where=full.device.host,
            fix=(f"end it (kill {pids})" if pids else "nvidia-smi or rocm-smi shows who uses it")
            + ", or hide the GPU: CUDA_VISIBLE_DEVICES (HIP_VISIBLE_DEVICES) with the others",
        )
    return found


def reserve_foreign_memory(profile: Profile, taken: Sequence[OccupiedGpu]) -> Profile:
    """Return the profile with `framework_bytes` raised to the memory in foreign use. A profile
    measured during this use already includes the bytes."""
    missing: dict[str, int] = {}
    for one in taken:
        name = one.device.device_class
        short = profile.cluster.class_named(name).memory_bytes - one.left_bytes
        missing[name] = max(short, missing.get(name, 0))
    classes = tuple(
        one.model_copy(update={"framework_bytes": one.framework_bytes + short})
        if (short := missing.get(one.device_class, 0)) > one.framework_bytes
        else one
        for one in profile.classes
    )
    return profile.model_copy(update={"classes": classes}) if taken else profile


def read_gpu_health(makers: Mapping[Device, str]) -> Iterator[tuple[Device, GpuHealth]]:
    """Yield the health of this host's GPUs, as far as reported by drivers.

    Args:
        makers: manufacturer of each GPU.
    """
    nvidia = [device for device, maker in makers.items() if maker == "NVIDIA"]
    if nvidia:
        with open_nvml() as nvml:
            for device in nvidia if nvml is not None else ():
                if not device.id.startswith("GPU-") and visible_cuda_devices() is not None:
                    continue  # the ordinal is not NVML's index
                try:
                    yield device, read_health(nvml, find_handle(nvml, device.id, device.ordinal))
                except nvml.NVMLError:  # type: ignore[union-attr]  # whoever opens it is told
                    continue
    amd = [device for device, maker in makers.items() if maker == "AMD"]
    if amd:
        with open_amdsmi() as smi:
            for device in amd if smi is not None else ():
                handle = find_amd_handle(smi, device.id, device.ordinal)
                if handle is not None:
                    yield device, read_amd_health(smi, handle, device.ordinal)


def _is_full(one: OccupiedGpu, wanted_bytes: int) -> bool:
    return one.left_bytes < MIN_FREE_SHARE * min(wanted_bytes, one.memory_bytes)


def _format_process(pid: int, held_bytes: int) -> str:
    """Format a process as "4711 (python, 9.2 GiB)"; another container's names are unknown."""
    try:
        name = read_log(Path(f"/proc/{pid}/comm")).strip()
    except OSError:
        name = "of another container"
    return f"{pid} ({name}, {show_bytes(held_bytes)})" if held_bytes else f"{pid} ({name})"
