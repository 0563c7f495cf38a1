"""`Accelerator` of Accelerate, on devices that are not alike, for loops of one's own.

    from gpumix import Accelerator      # instead of: from accelerate

Start the script with one process per device: `gpumix launch SCRIPT`, or torchrun. A batch of a
prepared loader is this device's part of the batch of all devices, and not every part is as large:
loops take the number of samples from the batch.
"""

from __future__ import annotations

from gpumix.integrations.missing import need

need(__name__, "accelerate", extra="trainer")

from gpumix.integrations.accelerated import Accelerator  # noqa: E402 - what is missing comes first

__all__ = ["Accelerator"]
