"""What this host has, for `cluster: auto`: its NVIDIA GPUs, or its CPU where there is no driver.

Asks NVML, so neither torch nor a CUDA context is needed. Says what is unclear instead of guessing:
see `visible.py` for `CUDA_VISIBLE_DEVICES` and for GPUs that are cut into MIG instances.
"""

from __future__ import annotations

import re
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from gpumix.hardware.control_groups import let_have_bytes
from gpumix.hardware.visible import Gpu, visible_gpus
from gpumix.spec.cluster import Cluster, Device, DeviceClass
from gpumix.spec.errors import MachineError
from gpumix.spec.units import show_bytes

CPU_MEMORY_SHARE = 0.8  # of all; the rest is for the system and the page cache
_BRAND_WORDS = {"nvidia", "geforce", "tesla"}
_MEMINFO = Path("/proc/meminfo")


def discover() -> Cluster:
    """The devices of this host that CUDA would show to a program started now.

    GPUs of one product, memory and driver are one class, named after the product. Without an
    NVIDIA driver, or with all GPUs hidden, it is one CPU of class 'cpu' with 80 % of the memory
    of the host, or of that of a container.

    Raises:
        MachineError: the driver answers with an error, `CUDA_VISIBLE_DEVICES` does not say which
            GPUs are meant, a GPU is cut into MIG instances, or the memory is unknown.
    """
    host = socket.gethostname()
    gpus = visible_gpus(_gpus(host), host=host)
    return _gpu_cluster(gpus, host=host) if gpus else _cpu_cluster(host)


def product_slug(product: str) -> str:
    """A class name for a product: 'NVIDIA GeForce RTX 3090' is 'rtx-3090'."""
    words = re.findall(r"[a-z0-9.]+", product.lower())
    return "-".join(w for w in words if w not in _BRAND_WORDS) or "gpu"


def _gpus(host: str) -> tuple[Gpu, ...]:
    """All GPUs of this host in NVML's order (by PCI bus); empty if there is no NVIDIA driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return ()
    except pynvml.NVMLError as error:
        raise MachineError(
            "the NVIDIA driver does not start",
            where=host,
            why=f"NVML says: {error}",
            fix="run `nvidia-smi`; after a driver update reload the module or restart the host",
        ) from error
    try:
        with _explained(pynvml, where=host):
            driver = _text(pynvml.nvmlSystemGetDriverVersion())
            count = pynvml.nvmlDeviceGetCount()
            return tuple(_gpu(pynvml, index, driver=driver, host=host) for index in range(count))
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: ModuleType, index: int, *, driver: str, host: str) -> Gpu:
    with _explained(nvml, where=f"{host}, GPU {index}"):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        mig = _is_mig(nvml, handle)  # such a GPU does not always tell its memory
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        return Gpu(
            index=index,
            uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
            product=_text(nvml.nvmlDeviceGetName(handle)),
            memory_bytes=0 if mig else int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
            driver=driver,
            compute_capability=f"{major}.{minor}",
            mig=mig,
        )


@contextmanager
def _explained(nvml: ModuleType, *, where: str) -> Iterator[None]:
    try:
        yield
    except nvml.NVMLError as error:
        raise MachineError(
            "the NVIDIA driver does not say what is here",
            where=where,
            why=f"NVML says: {error}",
            fix="see `nvidia-smi -q`, or name the devices under `cluster:` in the job",
        ) from error


def _is_mig(nvml: ModuleType, handle: object) -> bool:
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError_NotSupported:  # most products cannot be cut
        return False
    return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)


def _text(value: str | bytes) -> str:
    """Older NVML bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _gpu_cluster(gpus: tuple[Gpu, ...], *, host: str) -> Cluster:
    kinds = list(dict.fromkeys(gpu.kind for gpu in gpus))
    names = dict(zip(kinds, _class_names([(product, memory) for product, memory, *_ in kinds])))
    classes = tuple(
        DeviceClass(
            name=names[kind],
            accelerator="cuda",
            memory_bytes=kind[1],
            product=kind[0],
            driver=kind[2],
            compute_capability=kind[3],
        )
        for kind in kinds
    )
    devices = tuple(
        Device(id=gpu.uuid, device_class=names[gpu.kind], host=host, ordinal=ordinal)
        for ordinal, gpu in enumerate(gpus)
    )
    return Cluster(classes=classes, devices=devices)


def _class_names(kinds: list[tuple[str, int]]) -> list[str]:
    """One name for each (product, memory): the product's, with memory where two would clash."""
    names = [product_slug(product) for product, _ in kinds]
    for spell in (lambda memory: f"{memory / 2**30:.0f}gib", lambda memory: f"{memory}b"):
        clashes = {name for name, count in Counter(names).items() if count > 1}
        names = [
            f"{product_slug(product)}-{spell(memory)}" if name in clashes else name
            for name, (product, memory) in zip(names, kinds)
        ]
    return names


def _cpu_cluster(host: str) -> Cluster:
    total = _memory(host)
    share = f"{CPU_MEMORY_SHARE:.0%}"
    cpu = DeviceClass(
        name="cpu",
        accelerator="cpu",
        memory_bytes=int(total * CPU_MEMORY_SHARE),
        product=f"CPU, {share} of the {show_bytes(total)} of memory",
    )
    device = Device(id=f"{host}-cpu", device_class=cpu.name, host=host)
    return Cluster(classes=(cpu,), devices=(device,))


def _memory(host: str) -> int:
    lines = _MEMINFO.read_text(encoding="utf-8").splitlines() if _MEMINFO.exists() else []
    for line in lines:
        if line.startswith("MemTotal:"):
            return let_have_bytes(int(line.split()[1]) * 1024)
    raise MachineError(
        "there is no NVIDIA GPU, and how much memory the CPU may use is unknown",
        where=host,
        why="this system has no /proc/meminfo",
        fix="name the device and its memory under `cluster:` in the job",
    )
