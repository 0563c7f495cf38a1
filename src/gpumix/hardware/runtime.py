"""The GPU of any maker, as torch shows it: streams, events, memory and random numbers.

The only file that names `torch.cuda` and `torch.xpu`; a test holds that. What torch has for every
accelerator is taken from there (`torch.accelerator`, `torch.Stream`, `torch.Event`), the rest from
the module of the device: `torch.cuda` for NVIDIA and AMD, `torch.xpu` for Intel. Functions of torch
are looked up at each call, so that a device for tests may replace them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from gpumix.spec.errors import first_line

Stream: TypeAlias = torch.Stream
Event: TypeAlias = torch.Event

# Backends of torch.distributed by the type of devices.
GPU_BACKENDS = {"cuda": "nccl", "xpu": "xccl"}


# -- which devices there are


def is_gpu(device: torch.device | str) -> bool:
    """Whether `device` is a GPU, whoever made it."""
    return torch.device(device).type in GPU_BACKENDS


def kind() -> str:
    """The type of this torch build's GPUs: 'cuda' (NVIDIA, and AMD by ROCm), 'xpu' (Intel), or ''
    where the build knows none. Says nothing about drivers and cards."""
    found = torch.accelerator.current_accelerator()
    return found.type if found is not None and found.type in GPU_BACKENDS else ""


def is_available() -> bool:
    """Whether torch can compute on a GPU in this process."""
    return bool(kind()) and torch.accelerator.is_available()


def is_initialized() -> bool:
    """Whether this process has used a GPU: False costs nothing and makes no context."""
    return bool(kind()) and bool(torch.get_device_module(kind()).is_initialized())


def device_count() -> int:
    """How many GPUs this process sees."""
    return torch.accelerator.device_count() if kind() else 0


def current_device() -> torch.device:
    """The GPU, with its number, that work of the calling thread goes to."""
    return torch.device(kind(), torch.accelerator.current_device_index())


def set_device(ordinal: int) -> None:
    """Send the calling thread's work to GPU number `ordinal`."""
    torch.accelerator.set_device_index(ordinal)


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """A context in which the calling thread's current GPU is `device`."""
    return torch.accelerator.device_index(device.index)


def indexed(device: torch.device | str) -> torch.device:
    """The device with its number: "cuda" is the calling thread's current GPU."""
    found = torch.device(device)
    return current_device() if is_gpu(found) and found.index is None else found


def backend_of(device: torch.device) -> str:
    """The backend of torch.distributed for tensors on `device`."""
    return GPU_BACKENDS.get(device.type, "gloo")


# -- which product a device is


def is_nvidia() -> bool:
    """Whether the GPUs of this torch build are NVIDIA's."""
    return kind() == "cuda" and torch.version.hip is None


@dataclass(frozen=True)
class Properties:
    """One GPU as torch describes it.

    Attributes:
        kind: 'cuda' (NVIDIA's and AMD's) or 'xpu' (Intel's).
        uuid: in hexadecimal; empty where the driver tells none.
        driver: what torch knows of the driver's version; empty for NVIDIA's.
        compute_capability: of NVIDIA's, such as "9.0".
        gfx_target: of AMD's, such as "gfx942".
    """

    kind: str
    product: str
    memory_bytes: int
    uuid: str
    driver: str
    compute_capability: str
    gfx_target: str


def properties(ordinal: int) -> Properties:
    """What GPU number `ordinal` is."""
    found = _module(ordinal).get_device_properties(ordinal)
    return Properties(
        kind=kind(),
        product=str(found.name),
        memory_bytes=int(found.total_memory),
        uuid=str(getattr(found, "uuid", "")),
        driver=str(getattr(found, "driver_version", "") or torch.version.hip or ""),
        compute_capability="{}.{}".format(*capability(ordinal)) if is_nvidia() else "",
        gfx_target=gfx_target(ordinal),
    )


def why_none() -> str:
    """Why torch shows no GPU, in torch's words."""
    if not kind():
        return "this torch is built for CPUs only"
    try:
        torch.get_device_module(kind()).init()
    except Exception as error:  # torch raises what its drivers say
        return first_line(error)
    return ""


def device_name(device: torch.device | int) -> str:
    """The product, such as 'NVIDIA H100 PCIe'."""
    return str(_module(device).get_device_name(device))


def device_uuid(device: torch.device | int) -> str:
    """The UUID in hexadecimal, without a prefix."""
    return str(_module(device).get_device_properties(device).uuid)


def capability(device: torch.device | int | None = None) -> tuple[int, int]:
    """CUDA's compute capability; of AMD's GPUs the numbers of their architecture, and (0, 0) for
    Intel's, which have none."""
    if kind() != "cuda":
        return (0, 0)
    major, minor = torch.cuda.get_device_capability(device)
    return major, minor


def gfx_target(device: torch.device | int) -> str:
    """The architecture of AMD's GPU, such as "gfx942"; empty for other makers'."""
    if torch.version.hip is None:
        return ""
    return str(_module(device).get_device_properties(device).gcnArchName.partition(":")[0])


def built_architectures() -> tuple[str, ...]:
    """The architectures that this torch build has kernels for, such as 'sm_90'. Unlike
    `torch.cuda.get_arch_list` it answers where the driver is too old."""
    found = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()
    return tuple((found or "").split())


def nccl_version() -> str:
    """Of the NCCL (for AMD: RCCL) that this torch build has."""
    return ".".join(map(str, torch.cuda.nccl.version()))


# -- streams and events


def synchronize(device: torch.device | None = None) -> None:
    """Wait until all work given to `device` (default: the current GPU) is done. A CPU has none."""
    if device is None or is_gpu(device):
        torch.accelerator.synchronize(device)


def new_stream(device: torch.device) -> Stream:
    """A stream of `device` beside the one that it computes on."""
    return torch.Stream(device)


def current_stream(device: torch.device) -> Stream:
    """The stream that the calling thread's work for `device` goes to."""
    return torch.accelerator.current_stream(device)


@contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """In here the calling thread's work goes to `stream`, and to its device; None changes nothing.

    Not `with stream:`, which keeps what it restores in the stream, so that neither two threads nor
    one within itself may enter it.
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
    """An event of `device`, not recorded yet; with `timing` it can tell milliseconds."""
    return torch.Event(device, enable_timing=timing)


def recorded_event(device: torch.device, *, timing: bool = False) -> Event:
    """An event at the end of the work that the calling thread has given to `device` so far."""
    event = new_event(device, timing=timing)
    event.record(current_stream(device))
    return event


def profiler_activity() -> torch.profiler.ProfilerActivity:
    """What `torch.profiler` calls the kernels of this torch build's GPUs."""
    return getattr(torch.profiler.ProfilerActivity, kind().upper())


def get_sync_debug_mode() -> int:
    """Whether torch tells of waits for the GPU: 0 no, 1 by a warning, 2 by an error."""
    return torch.cuda.get_sync_debug_mode() if kind() == "cuda" else 0


def set_sync_debug_mode(mode: int | str) -> None:
    """Let torch tell of waits for the GPU; for Intel's it cannot."""
    if kind() == "cuda":
        torch.cuda.set_sync_debug_mode(mode)


# -- memory


def total_bytes(ordinal: int) -> int:
    """All memory of GPU number `ordinal`. Makes no context on it."""
    return int(_module(ordinal).get_device_properties(ordinal).total_memory)


def has_context(ordinal: int) -> bool:
    """Whether this process has a context on GPU number `ordinal`; so far as torch tells."""
    ask = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return is_initialized() and (ask is None or bool(ask(ordinal)))


def free_and_total_bytes(device: torch.device | None = None) -> tuple[int, int]:
    """What the driver says of the device's memory, other processes' use included."""
    free, total = torch.accelerator.get_memory_info(device)
    return free, total


def allocated_bytes(device: torch.device | None = None) -> int:
    """Bytes of tensors now."""
    return torch.accelerator.memory_allocated(device)


def peak_allocated_bytes(device: torch.device | None = None) -> int:
    """The most bytes of tensors since `reset_peak`."""
    return torch.accelerator.max_memory_allocated(device)


def reserved_bytes(device: torch.device | None = None) -> int:
    """Bytes that the allocator holds of the device, for tensors and for reuse."""
    return torch.accelerator.memory_reserved(device)


def peak_reserved_bytes(device: torch.device | None = None) -> int:
    """The most bytes that the allocator held since `reset_peak`."""
    return torch.accelerator.max_memory_reserved(device)


def reset_peak(device: torch.device | None = None) -> None:
    """Let both peaks begin at what is in use now."""
    torch.accelerator.reset_peak_memory_stats(device)


def allocator_retries(device: torch.device | None = None) -> int:
    """How often the allocator had to give memory back to the driver to get some."""
    return int(torch.accelerator.memory_stats(device).get("num_alloc_retries", 0))


def empty_cache() -> None:
    """Give the allocator's unused memory back to the driver."""
    torch.accelerator.empty_cache()


def limit_memory(share: float, device: torch.device) -> None:
    """Let the allocator take at most this share of the device's memory."""
    _module(device).set_per_process_memory_fraction(share, device)


def keep_segments_fixed() -> None:
    """Let the allocator of this process, which has used GPUs already, grow no segments."""
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def load_products(device: torch.device) -> int:
    """Load the library of matrix products in both threads that call it, the calling one and that of
    backward. Returns the bytes of the workspaces that it keeps in the allocator from then on: one
    for each thread, of 32 MiB each on Hopper and 8 MiB on older NVIDIA GPUs unless
    `CUBLAS_WORKSPACE_CONFIG` says otherwise."""
    # Those of a program that has computed before are counted too.
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()
    before = allocated_bytes(device)
    with torch.inference_mode(False), torch.enable_grad():  # whoever opens the device in them
        for dtype in (torch.float32, torch.float16):
            one = torch.ones(16, 16, dtype=dtype, device=device, requires_grad=True)
            torch.nn.functional.linear(one, one, one[0]).sum().backward()
            one.grad = None
        del one
    return max(0, allocated_bytes(device) - before)


def register_pinned(address: int, size_bytes: int) -> bool:
    """Let the GPU copy to and from memory that the host has already; False: the driver refuses, or
    torch has no such call for the maker's GPUs, and copies are slower."""
    if kind() != "cuda":
        return False
    with suppress(RuntimeError):
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))
        return True
    return False


def unregister_pinned(address: int) -> None:
    """Take back `register_pinned`; nothing may be copied there any more."""
    with suppress(RuntimeError):
        torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(address))


# -- random numbers


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that functions on `device` draw from unless they are given one."""
    found: torch.Generator = _module(device).default_generators[indexed(device).index]
    return found


def _module(device: torch.device | int) -> Any:
    """`torch.cuda` or `torch.xpu`."""
    return torch.get_device_module(kind() if isinstance(device, int) else device)
