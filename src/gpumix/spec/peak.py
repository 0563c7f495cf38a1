"""The most that a device class computes: what its utilisation is measured against."""

from __future__ import annotations

from typing import Literal

from gpumix.spec.base import Value
from gpumix.spec.units import FlopRate


class Peak(Value):
    """Dense matrix products in the dtype that a class computes in.

    It is `stated` by a datasheet or the cluster file, the rate of an `emulated` device, or what a
    large product reached when the class was `measured`.
    """

    flops_per_s: FlopRate
    source: Literal["stated", "emulated", "measured"]
