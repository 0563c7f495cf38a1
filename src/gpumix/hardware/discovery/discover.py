"""Discovery of this host's devices for `cluster: auto`: GPUs, or the CPU without GPUs.

NVIDIA GPUs are found through NVML, without torch or a CUDA context; other GPUs through torch
(`torch_gpus.py`). Unclear cases are reported instead of guessed: see `cuda_visible_devices.py` for
`CUDA_VISIBLE_DEVICES` and GPUs divided into MIG instances, `unusable_gpus.py` for GPUs that torch
cannot use.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from gpumix.hardware.discovery.cuda_visible_devices import Gpu, make_class_name, select_visible_gpus
from gpumix.hardware.discovery.gpu_health import read_newest_cuda
from gpumix.hardware.discovery.pci_gpus import list_pci_gpus
from gpumix.hardware.discovery.torch_build import read_torch_build
from gpumix.hardware.discovery.torch_gpus import find_torch_gpus, has_gpu_signs
from gpumix.hardware.discovery.unusable_gpus import refuse_build, refuse_cards
from gpumix.hardware.host.cgroups import limit_host_bytes
from gpumix.hardware.host.environment import hiding_variable
from gpumix.schema.cluster.cluster import Cluster, Device, DeviceClass
from gpumix.schema.errors import MachineError
from gpumix.schema.files import read_log
from gpumix.schema.units import show_bytes

CPU_MEMORY_SHARE = 0.8  # of all memory; the rest is for the system and the page cache
_MEMINFO = Path("/proc/meminfo")


def discover_cluster() -> Cluster:
    """Return the devices of this host visible to a program started now.

    GPUs of one product, memory and driver form a class named after the product. Without visible
    GPUs the cluster is a CPU of class 'cpu' with 80 % of the memory of the host or container;
    `explain_cpu` gives the reason.

    Raises:
        MachineError: the driver reports an error, `CUDA_VISIBLE_DEVICES` is ambiguous, a GPU is
            divided into MIG instances, torch cannot use an existing GPU, or the memory is unknown.
    """
    host = socket.gethostname()
    gpus = _usable_gpus(host)
    return _gpu_cluster(gpus, host=host) if gpus else _cpu_cluster(host)


def explain_cpu() -> str:
    """Return the reason for finding no GPU: the variable hiding GPUs, or no GPU in the host."""
    hiding = hiding_variable()
    return f"{hiding} hides the GPUs of this host" if hiding else "this host has no GPU"


def describe_cpu_run() -> str:
    """Return the first output line of a run without any GPU found."""
    return f"{explain_cpu()}: this run computes on the CPU"


def _usable_gpus(host: str) -> tuple[Gpu, ...]:
    """Return the GPUs usable by torch here; empty if hidden, or without GPUs."""
    build = read_torch_build()
    torch_says = ""
    if build is not None and build.toolkit in ("ROCm", "XPU"):
        gpus, torch_says = find_torch_gpus(host, build.toolkit)
        if gpus:
            return gpus
    nvidia = select_visible_gpus(_list_nvidia_gpus(host), host=host)
    if nvidia:
        refuse_build(build, driver=nvidia[0].driver, driver_cuda=nvidia[0].driver_cuda, host=host)
        return nvidia
    cards = () if hiding_variable() else list_pci_gpus()
    signs = any(card.maker == "NVIDIA" for card in cards) or has_gpu_signs()
    if build is not None and build.toolkit == "CUDA" and signs:  # a host without NVML
        gpus, torch_says = find_torch_gpus(host, build.toolkit)
        if gpus:
            return gpus
    refuse_cards(cards, build, host=host, torch_says=torch_says)
    return ()


def _list_nvidia_gpus(host: str) -> tuple[Gpu, ...]:
    """Return all GPUs of this host in NVML order (PCI bus); empty without an NVIDIA driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return ()
    except pynvml.NVMLError as error:
        raise MachineError(
            "the NVIDIA driver does not start",
            code="nvidia-driver-not-started",
            where=host,
            why=f"NVML says: {error}",
            fix="run `nvidia-smi`; after a driver update reload the module or restart the host",
        ) from error
    try:
        with _translate_nvml_errors(pynvml, where=host):
            driver = _decode(pynvml.nvmlSystemGetDriverVersion()), read_newest_cuda(pynvml)
            count = pynvml.nvmlDeviceGetCount()
            return tuple(
                _read_nvidia_gpu(pynvml, index, driver=driver, host=host) for index in range(count)
            )
    finally:
        pynvml.nvmlShutdown()


def _read_nvidia_gpu(nvml: ModuleType, index: int, *, driver: tuple[str, str], host: str) -> Gpu:
    with _translate_nvml_errors(nvml, where=f"{host}, GPU {index}"):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        mig = _is_mig(nvml, handle)  # MIG GPUs do not always report memory
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        return Gpu(
            index=index,
            uuid=_decode(nvml.nvmlDeviceGetUUID(handle)),
            product=_decode(nvml.nvmlDeviceGetName(handle)),
            memory_bytes=0 if mig else int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
            driver=driver[0],
            driver_cuda=driver[1],
            compute_capability=f"{major}.{minor}",
            mig=mig,
        )


@contextmanager
def _translate_nvml_errors(nvml: ModuleType, *, where: str) -> Iterator[None]:
    try:
        yield
    except nvml.NVMLError as error:
        raise MachineError(
            "the NVIDIA driver does not say what is here",
            code="nvidia-driver-failed",
            where=where,
            why=f"NVML says: {error}",
            fix="see `nvidia-smi -q`, or name the devices under `cluster:` in the job",
        ) from error


def _is_mig(nvml: ModuleType, handle: object) -> bool:
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError_NotSupported:  # most products do not support MIG
        return False
    return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)


def _decode(value: str | bytes) -> str:
    """Decode text: older NVML bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _gpu_cluster(gpus: tuple[Gpu, ...], *, host: str) -> Cluster:
    kinds = {gpu.kind: gpu for gpu in reversed(gpus)}  # the first GPU of each kind
    firsts = [gpu for gpu in gpus if kinds[gpu.kind] is gpu]
    spelled = _class_names([(gpu.product, gpu.memory_bytes) for gpu in firsts])
    names = {gpu.kind: name for gpu, name in zip(firsts, spelled)}
    devices = tuple(
        Device(id=gpu.uuid, device_class=names[gpu.kind], host=host, ordinal=ordinal)
        for ordinal, gpu in enumerate(gpus)
    )
    classes = tuple(gpu.device_class(names[gpu.kind]) for gpu in firsts)
    return Cluster(classes=classes, devices=devices)


def _class_names(kinds: list[tuple[str, int]]) -> list[str]:
    """Return a name for each (product, memory): the product, with memory added for duplicates."""
    names = [make_class_name(product) for product, _ in kinds]
    for spell in (lambda memory: f"{memory / 2**30:.0f}gib", lambda memory: f"{memory}b"):
        clashes = {name for name, count in Counter(names).items() if count > 1}
        names = [
            f"{make_class_name(product)}-{spell(memory)}" if name in clashes else name
            for name, (product, memory) in zip(names, kinds)
        ]
    return names


def _cpu_cluster(host: str) -> Cluster:
    total = _read_memory_bytes(host)
    share = f"{CPU_MEMORY_SHARE:.0%}"
    cpu = DeviceClass(
        name="cpu",
        accelerator="cpu",
        memory_bytes=int(total * CPU_MEMORY_SHARE),
        product=f"CPU, {share} of the {show_bytes(total)} of memory",
    )
    device = Device(id=f"{host}-cpu", device_class=cpu.name, host=host)
    return Cluster(classes=(cpu,), devices=(device,))


def _read_memory_bytes(host: str) -> int:
    lines = read_log(_MEMINFO).splitlines() if _MEMINFO.exists() else []
    for line in lines:
        if line.startswith("MemTotal:"):
            return limit_host_bytes(int(line.split()[1]) * 1024)
    raise MachineError(
        "there is no GPU, and how much memory the CPU may use is unknown",
        code="cpu-memory-unknown",
        where=host,
        why="this system has no /proc/meminfo",
        fix="name the device and its memory under `cluster:` in the job",
    )
