"""Slowdowns without a fix by settings: throttled GPUs, slow links, disks or cores. `remark_on_...`
judge, and are pure; `watch_machine` reads counters of driver and kernel, from outside of the
training processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from gpumix.cost.input_time import MIN_STARVED_SHARE
from gpumix.data.workers.autotune import Limit
from gpumix.doctor.report import Remark
from gpumix.hardware.discovery.gpu_health import (
    THROTTLE_REASONS,
    GpuReading,
    open_nvml,
    read_gpu,
    read_max_link,
)
from gpumix.schema.files import read_log

SHARE = 0.1  # fraction of samples, or of the time, above which a problem is reported
LOOK_S = 0.2  # between samples of the GPUs
SITES = 5  # lines named in a message
LEAST_BYTES_PER_S = 1e6  # read from disks, below which waits for them are not for samples
USED = 0.05  # fraction of a GPU's time below which the GPU counts as unused
ADVICE = (
    "make reading samples cheaper (store what was decoded), or read them on a host with more cores"
)

_PRESSURE = Path("/proc/pressure/io")
_PAGED_IN = Path("/proc/vmstat")


@dataclass(frozen=True)
class GpuSamples:
    """Samples of a GPU during a window. `most`: the best link supported by card and slot."""

    name: str
    most: tuple[int, int]
    looks: tuple[GpuReading, ...]


@dataclass(frozen=True)
class MachineObservations:
    """State of the machine during a window.

    Attributes:
        stalled_share: fraction of the time in which a process waited for a disk; None: unknown.
        read_bytes_per_s: read from disks.
    """

    gpus: tuple[GpuSamples, ...]
    stalled_share: float | None
    read_bytes_per_s: float


def remark_on_machine(
    seen: MachineObservations, *, input_share: float, retries: int = 0
) -> Iterator[Remark]:
    """Remark on GPUs, links, disks and the allocator.

    Args:
        input_share: fraction of a step spent waiting for data.
        retries: of the allocator.
    """
    for gpu in seen.gpus:
        yield from _throttled(gpu)
        yield from _narrow_link(gpu)
    if input_share > MIN_STARVED_SHARE:
        yield from _slow_disk(seen, input_share)
    if retries:
        yield Remark(
            "allocator",
            f"the allocator of a GPU gave memory back {retries} times to get some: memory is "
            "nearly full, or in pieces; smaller micro-batches, or PYTORCH_CUDA_ALLOC_CONF="
            "expandable_segments:True, help",
        )


def _throttled(gpu: GpuSamples) -> Iterator[Remark]:
    looks = [one for one in gpu.looks if one.used]
    for bit, reason in THROTTLE_REASONS.items():
        share = sum(bool(one.reasons & bit) for one in looks) / max(1, len(looks))
        if share > SHARE:
            text = f"{gpu.name} is throttled in {share:.0%} of the time: {reason}"
            yield Remark("throttled", text)


def _narrow_link(gpu: GpuSamples) -> Iterator[Remark]:
    """Report a slow PCIe link, by its best sample: idle GPUs slow links to save power."""
    looks = [one.link for one in gpu.looks if one.used]
    if not looks:
        return
    generation, width = map(max, zip(*looks))
    if generation * width and (generation < gpu.most[0] or width < gpu.most[1]):
        yield Remark(
            "pcie_link",
            f"the PCIe link of {gpu.name} has generation {generation} and {width} lanes, it could "
            f"have {gpu.most[0]} and {gpu.most[1]}: look at its slot, riser, and the BIOS",
        )


def _slow_disk(seen: MachineObservations, input_share: float) -> Iterator[Remark]:
    stalled, rate = seen.stalled_share, seen.read_bytes_per_s
    if stalled is None or stalled <= SHARE or rate < LEAST_BYTES_PER_S:
        return
    need = rate / max(1e-3, 1.0 - input_share)
    yield Remark(
        "disk",
        f"processes waited for a disk in {stalled:.0%} of the time: it gave {rate / 1e6:.0f} MB/s, "
        f"training takes {need / 1e6:.0f} MB/s; keep the data on a faster disk, or in memory",
    )


def remark_on_starvation(input_shares: Sequence[float], limits: Sequence[str]) -> Iterator[Remark]:
    """Remark on the longest wait for data, of all ranks.

    Args:
        limits: bottleneck of each rank's data, as found by the loader; only `Limit.CORES` is
            reported.
    """
    share = max(input_shares)
    if share <= MIN_STARVED_SHARE:
        return
    limit = limits[input_shares.index(share)]
    why = f", held back by {limit}" if limit == Limit.CORES else ""
    yield Remark(
        "starved", f"training still waits for its data in {share:.0%} of a step{why}: {ADVICE}"
    )


def remark_on_unfused_attention(lines: Sequence[str]) -> Iterator[Remark]:
    """Remark on lines with unfused attention."""
    if lines:
        named = ", ".join(lines[:SITES])
        yield Remark(
            "unfused_attention",
            f"attention is written out at {named}, as products around a softmax, with matrices of "
            "all pairs of positions: torch.nn.functional.scaled_dot_product_attention has kernels "
            "without (torch.nn.MultiheadAttention with need_weights=False)",
        )


def remark_on_cores(
    cpu_s: float, step_s: float, cores: float, input_share: float
) -> Iterator[Remark]:
    """Remark on a shortage of cores for reading data (and for training on a CPU).

    Args:
        cpu_s: CPU seconds per step of all training processes.
    """
    busy = cpu_s / max(1e-9, step_s * cores)
    if input_share > MIN_STARVED_SHARE and busy >= 1.0 - SHARE:
        yield Remark(
            "cores",
            f"training waits for its data in {input_share:.0%} of a step, and all {cores:g} cores "
            f"are busy ({busy:.0%}): {ADVICE}",
        )


# -- reading ---------------------------------------------------------------------------------------


@contextmanager
def watch_machine() -> Iterator[Callable[[], MachineObservations]]:
    """Watch the machine; provide a function returning the observations after the block."""
    gpus: list[GpuSamples] = []
    ended = threading.Event()
    thread = threading.Thread(
        target=_sample_gpus, args=(gpus, ended), name="gpumix-looks", daemon=True
    )
    begun_s, stalled_s, read_bytes = time.perf_counter(), _stalled_s(), _read_bytes()
    thread.start()
    found: list[MachineObservations] = []
    try:
        yield lambda: found[0]
    finally:
        ended.set()
        thread.join()
        seconds = max(1e-9, time.perf_counter() - begun_s)
        now_s = _stalled_s()
        share = None if now_s is None or stalled_s is None else (now_s - stalled_s) / seconds
        found.append(
            MachineObservations(tuple(gpus), share, (_read_bytes() - read_bytes) / seconds)
        )


def _sample_gpus(gpus: list[GpuSamples], ended: threading.Event) -> None:
    """Sample all GPUs until `ended`; without a working driver, none."""
    with open_nvml() as nvml:
        if nvml is not None:
            with suppress(nvml.NVMLError):
                gpus += sample_gpus(nvml, lambda: ended.wait(LOOK_S))


def sample_gpus(nvml: ModuleType | Any, ended: Callable[[], bool]) -> list[GpuSamples]:
    """Sample each GPU until `ended()`, which waits between samples."""
    count = nvml.nvmlDeviceGetCount()
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    looks: list[list[GpuReading]] = [[] for _ in handles]
    while not ended():
        for handle, seen in zip(handles, looks):
            seen.append(read_gpu(nvml, handle, USED))
    return [
        GpuSamples(f"GPU {index}", read_max_link(nvml, handle), tuple(seen))
        for index, (handle, seen) in enumerate(zip(handles, looks))
    ]


def stalled_us(text: str) -> int | None:
    """Return the total microseconds of disk waits from the kernel's pressure report."""
    for line in text.splitlines():
        if line.startswith("some "):
            return int(line.rpartition("total=")[2])
    return None


def paged_in_bytes(text: str) -> int:
    """Return the total bytes read from disks from the kernel's counters."""
    fields: Sequence[list[str]] = [line.split() for line in text.splitlines()]
    return next((int(kib) * 1024 for name, kib in fields if name == "pgpgin"), 0)


def _stalled_s() -> float | None:
    with suppress(OSError, ValueError):
        found = stalled_us(read_log(_PRESSURE))
        return None if found is None else found / 1e6
    return None


def _read_bytes() -> int:
    with suppress(OSError, ValueError):
        return paged_in_bytes(read_log(_PAGED_IN))
    return 0
