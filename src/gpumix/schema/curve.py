"""Values measured at growing sizes. `cost.memory_layout.curves` interpolates between the points."""

from __future__ import annotations

from itertools import pairwise
from typing import Self

from pydantic import Field, model_validator

from gpumix.schema.units import LARGEST
from gpumix.schema.value import Value


class Curve(Value):
    """Measured values at growing sizes: seconds or bytes by samples, or seconds by bytes."""

    sizes: tuple[float, ...] = Field(min_length=1)
    values: tuple[float, ...]

    def scaled(self, factor: float) -> Self:
        """Return the curve with all values multiplied by `factor`."""
        return self.model_copy(update={"values": tuple(v * factor for v in self.values)})

    def shared_by(self, times: int) -> Self:
        """Return the curve for `times` concurrent users, each getting an equal share of speed."""
        return self.model_copy(update={"sizes": tuple(size / times for size in self.sizes)})

    def less(self, other: Curve) -> Self:
        """Subtract `other`, a curve of equal sizes, from the values; clamp at 0."""
        values = (max(0.0, a - b) for a, b in zip(self.values, other.values, strict=True))
        return self.model_copy(update={"values": tuple(values)})

    @model_validator(mode="after")
    def _well_formed(self) -> Self:
        if len(self.sizes) != len(self.values):
            raise ValueError(f"{len(self.sizes)} sizes but {len(self.values)} values")
        if self.sizes[0] <= 0 or any(b <= a for a, b in pairwise(self.sizes)):
            raise ValueError(f"sizes must be positive and grow, they are {self.sizes}")
        if any(v < 0 for v in self.values):
            raise ValueError(f"values must not be negative, they are {self.values}")
        if max(*self.sizes, *self.values) > LARGEST:
            raise ValueError(f"no size or value is beyond {LARGEST}")
        return self
