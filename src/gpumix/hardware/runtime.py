"""GPUs of any maker through torch: streams, events, memory and random numbers.

The only file that names `torch.cuda` and `torch.xpu`, enforced by a test. Generic functions come
from `torch.accelerator`, `torch.Stream` and `torch.Event`, all others from the device module:
`torch.cuda` for NVIDIA and AMD, `torch.xpu` for Intel. torch functions are looked up at each call,
so that a test device can replace them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TypeAlias

import torch

from gpumix.schema.errors import get_first_line

Stream: TypeAlias = torch.Stream
Event: TypeAlias = torch.Event

# Backends of torch.distributed by device type.
GPU_BACKENDS = {"cuda": "nccl", "xpu": "xccl"}

# Intel's GPUs by the first two numbers of their version, as `torch.xpu.get_arch_list` names them.
_XE_TARGETS = {
    (12, 55): "dg2",
    (12, 56): "dg2",
    (12, 57): "dg2",
    (12, 60): "pvc",
    (12, 61): "pvc",
    (12, 70): "mtl-h",
    (12, 71): "mtl-h",
    (12, 74): "arl-h",
    (20, 1): "bmg",
    (20, 2): "bmg",
    (20, 4): "lnl-m",
    (30, 0): "ptl-h",
    (30, 1): "ptl-h",
}


# -- which devices there are


def is_gpu(device: torch.device | str) -> bool:
    """Return True if `device` is a GPU of any maker."""
    return torch.device(device).type in GPU_BACKENDS


def get_gpu_type() -> str:
    """Return the GPU type of this torch build: 'cuda' (NVIDIA, and AMD by ROCm), 'xpu' (Intel), or
    '' for builds without GPUs. Independent of drivers and cards."""
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None and found.type in GPU_BACKENDS else ""


def is_available() -> bool:
    """Return True if torch can compute on a GPU in this process."""
    return bool(get_gpu_type()) and torch.accelerator.is_available()


def is_initialized() -> bool:
    """Return True if this process has used a GPU. Cheap, and never creates a context."""
    return bool(get_gpu_type()) and bool(torch.get_device_module(get_gpu_type()).is_initialized())


def device_count() -> int:
    """Return the number of GPUs visible to this process."""
    return torch.accelerator.device_count() if get_gpu_type() else 0


def current_device() -> torch.device:
    """Return the calling thread's current GPU, with its index."""
    return torch.device(get_gpu_type(), torch.accelerator.current_device_index())


def set_device(ordinal: int) -> None:
    """Make GPU `ordinal` the calling thread's current GPU."""
    torch.accelerator.set_device_index(ordinal)


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which `device` is the calling thread's current GPU."""
    return torch.accelerator.device_index(device.index)


def add_device_index(device: torch.device | str) -> torch.device:
    """Add an index to a device: "cuda" is the calling thread's current GPU."""
    found = torch.device(device)
    return current_device() if is_gpu(found) and found.index is None else found


def choose_backend(device: torch.device) -> str:
    """Return the backend of torch.distributed for tensors on `device`."""
    return GPU_BACKENDS.get(device.type, "gloo")


# -- which product a device is


def is_nvidia() -> bool:
    """Return True if the GPUs of this torch build are NVIDIA's."""
    return get_gpu_type() == "cuda" and torch.version.hip is None


def driver_version(ordinal: int) -> str:
    """Return the driver version as known to torch; empty for NVIDIA."""
    found = _module(ordinal).get_device_properties(ordinal)
    return str(getattr(found, "driver_version", "") or torch.version.hip or "")


def explain_no_gpu() -> str:
    """Return torch's reason for showing no GPU."""
    if not get_gpu_type():
        return "this torch is built for CPUs only"
    try:
        torch.get_device_module(get_gpu_type()).init()
    except Exception as error:  # torch passes on arbitrary driver errors
        return get_first_line(error)
    return ""


def device_name(device: torch.device | int) -> str:
    """Return the product, such as 'NVIDIA H100 PCIe'."""
    return str(_module(device).get_device_properties(device).name)


def device_uuid(device: torch.device | int) -> str:
    """Return the UUID in hexadecimal, without a prefix; empty if the driver reports none."""
    return str(getattr(_module(device).get_device_properties(device), "uuid", ""))


def capability(device: torch.device | int | None = None) -> tuple[int, int]:
    """Return CUDA's compute capability; the architecture numbers for AMD GPUs, (0, 0) for Intel."""
    if get_gpu_type() != "cuda":
        return (0, 0)
    major, minor = torch.cuda.get_device_capability(device)
    return major, minor


def gfx_target(device: torch.device | int) -> str:
    """Return the architecture of an AMD GPU, for example "gfx942"; empty for NVIDIA and Intel."""
    if torch.version.hip is None:
        return ""
    return str(_module(device).get_device_properties(device).gcnArchName.partition(":")[0])


def xe_target(device: torch.device | int) -> str:
    """Return the architecture of an Intel GPU, for example "bmg"; empty for others, and where
    torch does not say it.

    The number is SYCL's (`sycl_ext_oneapi_device_architecture`): version in 10, 8 and 6 bits with
    reserved ones between, then a byte.
    """
    if get_gpu_type() != "xpu":
        return ""
    number = int(getattr(_module(device).get_device_properties(device), "architecture", 0)) >> 8
    return _XE_TARGETS.get((number >> 22, number >> 14 & 0xFF), "")


def built_architectures() -> tuple[str, ...]:
    """Return the architectures with kernels in this torch build, such as 'sm_90'. Unlike
    `torch.cuda.get_arch_list`, works with an outdated driver."""
    found = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()
    return tuple((found or "").split())


def nccl_version() -> str:
    """Return the version of NCCL (RCCL for AMD) in this torch build."""
    return ".".join(map(str, torch.cuda.nccl.version()))


# -- streams and events


def synchronize(device: torch.device | None = None) -> None:
    """Wait until all work on `device` (default: the current GPU) is done; no-op for a CPU."""
    if device is None or is_gpu(device):
        torch.accelerator.synchronize(device)


def new_stream(device: torch.device) -> Stream:
    """Return a new stream of `device`, next to the compute stream."""
    return torch.Stream(device)


def current_stream(device: torch.device) -> Stream:
    """Return the calling thread's current stream on `device`."""
    return torch.accelerator.current_stream(device)


@contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """Make `stream` and its device current for the calling thread; None changes nothing.

    Not `with stream:`, which stores the state to restore in the stream, so it can neither be
    entered by two threads nor nested.
    """
    if stream is None:
        yield
        return
    device = torch.accelerator.current_device_index()
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(device)


def new_event(device: torch.device, *, timing: bool = False) -> Event:
    """Return an event of `device`, not recorded yet; `timing` enables time measurements."""
    return torch.Event(device, enable_timing=timing)


def record_event(device: torch.device, *, timing: bool = False) -> Event:
    """Record an event after all work submitted by the calling thread to `device` so far."""
    event = new_event(device, timing=timing)
    event.record(current_stream(device))
    return event


def profiler_activity() -> torch.profiler.ProfilerActivity:
    """Return the `torch.profiler` activity of this torch build's GPUs."""
    return getattr(torch.profiler.ProfilerActivity, get_gpu_type().upper())


def get_sync_debug_mode() -> int:
    """Return torch's reporting of waits for the GPU: 0 none, 1 warnings, 2 errors."""
    return torch.cuda.get_sync_debug_mode() if get_gpu_type() == "cuda" else 0


def set_sync_debug_mode(mode: int | str) -> None:
    """Set torch's reporting of waits for the GPU; unsupported for Intel."""
    if get_gpu_type() == "cuda":
        torch.cuda.set_sync_debug_mode(mode)


# -- memory


def total_bytes(ordinal: int) -> int:
    """Return the total memory of GPU `ordinal` without creating a context."""
    return int(_module(ordinal).get_device_properties(ordinal).total_memory)


def has_context(ordinal: int) -> bool:
    """Return True if this process has a context on GPU `ordinal`, as far as torch reports."""
    ask = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return is_initialized() and (ask is None or bool(ask(ordinal)))


def free_and_total_bytes(device: torch.device | None = None) -> tuple[int, int]:
    """Return the driver's free and total bytes of the device, including use by other processes."""
    free, total = torch.accelerator.get_memory_info(device)
    return free, total


def allocated_bytes(device: torch.device | None = None) -> int:
    """Return the current bytes of tensors."""
    return torch.accelerator.memory_allocated(device)


def peak_allocated_bytes(device: torch.device | None = None) -> int:
    """Return the peak bytes of tensors since `reset_peak`."""
    return torch.accelerator.max_memory_allocated(device)


def reserved_bytes(device: torch.device | None = None) -> int:
    """Return the bytes reserved by the allocator, for tensors and for reuse."""
    return torch.accelerator.memory_reserved(device)


def peak_reserved_bytes(device: torch.device | None = None) -> int:
    """Return the peak bytes reserved by the allocator since `reset_peak`."""
    return torch.accelerator.max_memory_reserved(device)


def reset_peak(device: torch.device | None = None) -> None:
    """Reset both peaks to the bytes in use now."""
    torch.accelerator.reset_peak_memory_stats(device)


def allocator_retries(device: torch.device | None = None) -> int:
    """Return the number of times the allocator had to free cached memory to allocate."""
    return int(torch.accelerator.memory_stats(device).get("num_alloc_retries", 0))


def empty_cache() -> None:
    """Return the allocator's unused memory to the driver."""
    torch.accelerator.empty_cache()


def limit_memory(share: float, device: torch.device) -> None:
    """Limit the allocator to a share of the device's memory."""
    _module(device).set_per_process_memory_fraction(share, device)


def disable_expandable_segments() -> None:
    """Disable expandable segments in this process after the first GPU use."""
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def load_matmul_library(device: torch.device) -> int:
    """Load the matrix-product library in the calling and the backward thread. Return the bytes of
    its workspaces, which stay in the allocator: one per thread, 32 MiB each on Hopper and 8 MiB on
    older NVIDIA GPUs unless `CUBLAS_WORKSPACE_CONFIG` says otherwise."""
    # Also counts workspaces of earlier computations.
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()
    before = allocated_bytes(device)
    with torch.inference_mode(False), torch.enable_grad():  # the caller may be in another mode
        for dtype in (torch.float32, torch.float16):
            one = torch.ones(16, 16, dtype=dtype, device=device, requires_grad=True)
            torch.nn.functional.linear(one, one, one[0]).sum().backward()
            one.grad = None
        del one
    return max(0, allocated_bytes(device) - before)


def register_pinned(address: int, size_bytes: int) -> bool:
    """Register existing host memory for GPU copies. Return False if the driver refuses, or torch
    lacks the call for this maker; copies are slower then."""
    if get_gpu_type() != "cuda":
        return False
    with suppress(RuntimeError):
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))
        return True
    return False


def unregister_pinned(address: int) -> None:
    """Undo `register_pinned`; no copies may be in progress."""
    with suppress(RuntimeError):
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))


# -- random numbers


def default_generator(device: torch.device) -> torch.Generator:
    """Return the default random generator of `device`."""
    found: torch.Generator = _module(device).default_generators[add_device_index(device).index]
    return found


def _module(device: torch.device | int) -> Any:
    """Return `torch.cuda` or `torch.xpu`."""
    return torch.get_device_module(get_gpu_type() if isinstance(device, int) else device)
