"""How fast a GPU's cores run, which its driver changes as it grows warm."""

from __future__ import annotations

from pydantic import Field

from gpumix.spec.base import Value

# By more than this part of it a clock is another one: steps then take other times.
APART = 0.05


class Clocks(Value):
    """One look at a GPU that computes."""

    sm_mhz: float = Field(gt=0, description="of its multiprocessors")
    power_watts: float | None = Field(default=None, ge=0, description="that it takes")
    temperature_c: float | None = Field(default=None, description="of the chip")
