"""One interface to any device, so that the engine, profiler and trainer never ask what it is.

`open_device` makes this process the user of one device: a GPU, a plain CPU, or an emulated device.
Bytes and seconds; what cannot be known is None, never a guess.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from types import TracebackType

import torch

from gpumix.hardware import runtime
from gpumix.hardware.cpu import threads_of
from gpumix.hardware.environment import (
    count_gpus_by_nvml,
    drop_preferred_segments,
    prefer_expandable_segments,
)
from gpumix.hardware.gpu_clocks import ClockReader
from gpumix.hardware.memory import is_out_of_memory, limit_memory
from gpumix.hardware.occupied import health_of
from gpumix.hardware.torch_build import runs_on, torch_build, wheel_of
from gpumix.hardware.visible import product_slug
from gpumix.spec.clocks import Clocks
from gpumix.spec.cluster import Device, DeviceClass
from gpumix.spec.errors import DeviceMissing, InputError, MachineError


class DeviceRuntime(ABC):
    """The device that this process computes on, from `open_device` to `close`.

    Attributes:
        torch_device: where tensors go.
        memory_limit_bytes: what the process may use in all, `framework_bytes` included.
        uncounted: why the bytes of tensors are not known here; empty if they are.
        emulated: whether it is a CPU that is held to a stated speed.
    """

    torch_device: torch.device
    memory_limit_bytes: int
    uncounted: str = ""
    emulated: bool = False

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device is done with all that it was given."""

    def idle(self) -> None:
        """Tell that the process waited for something else than this device: data, a DDP step.

        Only an emulated device cares: it must not make up for time in which it had no work.
        """
        return

    @abstractmethod
    def current_bytes(self) -> int | None:
        """Bytes of tensors now, or None if unknown."""

    @abstractmethod
    def peak_bytes(self) -> int | None:
        """The most bytes of tensors since `reset_peak`, or None if unknown."""

    def peak_reserved_bytes(self) -> int | None:
        """The most bytes that the allocator held since `reset_peak`, for tensors and for reuse;
        None where it holds none in reserve."""
        return None

    @abstractmethod
    def reset_peak(self) -> None:
        """Start new peaks at the bytes in use now."""

    def framework_bytes(self) -> int:
        """What of the limit is not for tensors: the context, libraries with their workspaces, other
        processes."""
        return 0

    def obtainable_bytes(self) -> int:
        """The part of the limit that this process could have for tensors now, with those that it
        has."""
        return self.memory_limit_bytes - self.framework_bytes()

    def clocks(self) -> Clocks | None:
        """How fast it runs now, as its driver says; None where that is not told."""
        return None

    @property
    def allocator_retries(self) -> int:
        """How often the allocator had to give memory back to get some; 0 where it never does."""
        return 0

    @property
    def overruns(self) -> int:
        """How many times an emulated device fell behind its speed; 0 for others."""
        return 0

    @property
    def overrun_s(self) -> float:
        """By how many seconds in sum. A measurement during which this grew is spoiled."""
        return 0.0

    def close(self) -> None:
        """Give the device back; the runtime must not be used afterwards."""
        _in_use.clear()
        self._close()

    @abstractmethod
    def _close(self) -> None: ...

    def __enter__(self) -> DeviceRuntime:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_device(device_class: DeviceClass, ordinal: int, *, device_id: str = "") -> DeviceRuntime:
    """Make this process the user of one device.

    Args:
        device_class: what it is, and how much memory it may use.
        ordinal: its number among the CUDA devices that this process sees; CPUs have none.
        device_id: a UUID ("GPU-...") finds the GPU whatever its number; other ids are ignored.

    Raises:
        DeviceMissing: there is no such GPU.
        MachineError: it is not what its class says.
        InputError: this process uses a device already; limits of two would mix.
    """
    if _in_use:
        raise InputError(
            f"this process uses a device already, and cannot open '{device_class.name}' beside it",
            fix="close the first, or leave its `with` block; `gpumix.profile` opens its own",
        )
    _in_use.append(_opened(device_class, ordinal, device_id))
    return _in_use[0]


def is_device_error(error: BaseException) -> bool:
    """Whether a GPU itself failed: an error of its memory, or one that fell off the bus. Nothing
    works on it any more in this process."""
    kind = getattr(torch, "AcceleratorError", None)
    return kind is not None and isinstance(error, kind)


def device_in_use() -> DeviceRuntime | None:
    """The device that this process has opened and not closed."""
    return _in_use[0] if _in_use else None


_in_use: list[DeviceRuntime] = []  # one at the most


def _opened(device_class: DeviceClass, ordinal: int, device_id: str) -> DeviceRuntime:
    if device_class.emulated:
        return _EmulatedRuntime(device_class)
    if device_class.accelerator == "cpu":
        return _CpuRuntime(device_class)
    prefer_expandable_segments()
    count_gpus_by_nvml()
    if not runtime.is_available() or runtime.kind() != device_class.accelerator:
        raise DeviceMissing(
            f"torch sees no GPU, but device class '{device_class.name}' wants one of "
            f"{device_class.maker}",
            why="; ".join(filter(None, (str(torch_build() or ""), runtime.why_none()))),
            fix=wheel_of(device_class.maker) + ", or make the driver work: nvidia-smi, rocm-smi or "
            "xpu-smi shows whether it does",
            device=device_id,
        )
    return _GpuRuntime(device_class, _ordinal_here(ordinal, device_id))


class _CpuRuntime(DeviceRuntime):
    """A plain CPU: its tensors are counted, and capped at the class's memory."""

    torch_device = torch.device("cpu")

    def __init__(self, device_class: DeviceClass) -> None:
        self.memory_limit_bytes = device_class.memory_bytes
        self._memory = limit_memory(
            device_class.memory_bytes, owner=f"device '{device_class.name}'"
        )
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
    """A CPU process that is held to the speed and the memory of its class."""

    emulated = True

    def __init__(self, device_class: DeviceClass) -> None:
        from gpumix.hardware.emulation import EmulatedDevice  # counts operations by torch's tables

        self._device = EmulatedDevice(device_class).__enter__()
        assert self._device.memory is not None and self._device.pacer is not None
        self.memory_limit_bytes = device_class.memory_bytes
        self._memory = self._device.memory
        self.uncounted = self._memory.why_inexact
        self._pacer = self._device.pacer

    def synchronize(self) -> None:
        self._pacer.synchronize()

    def idle(self) -> None:
        self._pacer.idle()

    @property
    def overruns(self) -> int:
        return self._pacer.overruns

    @property
    def overrun_s(self) -> float:
        return self._pacer.overrun_s

    def _close(self) -> None:
        self._device.__exit__(None, None, None)


class _GpuRuntime(DeviceRuntime):
    """One GPU. A class with less memory than the card has is enforced by the allocator."""

    def __init__(self, device_class: DeviceClass, ordinal: int) -> None:
        _check_product(device_class, ordinal)
        _check_kernels(ordinal)
        total = runtime.total_bytes(ordinal)
        smaller = device_class.memory_bytes < total
        # A smaller class has its memory although others hold some of the card.
        self._others_bytes = _held_by_others(ordinal, device_class.maker, total) if smaller else 0
        runtime.set_device(ordinal)
        # What runs on the host, initial values above all, shares it with the other GPUs' ranks.
        torch.set_num_threads(threads_of(runtime.device_count()))
        self.torch_device = torch.device(runtime.kind(), ordinal)
        self._clock_reader: ClockReader | None = None
        self.memory_limit_bytes = device_class.memory_bytes
        # In torch's allocator, beside tensors.
        self._workspaces_bytes = self._load_products()
        if smaller:
            for_tensors = max(0, device_class.memory_bytes - self.framework_bytes())
            share = (for_tensors + self._workspaces_bytes) / total
            runtime.limit_memory(share, self.torch_device)

    def _load_products(self) -> int:
        """See `runtime.load_products`: the first use of memory. Drivers of some virtual GPUs cannot
        grow segments, and say so then."""
        try:
            return runtime.load_products(self.torch_device)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise self._filled() from error
            if not drop_preferred_segments():
                raise
            runtime.keep_segments_fixed()
            return runtime.load_products(self.torch_device)

    def _filled(self) -> MachineError:
        return MachineError(
            f"other programs fill GPU {self.torch_device.index}: there is no memory left to start",
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
        """All but what torch holds or could still get for tensors; NVML's total exceeds CUDA's a
        little. Of what others held at the start counts what the class cannot do without."""
        free, total = self._free_and_total_bytes()
        return max(0, max(total - self._others_bytes, self.memory_limit_bytes) - free)

    def obtainable_bytes(self) -> int:
        return max(0, min(self._free_and_total_bytes()[0], self.memory_limit_bytes))

    def _free_and_total_bytes(self) -> tuple[int, int]:
        """Of the card: what is free, or held by torch for tensors, and all."""
        free, total = runtime.free_and_total_bytes(self.torch_device)
        return free + runtime.reserved_bytes(self.torch_device) - self._workspaces_bytes, total

    def clocks(self) -> Clocks | None:
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
        # After a failed kernel nothing works any more, and collectives that lost a peer never end.
        if sys.exception() is None:
            runtime.synchronize(self.torch_device)
            runtime.empty_cache()
            runtime.limit_memory(1.0, self.torch_device)


def _held_by_others(ordinal: int, maker: str, total: int) -> int:
    """What other processes hold of the GPU; 0 where its driver does not tell, or where this process
    has a context on it already, which the driver counts with theirs."""
    if runtime.has_context(ordinal):
        return 0
    device = Device(id=f"GPU-{runtime.device_uuid(ordinal)}", device_class="", ordinal=ordinal)
    free = [one.memory_bytes - one.used_bytes for _, one in health_of({device: maker})]
    return max(0, total - free[0]) if free else 0


def _ordinal_here(ordinal: int, device_id: str) -> int:
    """The number under which this process sees the GPU.

    CUDA may number GPUs by speed, while discovery goes by PCI bus: the UUID decides if known.
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
        why=f"it sees {seen}",
        fix="compare `nvidia-smi -L` with CUDA_VISIBLE_DEVICES, or discover the cluster again",
        device=device_id,
    )


def _check_product(device_class: DeviceClass, ordinal: int) -> None:
    """A discovered class names product and compute capability; the GPU must be of that kind."""
    wanted = device_class.gfx_target or device_class.compute_capability
    if not wanted:
        return
    product = runtime.device_name(ordinal)
    found = runtime.gfx_target(ordinal) or "{}.{}".format(*runtime.capability(ordinal))
    same_product = product_slug(product) == product_slug(device_class.product)
    if same_product and found == wanted:
        return
    raise MachineError(
        f"GPU {ordinal} is a {product} ({found}), but class '{device_class.name}' is "
        f"{device_class.product} ({wanted})",
        why="CUDA numbers GPUs by speed unless it is told to go by PCI bus",
        fix="`export CUDA_DEVICE_ORDER=PCI_BUS_ID`, or discover the cluster again",
    )


def _check_kernels(ordinal: int) -> None:
    """Without kernels for the card the first product of matrices would fail."""
    arches = runtime.built_architectures()
    major, minor = runtime.capability(ordinal)
    if not runtime.is_nvidia() or not arches or runs_on(arches, f"{major}.{minor}") != "none":
        return
    raise MachineError(
        f"this torch has no kernels for GPU {ordinal}, a {runtime.device_name(ordinal)} (compute "
        f"capability {major}.{minor})",
        why=f"{torch_build()}; it has {' '.join(arches)}",
        fix=wheel_of("NVIDIA", (major, minor)),
    )
