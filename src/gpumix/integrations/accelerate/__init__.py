"""Accelerate's `Accelerator` for devices of unlike types, in a program's own training loop.

    from gpumix import Accelerator      # instead of: from accelerate

Start the script with a process per device: `gpumix launch SCRIPT`, or torchrun. A batch of a
prepared loader is this device's part of the global batch, and parts differ in size: loops take the
number of samples from the batch.
"""

from __future__ import annotations

from gpumix.integrations.common.optional_dependency import require_packages

require_packages(__name__, "accelerate", extra="trainer")

from gpumix.integrations.accelerate.accelerator import Accelerator  # noqa: E402 - a missing package first
from gpumix.profiler.api import announce_cpu_ranks  # noqa: E402

announce_cpu_ranks()

__all__ = ["Accelerator"]
