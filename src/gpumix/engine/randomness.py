"""Random numbers that a second run of the same code sees again.

Every stretch of a micro-batch's work (a unit call, or the code between two) starts from a seed of
its own, a hash of what it is. So nothing has to be saved for the recompute, and the same step of
the same plan draws the same numbers after a resume.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch


class Randomness:
    """Seeds of one step.

    Args:
        seed, step: of the run.
        position: number of the micro-batch's first sample in the global batch.
        device: whose generator is seeded, beside the CPU's.
    """

    def __init__(self, seed: int, step: int, position: int, device: torch.device) -> None:
        digest = hashlib.sha256(f"{seed}:{step}:{position}".encode()).digest()
        self._base = int.from_bytes(digest[:7], "little")
        self._device = device

    def start(self, stretch: int) -> None:
        """Seed the generators for stretch number `stretch`."""
        # An odd multiplier spreads neighbouring numbers over the seeds' space.
        seed = (self._base + stretch * 0x9E3779B97F4A7C15) % 2**63
        _seed(seed, self._device)


def apart(number: int, device: torch.device) -> None:
    """From here on draw other numbers than those who were seeded alike and have another `number`,
    the same whenever it is called after the same seed."""
    seed = (torch.default_generator.initial_seed() + number * 0xD1B54A32D192ED03) % 2**63
    _seed(seed, device)


@contextlib.contextmanager
def untouched(device: torch.device) -> Iterator[None]:
    """Whatever is seeded or drawn inside, the caller's random numbers go on as if nothing was."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield


def _seed(seed: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
