"""Peak compute rate of a device class, the reference for utilization."""

from __future__ import annotations

from typing import Literal

from gpumix.schema.units import FlopRate
from gpumix.schema.value import Value


class Peak(Value):
    """Peak rate of dense matrix products in the class's compute dtype.

    The rate is `stated` by a datasheet or the cluster file, set for an `emulated` device, or
    `measured` on a large product.
    """

    flops_per_s: FlopRate
    source: Literal["stated", "emulated", "measured"]
