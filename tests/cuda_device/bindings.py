"""What a build of torch with CUDA has in `torch._C`: `torch.cuda` is written on top of it."""

from __future__ import annotations

import ctypes
import os
from enum import IntEnum
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch._utils import _dummy_type

from cuda_device import environ, waits
from cuda_device.lag import set_lag
from cuda_device.library import CONFIGURE, I64, TELL, call
from cuda_device.stream_classes import EventBase, StreamBase, stream_data

VERSION = "13.0"
NCCL_VERSION = 2 << 32 | 27 << 16 | 7
_CALLBACKS: list[Any] = []  # must outlive the library
_VISIBLE: list[environ.Device] = []


def prepare() -> None:
    """Make `torch.cuda` find a build with CUDA."""
    names = {f"_cuda_{name}": function for name, function in _functions().items()}
    names |= {"_CudaStreamBase": StreamBase, "_CudaEventBase": EventBase, "_cudart": _cudart()}
    names |= {"_CudaDeviceProperties": environ.Device, "_has_cuda": True}
    names |= {"_nccl_version": lambda: NCCL_VERSION, "_nccl_version_suffix": lambda: b"-gloo"}
    for name in ("_CUDAGraph", "_graph_pool_handle"):  # there are none
        names[name] = _dummy_type(name)
    for name, value in names.items():
        setattr(torch._C, name, value)
    torch.version.cuda = VERSION
    _CALLBACKS.extend([CONFIGURE(_configure), TELL(waits.tell)])
    call("set_callbacks")(*_CALLBACKS)
    set_lag(os.environ.get(environ.LAG, ""))


def complete(cuda: Any) -> None:
    """NVML counts devices without opening the driver."""
    cuda._raw_device_count_nvml = lambda: len(environ.devices())
    cuda._device_count_nvml = lambda: len(environ.devices())


# -- devices ---------------------------------------------------------------------------------------


def _configure() -> None:
    """Until the first use the environment may change which devices there are."""
    if torch.cuda._initialized:
        return
    _VISIBLE[:] = environ.devices()
    context = int(os.environ.get(environ.CONTEXT, environ.CONTEXT_MIB)) * environ.MIB
    others = int(float(os.environ.get(environ.OTHERS, 0)) * environ.GIB)
    for number, device in enumerate(_VISIBLE):
        call("set_memory")(number, device.total_memory, context, others)
    call("set_count")(len(_VISIBLE))


def _count() -> int:
    call("poison_fork")()
    _configure()
    return len(_VISIBLE)


def _init() -> None:
    if _count() == 0:
        raise RuntimeError("No CUDA GPUs are available")
    call("init")()
    cuda: Any = torch.cuda
    cuda._get_device_properties = _VISIBLE.__getitem__
    cuda.has_magma = False
    _add_products()
    call("give_default_generators")(1)
    made = [torch.Generator(device=f"cuda:{number}") for number in range(len(_VISIBLE))]
    call("give_default_generators")(0)
    cuda.default_generators = tuple(made)


_LIBRARIES: list[Any] = []  # registrations end with theirs


def _add_products() -> None:
    """Products that end in another dtype: the CPU has none."""

    def addmm(one, two, three, dtype, *, beta=1, alpha=1, out):  # type: ignore[no-untyped-def]
        given = (tensor.to(dtype) for tensor in (one, two, three))
        return out.copy_(torch.addmm(*given, beta=beta, alpha=alpha))

    def mm(one, two, dtype, *, out):  # type: ignore[no-untyped-def]
        return out.copy_(torch.mm(one.to(dtype), two.to(dtype)))

    library = torch.library.Library("aten", "IMPL")
    library.impl("addmm.dtype_out", addmm, "CUDA")
    library.impl("mm.dtype_out", mm, "CUDA")
    _LIBRARIES.append(library)


def _set_device(device: int) -> None:
    torch.cuda._lazy_init()
    call("exchange")(device)


def _exchange(device: int) -> int:
    if device >= 0:
        torch.cuda._lazy_init()
    return call("exchange")(device)


def _synchronize() -> None:
    torch._C._accelerator_synchronizeDevice(call("current")())


def _functions() -> dict[str, Any]:
    """By their names after `_cuda_`."""
    memory = {
        "memoryStats": torch._C._accelerator_getDeviceStats,
        "resetPeakMemoryStats": torch._C._accelerator_resetPeakStats,
        "resetAccumulatedMemoryStats": torch._C._accelerator_resetAccumulatedStats,
        "emptyCache": torch._C._accelerator_emptyCache,
        "setMemoryFraction": lambda part, device: call("set_fraction")(device, part),
        "getMemoryFraction": call("fraction"),
        "getAllocatorBackend": lambda: "native",
        "hostMemoryStats": _host_stats,
        "resetPeakHostMemoryStats": partial(call("reset_host_stats"), 1),
        "resetAccumulatedHostMemoryStats": partial(call("reset_host_stats"), 0),
        "ipc_collect": lambda: None,
    }
    return memory | {
        "getDeviceCount": _count,
        "isInBadFork": lambda: bool(call("is_in_bad_fork")()),
        "init": _init,
        "getDevice": call("current"),
        "setDevice": _set_device,
        "exchangeDevice": _exchange,
        "maybeExchangeDevice": _exchange,
        "canDeviceAccessPeer": lambda one, other: one != other,
        "getArchFlags": lambda: "sm_75 sm_80 sm_86 sm_89 sm_90",
        "synchronize": _synchronize,
        "getCurrentStream": lambda device: stream_data(device, call("stream")(device)),
        "getDefaultStream": lambda device: stream_data(device, 0),
        "getCurrentRawStream": lambda device: _stream(device).cuda_stream,
        "setStream": _set_stream,
        "sleep": lambda cycles: call("sleep")(call("current")(), cycles // 2),
        "set_sync_debug_mode": call("set_sync_debug_mode"),
        "get_sync_debug_mode": call("sync_debug_mode"),
        "isCurrentStreamCapturing": lambda: False,
    }


def _stream(device: int) -> Any:
    return torch.cuda.current_stream(device)


def _set_stream(*, stream_id: int, device_index: int, device_type: int) -> None:
    call("exchange")(device_index)
    call("set_stream")(device_index, stream_id)


def _host_stats() -> dict[str, Any]:
    values = (I64 * 18)()
    call("host_stats")(values)
    names = ("active_requests", "active_bytes", "allocations", "allocated_bytes")
    parts = ("current", "peak", "allocated", "freed")
    stats: dict[str, Any] = {
        name: dict(zip(parts, values[4 * number : 4 * number + 4], strict=True))
        for number, name in enumerate(names)
    }
    return stats | {"num_host_alloc": values[16], "num_host_free": values[17]}


# -- the CUDA runtime ------------------------------------------------------------------------------


class cudaError(IntEnum):
    """Codes of the CUDA runtime; the name is that of torch's binding."""

    success = 0
    invalid_value = 1
    already_registered = 712
    not_registered = 713


TEXTS = {0: "no error", 1: "invalid argument"} | {
    712: "part or all of the requested memory range is already mapped",
    713: "pointer does not correspond to a registered memory region",
}


def _cudart() -> Any:
    def register(pointer: int, size: int, _flags: int) -> cudaError:
        return cudaError(call("register")(ctypes.c_void_p(pointer), size))

    def unregister(pointer: int) -> cudaError:
        return cudaError(call("unregister")(ctypes.c_void_p(pointer)))

    def memory(device: int) -> tuple[int, int]:
        return call("free_bytes")(device), _VISIBLE[device].total_memory

    runtime: Any = ModuleType("torch._C._cudart")
    names = {
        "cudaError": cudaError,
        "cudaGetErrorString": lambda code: TEXTS[int(code)],
        "cudaHostRegister": register,
        "cudaHostUnregister": unregister,
        "cudaMemGetInfo": memory,
        "cudaProfilerStart": lambda: cudaError.success,
        "cudaProfilerStop": lambda: cudaError.success,
    }
    vars(runtime).update(names)
    return runtime
