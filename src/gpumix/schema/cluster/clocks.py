"""Clock rates of a GPU's cores, which the driver changes as the GPU warms up."""

from __future__ import annotations

from pydantic import Field

from gpumix.schema.value import Value

# Relative change above which a clock rate counts as different: step times then change too.
APART = 0.05


class GpuClocks(Value):
    """A reading of a computing GPU's clocks, power and temperature."""

    sm_mhz: float = Field(gt=0, description="of its multiprocessors")
    power_watts: float | None = Field(default=None, ge=0, description="that it takes")
    temperature_c: float | None = Field(default=None, description="of the chip")
