"""What slows training down that no setting mends: a GPU that is throttled, a link below its class,
a disk or cores that cannot keep up. `remarks_on` judges, and is pure; `watched` reads what the
driver and the kernel count anyway, from outside of the processes that train.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from gpumix.cost.input import STARVED_SHARE
from gpumix.data.tuning import Limit
from gpumix.hardware.gpu_health import REASONS, Look, driver, look, most_link
from gpumix.spec.files import read_log

SHARE = 0.1  # of the looks, or of the time, from which on it is told
LOOK_S = 0.2  # between looks at the GPUs
SITES = 5  # lines that are named
USED = 0.05  # of a GPU's time, below which it is not part of the training

_PRESSURE = Path("/proc/pressure/io")
_PAGED_IN = Path("/proc/vmstat")


@dataclass(frozen=True)
class GpuWatched:
    """A GPU during a window. `most`: the link that card and slot could have."""

    name: str
    most: tuple[int, int]
    looks: tuple[Look, ...]


@dataclass(frozen=True)
class Watched:
    """The machine during a window.

    Attributes:
        stalled_share: of the time in which some process waited for a disk; None: not known.
        read_bytes_per_s: that came from disks.
    """

    gpus: tuple[GpuWatched, ...]
    stalled_share: float | None
    read_bytes_per_s: float


def remarks_on(seen: Watched, *, input_share: float, retries: int = 0) -> Iterator[str]:
    """What is to be told of the machine.

    Args:
        input_share: of a step, in which a device waits for its data.
        retries: of the allocator.
    """
    for gpu in seen.gpus:
        yield from _throttled(gpu)
        yield from _narrow_link(gpu)
    if input_share > STARVED_SHARE:
        yield from _slow_disk(seen, input_share)
    if retries:
        yield (
            f"the allocator of a GPU gave memory back {retries} times to get some: memory is "
            "nearly full, or in pieces; smaller micro-batches, or PYTORCH_CUDA_ALLOC_CONF="
            "expandable_segments:True, help"
        )


def _throttled(gpu: GpuWatched) -> Iterator[str]:
    looks = [one for one in gpu.looks if one.used]
    for bit, reason in REASONS.items():
        share = sum(bool(one.reasons & bit) for one in looks) / max(1, len(looks))
        if share > SHARE:
            yield f"{gpu.name} is throttled in {share:.0%} of the time: {reason}"


def _narrow_link(gpu: GpuWatched) -> Iterator[str]:
    """Links of idle GPUs are slowed down to save power: the best of all looks counts."""
    looks = [one.link for one in gpu.looks if one.used]
    if not looks:
        return
    generation, width = map(max, zip(*looks))
    if generation * width and (generation < gpu.most[0] or width < gpu.most[1]):
        yield (
            f"the PCIe link of {gpu.name} has generation {generation} and {width} lanes, it could "
            f"have {gpu.most[0]} and {gpu.most[1]}: look at its slot, riser, and the BIOS"
        )


def _slow_disk(seen: Watched, input_share: float) -> Iterator[str]:
    stalled, rate = seen.stalled_share, seen.read_bytes_per_s
    if stalled is None or stalled <= SHARE or not rate:
        return
    need = rate / max(1e-3, 1.0 - input_share)
    yield (
        f"processes waited for a disk in {stalled:.0%} of the time: it gave {rate / 1e6:.0f} MB/s, "
        f"training takes {need / 1e6:.0f} MB/s; keep the data on a faster disk, or in memory"
    )


def still_starved(input_shares: Sequence[float], limits: Sequence[str]) -> str:
    """What is to be told of the device that waits longest for its data; empty: it does not.

    Args:
        limits: what holds the data of each back, by its loader; told where it is the cores, as else
            none is known.
    """
    share = max(input_shares)
    if share <= STARVED_SHARE:
        return ""
    limit = limits[input_shares.index(share)]
    why = f", held back by {limit}" if limit == Limit.CORES else ""
    return (
        f"a device still waits for its data in {share:.0%} of a step{why}: make reading samples "
        "cheaper (store what was decoded), or read them on a host with more cores"
    )


def written_out(lines: Sequence[str]) -> str:
    """What is to be told of attention that is a softmax between two products."""
    named = ", ".join(lines[:SITES])
    return (
        f"attention is written out at {named}, as products around a softmax, with matrices of all "
        "pairs of positions: torch.nn.functional.scaled_dot_product_attention has kernels without "
        "(torch.nn.MultiheadAttention with need_weights=False)"
    )


def too_few_cores(cpu_s: float, step_s: float, cores: float, input_share: float) -> str:
    """What is to be told where reading data, beside training itself where that is on the CPU too,
    keeps all cores busy; empty: they are not.

    Args:
        cpu_s: seconds of cores that all processes of the training take for a step.
    """
    busy = cpu_s / max(1e-9, step_s * cores)
    if input_share <= STARVED_SHARE or busy < 1.0 - SHARE:
        return ""
    return (
        f"a device waits for its data in {input_share:.0%} of a step, and all {cores:g} cores are "
        f"busy ({busy:.0%}): make reading samples cheaper (store what was decoded), or read them "
        "on a host with more cores"
    )


# -- reading ---------------------------------------------------------------------------------------


@contextmanager
def watched() -> Iterator[Callable[[], Watched]]:
    """Watch the machine in here; gives a function that tells what was seen, for afterwards."""
    gpus: list[GpuWatched] = []
    ended = threading.Event()
    thread = threading.Thread(target=_look, args=(gpus, ended), name="gpumix-looks", daemon=True)
    begun_s, stalled_s, read_bytes = time.perf_counter(), _stalled_s(), _read_bytes()
    thread.start()
    found: list[Watched] = []
    try:
        yield lambda: found[0]
    finally:
        ended.set()
        thread.join()
        seconds = max(1e-9, time.perf_counter() - begun_s)
        now_s = _stalled_s()
        share = None if now_s is None or stalled_s is None else (now_s - stalled_s) / seconds
        found.append(Watched(tuple(gpus), share, (_read_bytes() - read_bytes) / seconds))


def _look(gpus: list[GpuWatched], ended: threading.Event) -> None:
    """At all GPUs until the end; at none where there is no driver, or it does not answer."""
    with driver() as nvml:
        if nvml is not None:
            with suppress(nvml.NVMLError):
                gpus += look_at(nvml, lambda: ended.wait(LOOK_S))


def look_at(nvml: ModuleType | Any, ended: Callable[[], bool]) -> list[GpuWatched]:
    """Look at each GPU until `ended()`, which waits in between."""
    count = nvml.nvmlDeviceGetCount()
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    looks: list[list[Look]] = [[] for _ in handles]
    while not ended():
        for handle, seen in zip(handles, looks):
            seen.append(look(nvml, handle, USED))
    return [
        GpuWatched(f"GPU {index}", most_link(nvml, handle), tuple(seen))
        for index, (handle, seen) in enumerate(zip(handles, looks))
    ]


def stalled_us(text: str) -> int | None:
    """Of the kernel's account of waits for disks: all microseconds in which some process waited."""
    for line in text.splitlines():
        if line.startswith("some "):
            return int(line.rpartition("total=")[2])
    return None


def paged_in_bytes(text: str) -> int:
    """Of the kernel's counters: all bytes that were read from disks."""
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
