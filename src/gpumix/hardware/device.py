"""Common interface of all devices for the engine, profiler and trainer.

`open_device` makes this process the user of a device: a GPU, a plain CPU, or an emulated device.
Units are bytes and seconds; unknown values are None, never a guess.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from gpumix.hardware import runtime
from gpumix.hardware.discovery.cuda_visible_devices import make_class_name
from gpumix.hardware.discovery.foreign_memory import read_gpu_health
from gpumix.hardware.discovery.gpu_clocks import ClockReader
from gpumix.hardware.discovery.torch_build import (
    get_kernel_support,
    read_torch_build,
    suggest_wheel,
)
from gpumix.hardware.host.cpu import get_threads_per_rank
from gpumix.hardware.host.environment import (
    count_gpus_by_nvml,
    drop_preferred_segments,
    prefer_expandable_segments,
)
from gpumix.hardware.memory_limit import is_out_of_memory, limit_memory
from gpumix.schema.cluster.clocks import GpuClocks
from gpumix.schema.cluster.cluster import Device, DeviceClass
from gpumix.schema.errors import DeviceMissing, InputError, MachineError

if TYPE_CHECKING:
    from gpumix.hardware.emulation.link import EmulatedLink


class DeviceRuntime(ABC):
    """The device used by this process, from `open_device` to `close`.

    Attributes:
        torch_device: the device of tensors.
        memory_limit_bytes: total memory of the process, including `framework_bytes`.
        uncounted: the reason why tensor bytes are unknown here; empty if known.
        emulated: True for a CPU slowed to a stated speed.
        host_link: emulated link to the host; None: copies take their own time.
    """

    torch_device: torch.device
    memory_limit_bytes: int
    uncounted: str = ""
    emulated: bool = False
    host_link: EmulatedLink | None = None

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has completed all its work."""

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds of `work` on the device."""
        self.synchronize()
        begun = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - begun

    def idle(self) -> None:
        """Report a wait for anything except this device: data, a DDP step.

        Used by emulated devices only, which must not catch up on time without work.
        """
        return

    @abstractmethod
    def current_bytes(self) -> int | None:
        """Return the current bytes of tensors, or None if unknown."""

    @abstractmethod
    def peak_bytes(self) -> int | None:
        """Return the peak bytes of tensors since `reset_peak`, or None if unknown."""

    def peak_reserved_bytes(self) -> int | None:
        """Return the peak bytes reserved by the allocator since `reset_peak`, for tensors and for
        reuse; None if the allocator keeps no reserve."""
        return None

    @abstractmethod
    def reset_peak(self) -> None:
        """Reset the peaks to the bytes in use now."""

    def framework_bytes(self) -> int:
        """Return the part of the limit not available for tensors: the context, libraries and
        workspaces, other processes."""
        return 0

    def obtainable_bytes(self) -> int:
        """Return the part of the limit this process could use for tensors now, including existing
        tensors."""
        return self.memory_limit_bytes - self.framework_bytes()

    def clocks(self) -> GpuClocks | None:
        """Return the current clocks reported by the driver, or None if unknown."""
        return None

    @property
    def allocator_retries(self) -> int:
        """Number of times the allocator had to free cached memory to allocate; 0 if not
        applicable."""
        return 0

    @property
    def overruns(self) -> int:
        """Number of times an emulated device fell behind its speed; 0 for real devices."""
        return 0

    @property
    def overrun_s(self) -> float:
        """Total seconds of all overruns. Measurements during which this value grew are invalid."""
        return 0.0

    def close(self) -> None:
        """Release the device; the runtime must not be used afterwards."""
        _in_use.clear()
        self._close()

    @abstractmethod
    def _close(self) -> None: ...

    def __enter__(self) -> DeviceRuntime:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_device(device_class: DeviceClass, ordinal: int, *, device_id: str = "") -> DeviceRuntime:
    """Make this process the user of a device.

    Args:
        device_class: type of the device, and the memory available.
        ordinal: index among the CUDA devices visible to this process; unused for CPUs.
        device_id: a UUID ("GPU-...") selects the GPU regardless of `ordinal`; other ids are
            ignored.

    Raises:
        DeviceMissing: the GPU does not exist.
        MachineError: the GPU does not match its class.
        InputError: this process already uses a device; limits of two would mix.
    """
    if _in_use:
        raise InputError(
            f"this process uses a device already, and cannot open '{device_class.name}' beside it",
            code="device-already-open",
            fix="close the first, or leave its `with` block; `gpumix.profile` opens its own",
        )
    _in_use.append(_make_runtime(device_class, ordinal, device_id))
    return _in_use[0]


def check_accelerator(device_class: DeviceClass, device_id: str = "") -> None:
    """Check that torch sees GPUs of a class's kind here; nothing to check for a CPU.

    Raises:
        DeviceMissing: torch sees none.
        MachineError: the engine does not train on this kind.
    """
    if device_class.emulated or device_class.accelerator == "cpu":
        return
    if device_class.accelerator == "hpu":
        raise MachineError(
            f"device class '{device_class.name}' is a Gaudi, which gpumix only plans for",
            code="device-only-planned",
            why="torch computes on it through Intel's own package, which the engine does not use",
            fix="train on GPUs, or use Optimum for Intel Gaudi",
        )
    count_gpus_by_nvml()
    if not runtime.is_available() or runtime.get_gpu_type() != device_class.accelerator:
        raise DeviceMissing(
            f"torch sees no GPU, but device class '{device_class.name}' wants one of "
            f"{device_class.maker}",
            code="torch-without-gpu",
            why="; ".join(filter(None, (str(read_torch_build() or ""), runtime.explain_no_gpu()))),
            fix=suggest_wheel(device_class.maker)
            + ", or make the driver work: nvidia-smi, rocm-smi or "
            "xpu-smi shows whether it does",
            device=device_id,
        )


def is_device_error(error: BaseException) -> bool:
    """Return True if the GPU itself failed: a memory error, or a GPU lost from the bus. The GPU is
    unusable in this process from then on."""
    kind = getattr(torch, "AcceleratorError", None)
    return kind is not None and isinstance(error, kind)


def device_in_use() -> DeviceRuntime | None:
    """Return the open device of this process, or None."""
    return _in_use[0] if _in_use else None


_in_use: list[DeviceRuntime] = []  # at most one


def _make_runtime(device_class: DeviceClass, ordinal: int, device_id: str) -> DeviceRuntime:
    if device_class.emulated:
        return _EmulatedRuntime(device_class)
    if device_class.accelerator == "cpu":
        return _CpuRuntime(device_class)
    prefer_expandable_segments()
    check_accelerator(device_class, device_id)
    return _GpuRuntime(device_class, _find_ordinal(ordinal, device_id))


class _CpuRuntime(DeviceRuntime):
    """A plain CPU: tensors are counted, and capped at the class's memory."""

    torch_device = torch.device("cpu")

    def __init__(self, device_class: DeviceClass) -> None:
        self.memory_limit_bytes = device_class.memory_bytes
        owner = f"{'emulated ' * self.emulated}device '{device_class.name}'"
        self._memory = limit_memory(device_class.memory_bytes, owner=owner)
        self.uncounted = self._memory.why_inexact

    def synchronize(self) -> None:
        return None

    def current_bytes(self) -> int | None:
        return self._memory.current_bytes

    def peak_bytes(self) -> int | None:
        return self._memory.peak_bytes

    def reset_peak(self) -> None:
        self._memory.reset_peak()

    def _close(self) -> None:
        limit_memory(None)


class _EmulatedRuntime(_CpuRuntime):
    """A CPU process limited to the speed and the memory of its class. Torch uses one thread: an
    emulated device is one thread."""

    emulated = True

    def __init__(self, device_class: DeviceClass) -> None:
        from gpumix.hardware.emulation.link import EmulatedLink
        from gpumix.hardware.emulation.pacer import Pacer  # imports torch's FLOP tables

        assert device_class.emulate_flops_per_s is not None
        self._pacer = Pacer(device_class.emulate_flops_per_s)
        rate = device_class.emulate_link_bytes_per_s
        if rate is not None:
            self.host_link = EmulatedLink(rate, self._pacer.timeline)
        with ExitStack() as stack:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
            super().__init__(device_class)
            stack.callback(super()._close)
            stack.enter_context(self._pacer)
            self._stack = stack.pop_all()

    def synchronize(self) -> None:
        self._pacer.timeline.drain()

    def idle(self) -> None:
        self._pacer.timeline.idle()

    @property
    def overruns(self) -> int:
        return self._pacer.timeline.overruns

    @property
    def overrun_s(self) -> float:
        return self._pacer.timeline.overrun_s

    def _close(self) -> None:
        self._stack.close()


class _GpuRuntime(DeviceRuntime):
    """A GPU. The allocator enforces a class with less memory than the GPU."""

    def __init__(self, device_class: DeviceClass, ordinal: int) -> None:
        _check_product(device_class, ordinal)
        _check_kernels(ordinal)
        total = runtime.total_bytes(ordinal)
        smaller = device_class.memory_bytes < total
        # A smaller class gets its full memory even if other processes use some of the GPU.
        self._others_bytes = (
            _read_foreign_bytes(ordinal, device_class.maker, total) if smaller else 0
        )
        runtime.set_device(ordinal)
        # The GPUs' ranks share the host's cores, above all for initial values.
        torch.set_num_threads(get_threads_per_rank(runtime.device_count()))
        self.torch_device = torch.device(runtime.get_gpu_type(), ordinal)
        self._clock_reader: ClockReader | None = None
        self.memory_limit_bytes = device_class.memory_bytes
        # In torch's allocator, besides tensors.
        self._workspaces_bytes = self._load_matmul_library()
        if smaller:
            for_tensors = max(0, device_class.memory_bytes - self.framework_bytes())
            share = (for_tensors + self._workspaces_bytes) / total
            runtime.limit_memory(share, self.torch_device)

    def _load_matmul_library(self) -> int:
        """Load the matrix-product libraries, the first use of GPU memory. Retry with fixed segments
        for drivers of virtual GPUs that cannot expand segments."""
        try:
            return runtime.load_matmul_library(self.torch_device)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise self._filled() from error
            if not drop_preferred_segments():
                raise
            runtime.disable_expandable_segments()
            return runtime.load_matmul_library(self.torch_device)

    def _filled(self) -> MachineError:
        return MachineError(
            f"other programs fill GPU {self.torch_device.index}: there is no memory left to start",
            code="gpu-memory-full",
            fix="nvidia-smi or rocm-smi shows who uses it: end it, or hide the GPU "
            "(CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES with the others)",
        )

    def synchronize(self) -> None:
        runtime.synchronize(self.torch_device)

    def current_bytes(self) -> int:
        return runtime.allocated_bytes(self.torch_device) - self._workspaces_bytes

    def peak_bytes(self) -> int:
        return runtime.peak_allocated_bytes(self.torch_device) - self._workspaces_bytes

    def peak_reserved_bytes(self) -> int:
        return runtime.peak_reserved_bytes(self.torch_device)

    def reset_peak(self) -> None:
        runtime.reset_peak(self.torch_device)

    def framework_bytes(self) -> int:
        """Return everything except memory torch has or could still get for tensors. NVML's total
        slightly exceeds CUDA's. Initial use by other processes counts only where it reduces the
        class's memory."""
        free, total = self._free_and_total_bytes()
        return max(0, max(total - self._others_bytes, self.memory_limit_bytes) - free)

    def obtainable_bytes(self) -> int:
        return max(0, min(self._free_and_total_bytes()[0], self.memory_limit_bytes))

    def _free_and_total_bytes(self) -> tuple[int, int]:
        """Return the GPU's free bytes, including those reserved by torch for tensors, and the
        total."""
        free, total = runtime.free_and_total_bytes(self.torch_device)
        return free + runtime.reserved_bytes(self.torch_device) - self._workspaces_bytes, total

    def clocks(self) -> GpuClocks | None:
        if self._clock_reader is None and runtime.is_nvidia():
            uuid = f"GPU-{runtime.device_uuid(self.torch_device)}"
            self._clock_reader = ClockReader(uuid, self.torch_device.index)
        return None if self._clock_reader is None else self._clock_reader.look()

    @property
    def allocator_retries(self) -> int:
        return runtime.allocator_retries(self.torch_device)

    def _close(self) -> None:
        if self._clock_reader is not None:
            self._clock_reader.close()
        # After a failed kernel no call works, and collectives that lost a peer never end.
        if sys.exception() is None:
            runtime.synchronize(self.torch_device)
            runtime.empty_cache()
            runtime.limit_memory(1.0, self.torch_device)


def _read_foreign_bytes(ordinal: int, maker: str, total: int) -> int:
    """Return the bytes of the GPU used by other processes. 0 if the driver does not report them, or
    if this process already has a context, which the driver would include."""
    if runtime.has_context(ordinal):
        return 0
    device = Device(id=f"GPU-{runtime.device_uuid(ordinal)}", device_class="", ordinal=ordinal)
    free = [one.memory_bytes - one.used_bytes for _, one in read_gpu_health({device: maker})]
    return max(0, total - free[0]) if free else 0


def _find_ordinal(ordinal: int, device_id: str) -> int:
    """Return the index of the GPU in this process.

    CUDA may number GPUs by speed, while discovery uses PCI bus order: the UUID decides if known.
    """
    count = runtime.device_count()
    if device_id.startswith("GPU-"):
        uuids = [f"GPU-{runtime.device_uuid(i)}" for i in range(count)]
        if device_id in uuids:
            return uuids.index(device_id)
        seen = ", ".join(uuids)
    elif ordinal < count:
        return ordinal
    else:
        seen = f"{count} GPUs"
    raise DeviceMissing(
        f"this process does not see GPU {device_id or ordinal}",
        code="gpu-not-visible",
        why=f"it sees {seen}",
        fix="compare `nvidia-smi -L` with CUDA_VISIBLE_DEVICES, or discover the cluster again",
        device=device_id,
    )


def _check_product(device_class: DeviceClass, ordinal: int) -> None:
    """Check that the GPU has the product and architecture of a discovered class."""
    wanted = device_class.gfx_target or device_class.xe_target or device_class.compute_capability
    if not wanted:
        return
    product = runtime.device_name(ordinal)
    other_maker = runtime.gfx_target(ordinal) or runtime.xe_target(ordinal)
    found = other_maker or "{}.{}".format(*runtime.capability(ordinal))
    same_product = make_class_name(product) == make_class_name(device_class.product)
    if same_product and found == wanted:
        return
    raise MachineError(
        f"GPU {ordinal} is a {product} ({found}), but class '{device_class.name}' is "
        f"{device_class.product} ({wanted})",
        code="gpu-of-another-class",
        why="CUDA numbers GPUs by speed unless it is told to go by PCI bus",
        fix="`export CUDA_DEVICE_ORDER=PCI_BUS_ID`, or discover the cluster again",
    )


def _check_kernels(ordinal: int) -> None:
    """Check that torch has kernels for the GPU; otherwise the first matrix product would fail."""
    arches = runtime.built_architectures()
    major, minor = runtime.capability(ordinal)
    if (
        not runtime.is_nvidia()
        or not arches
        or get_kernel_support(arches, f"{major}.{minor}") != "none"
    ):
        return
    raise MachineError(
        f"this torch has no kernels for GPU {ordinal}, a {runtime.device_name(ordinal)} (compute "
        f"capability {major}.{minor})",
        code="torch-without-gpu-kernels",
        why=f"{read_torch_build()}; it has {' '.join(arches)}",
        fix=suggest_wheel("NVIDIA", (major, minor)),
    )
