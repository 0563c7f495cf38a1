"""Performance settings of a device class besides dtype and compilation, and their job options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from gpumix.schema.cluster.cluster import CLASS_NAME
from gpumix.schema.value import Value

Attention = Literal["own", "sdpa", "flash", "eager"]
Kernels = Literal["torch", "liger"]
LossKernel = Literal["torch", "triton"]
ClassName = Annotated[str, Field(pattern=CLASS_NAME)]
Auto = Literal["auto"]
T = TypeVar("T")


class KernelSettings(Value):
    """Performance settings of a device class. Every device supports the defaults."""

    tf32: bool = Field(default=False, description="fp32 products on tensor cores, in 10 bits")
    attention: Attention = Field(default="own", description="`own` is what the model comes with")
    kernels: Kernels = Field(default="torch", description="of norms and gated layers")
    loss: LossKernel = Field(default="torch", description="of chunked cross-entropy")
    fused_optimizer: bool = Field(default=True, description="whether its update is one kernel")
    channels_last: bool = Field(default=False, description="how batches of images lie in memory")

    def settings(self) -> dict[str, bool | str]:
        """Return the settings by name."""
        return dict(self)


PLAIN_EFFICIENCY = KernelSettings()


class SettingChoice(Value):
    """A setting chosen for a class, with the reason."""

    what: str
    value: str
    why: str


class EfficiencySpec(Value):
    """Performance options of a job: `auto` uses a table; a value applies to all classes, or by
    class. Unsupported options are errors. An option found to change the results is not used."""

    tf32: Auto | bool | dict[ClassName, bool] = Field(
        default="auto",
        description="fp32 products on tensor cores, with 10 bits of mantissa: `on` or `off`",
    )
    attention: Auto | Attention | dict[ClassName, Attention] = Field(
        default="auto",
        description="`own` is the model's, `flash` needs the package flash-attn",
    )
    kernels: Auto | Kernels | dict[ClassName, Kernels] = Field(
        default="auto",
        description="kernels of norms and gated layers; `liger` needs the package liger-kernel",
    )
    loss: Auto | LossKernel | dict[ClassName, LossKernel] = Field(
        default="auto",
        description="kernel of the chunked cross-entropy; `triton` needs the package triton",
    )
    fused_optimizer: Auto | bool | dict[ClassName, bool] = Field(
        default="auto", description="one kernel for updates of adamw and sgd: `on` or `off`"
    )
    channels_last: Auto | bool | dict[ClassName, bool] = Field(
        default="auto", description="memory layout of image batches: `on` or `off`"
    )

    def pins(self, device_class: str) -> dict[str, bool | str]:
        """Return the settings given explicitly for a class, by name."""
        said = ((name, _select_for_class(value, device_class)) for name, value in self)
        return {name: value for name, value in said if value != "auto"}

    def named(self) -> Iterator[tuple[str, str]]:
        """Yield each key with class names, together with each class name."""
        for key, value in self:
            if isinstance(value, Mapping):
                yield from ((key, name) for name in value)


def _select_for_class(value: T | Mapping[str, T], device_class: str) -> T | Auto:
    return value.get(device_class, "auto") if isinstance(value, Mapping) else value
