"""Which devices there are, as the environment says it.

`GPUMIX_TEST_CUDA` has a number of H100s, or names with memory in GiB: `h100:2,t4:0.5`.
`CUDA_VISIBLE_DEVICES` chooses among them, as of real ones.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID, uuid5

DEVICES = "GPUMIX_TEST_CUDA"
LIBRARY = "GPUMIX_TEST_CUDA_LIBRARY"
LAG = "GPUMIX_TEST_CUDA_LAG"
CONTEXT = "GPUMIX_TEST_CUDA_CONTEXT_MIB"  # what a process has of each device it uses, but tensors
OTHERS = "GPUMIX_TEST_CUDA_OTHERS_GIB"  # what other processes have of each device
PATH = Path(__file__).parent / "path"
GIB = 2**30
MIB = 2**20
CONTEXT_MIB = 256
# Product, compute capability, GiB, multiprocessors.
PRODUCTS = {
    "h100": ("NVIDIA H100 80GB HBM3", (9, 0), 79.1, 132),
    "a100": ("NVIDIA A100-SXM4-40GB", (8, 0), 39.4, 108),
    "l4": ("NVIDIA L4", (8, 9), 22.0, 58),
    "t4": ("Tesla T4", (7, 5), 14.6, 40),
}


@dataclass(frozen=True)
class Device:
    """One device."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    uuid: UUID


def devices() -> list[Device]:
    """The devices that this process sees.

    Raises:
        ValueError: the variable is none of those described above.
    """
    words = os.environ.get(DEVICES, "2").split(",")
    if len(words) == 1 and words[0].isdigit():
        words = ["h100"] * int(words[0])
    return _visible([_device(number, word) for number, word in enumerate(words)])


def _device(number: int, word: str) -> Device:
    kind, _, gib = word.partition(":")
    if kind not in PRODUCTS:
        raise ValueError(f"{DEVICES}={word}: the products are {', '.join(PRODUCTS)}")
    name, (major, minor), usual_gib, processors = PRODUCTS[kind]
    memory = int(float(gib or usual_gib) * GIB)
    return Device(name, major, minor, memory, processors, uuid5(UUID(int=0), f"{kind} {number}"))


def _visible(all_of_them: list[Device]) -> list[Device]:
    """As CUDA: the first entry that names none hides itself and all that follow."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return all_of_them
    found: list[Device] = []
    for entry in (word.strip() for word in text.split(",")):
        if entry.isdigit():
            named = all_of_them[int(entry) : int(entry) + 1]
        else:
            named = [one for one in all_of_them if entry and f"GPU-{one.uuid}".startswith(entry)]
        if len(named) != 1 or named[0] in found:
            break
        found += named
    return found


def is_here() -> bool:
    """Whether this process has the devices of this package."""
    return bool(os.environ.get(LIBRARY))


def environment(library: Path, devices: str = "2", lag: str = "") -> dict[str, str]:
    """What a process needs in its environment to have the devices, beside its own.

    Args:
        library: see `build.library`.
    """
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [str(PATH), *(path for path in before if path and path != str(PATH))]
    found = {DEVICES: devices, LIBRARY: str(library), "PYTHONPATH": os.pathsep.join(paths)}
    # There is nothing that kernels of Triton could be compiled for.
    found |= {"TRITON_INTERPRET": "1", "TORCH_DISABLE_NATIVE_JIT": "1"}
    return found | ({LAG: lag} if lag else {})
