"""Best performance settings of each device class: a table with reasons.

Every choice is checked on the device while measuring (`profiler.compute.numerics_check`): a choice
whose results differ from plain fp32 beyond a tolerance is not used. A job may pin any setting.
Pure; the table's sources are in `docs/design/efficiency.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpumix.schema.cluster.cluster import Cluster, DeviceClass
from gpumix.schema.cluster.kernels import (
    PLAIN_EFFICIENCY,
    EfficiencySpec,
    KernelSettings,
    SettingChoice,
)
from gpumix.schema.errors import InputError
from gpumix.schema.plan.dtypes import explain_compute_dtype
from gpumix.schema.plan.stage import ComputeDtype

# Minimum compute capability of flash-attn and Liger, and of Triton.
AMPERE, VOLTA = (8, 0), (7, 0)


@dataclass(frozen=True)
class InstalledPackages:
    """Optional packages present in the environment."""

    flash_attn: bool = False
    liger_kernel: bool = False
    triton: bool = False


@dataclass(frozen=True)
class KernelContext:
    """A class with its dtype, compilation and packages, as input of the table."""

    device_class: DeviceClass
    dtype: ComputeDtype
    compiled: bool
    installed: InstalledPackages

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability of an NVIDIA GPU; (0, 0) if unknown, and for all other devices."""
        parts = self.device_class.compute_capability.split(".")
        if self.device_class.accelerator != "cuda" or len(parts) != 2:
            return 0, 0
        return int(parts[0]), int(parts[1])

    def explain_lack(self, least: tuple[int, int]) -> str:
        """Return the reason why the class lacks a compute capability, or "" if it does not."""
        if self.device_class.emulated:
            return "an emulated device computes by plain operations, which it counts"
        if self.device_class.accelerator == "cpu":
            return "that is for GPUs"
        if self.capability < least:
            return f"that begins with compute capability {least[0]}.{least[1]}"
        return ""


Found = tuple[Any, str]
"""A value, with the reason."""


@dataclass(frozen=True)
class KernelRow:
    """Table row of a setting.

    Attributes:
        auto: returns the automatic choice, with the reason.
        obstacle: returns the reason why a class cannot use the job's value; empty if it can.
    """

    auto: Callable[[KernelContext], Found]
    obstacle: Callable[[KernelContext, Any], str]


def _tf32(at: KernelContext) -> Found:
    if lacks := at.explain_lack(AMPERE):
        return False, lacks
    if at.dtype == "fp32":
        return False, "fp32 is asked for, of whose 23 bits TF32 keeps 10"
    return True, f"beside {at.dtype} nothing needs the other 13 bits"


def _attention(at: KernelContext) -> Found:
    lacks = at.explain_lack(AMPERE)
    if lacks or at.dtype == "fp32":
        return "own", "torch has kernels for every device" if lacks else "flash-attn has no fp32"
    if not at.installed.flash_attn:
        return "own", "torch's own fused kernels; flash-attn is not installed"
    return "flash", "flash-attn is installed, and made for these cards"


def _kernels(at: KernelContext) -> Found:
    if lacks := at.explain_lack(AMPERE):
        return "torch", f"Liger's: {lacks}"
    if at.compiled:
        return "torch", "compiled code fuses them by itself"
    if not at.installed.liger_kernel:
        return "torch", "liger-kernel is not installed"
    return "liger", "norms and gated layers in one kernel each, without their temporaries"


def _loss(at: KernelContext) -> Found:
    if lacks := at.explain_lack(VOLTA):
        return "torch", f"Triton's: {lacks}"
    if not at.installed.triton:
        return "torch", "triton is not installed"
    return "triton", "losses and their gradient in one kernel, where it is faster"


def _fused_optimizer(at: KernelContext) -> Found:
    return True, "one pass over memory, and no temporaries"


def _channels_last(at: KernelContext) -> Found:
    if lacks := at.explain_lack(VOLTA):
        return False, f"convolutions on tensor cores: {lacks}"
    if at.dtype == "fp32":
        return False, "it brings nothing in fp32"
    return True, "tensor cores convolve images that lie so; other batches have none"


def _find_no_obstacle(at: KernelContext, wanted: Any) -> str:
    return ""


def _no_tf32(at: KernelContext, wanted: Any) -> str:
    return at.explain_lack(AMPERE) if wanted else ""


def _no_attention(at: KernelContext, wanted: Any) -> str:
    if wanted != "flash":
        return ""
    lacks = at.explain_lack(AMPERE) or ("it has no fp32" if at.dtype == "fp32" else "")
    return lacks or _missing(at.installed.flash_attn, "flash-attn")


def _no_liger(at: KernelContext, wanted: Any) -> str:
    if wanted != "liger":
        return ""
    return at.explain_lack(AMPERE) or _missing(at.installed.liger_kernel, "liger-kernel")


def _no_triton(at: KernelContext, wanted: Any) -> str:
    return (at.explain_lack(VOLTA) or _missing(at.installed.triton, "triton")) * (
        wanted == "triton"
    )


def _missing(installed: bool, package: str) -> str:
    return "" if installed else f"{package} is not installed (pip install {package})"


SETTINGS_TABLE: Mapping[str, KernelRow] = {
    "tf32": KernelRow(_tf32, _no_tf32),
    "attention": KernelRow(_attention, _no_attention),
    "kernels": KernelRow(_kernels, _no_liger),
    "loss": KernelRow(_loss, _no_triton),
    "fused_optimizer": KernelRow(_fused_optimizer, _find_no_obstacle),
    "channels_last": KernelRow(_channels_last, _find_no_obstacle),
}


# In addition to the defaults in `PLAIN_EFFICIENCY`.
_PLAINEST: dict[str, bool | str] = {"dtype": "fp32", "compile": False, "fused_optimizer": False}


@dataclass(frozen=True)
class ChosenSettings:
    """Settings of a class with reasons, including dtype and compilation."""

    efficiency: KernelSettings
    choices: tuple[SettingChoice, ...]

    def why(self, name: str) -> str:
        """Return the reason for a setting."""
        return next((one.why for one in self.choices if one.what == name), "")

    def without(self, name: str, why: str) -> ChosenSettings:
        """Return the settings with a plain value for `name`."""
        plain = (PLAIN_EFFICIENCY.settings() | _PLAINEST)[name]
        changed = {name: plain} if name in SETTINGS_TABLE else {}
        told = self._told(name, value=format_setting(plain), why=why)
        return ChosenSettings(self.efficiency.model_copy(update=changed), told)

    def with_reason(self, name: str, why: str) -> ChosenSettings:
        """Return the settings with a different reason for `name`."""
        return ChosenSettings(self.efficiency, self._told(name, why=why))

    def _told(self, name: str, **changes: str) -> tuple[SettingChoice, ...]:
        """Return the choices with changes to the entry for `name`."""
        return tuple(
            one.model_copy(update=changes) if one.what == name else one for one in self.choices
        )


PLAIN_SETTINGS = ChosenSettings(PLAIN_EFFICIENCY, ())


def choose_kernel_settings(
    spec: EfficiencySpec,
    cluster: Cluster,
    *,
    dtypes: Mapping[str, ComputeDtype],
    compiled: frozenset[str],
    installed: InstalledPackages,
) -> dict[str, ChosenSettings]:
    """Choose the settings of each class of a cluster, by name.

    Raises:
        InputError: the job names an unknown class, or a setting unsupported by a class.
    """
    for key, name in spec.named():
        cluster.refuse_unknown(f"advanced.efficiency.{key}", [name])
    return {
        c.name: _chosen(spec, KernelContext(c, dtypes[c.name], c.name in compiled, installed))
        for c in cluster.classes
    }


def _chosen(spec: EfficiencySpec, at: KernelContext) -> ChosenSettings:
    name, pins = at.device_class.name, spec.pins(at.device_class.name)
    compiled = (
        "as asked" if at.compiled else "compiling takes a while: `torch_compile: on` asks for it"
    )
    choices = [
        SettingChoice(
            what="dtype", value=at.dtype, why=explain_compute_dtype(at.device_class, at.dtype)
        ),
        SettingChoice(what="compile", value=format_setting(at.compiled), why=compiled),
    ]
    settings: dict[str, Any] = {}
    for key, row in SETTINGS_TABLE.items():
        value, why = (pins[key], "as asked") if key in pins else row.auto(at)
        if key in pins and (obstacle := row.obstacle(at, value)):
            raise InputError(
                f"device class '{name}' cannot have 'advanced.efficiency.{key}' "
                f"{format_setting(value)}",
                code="efficiency-not-possible",
                why=obstacle,
                fix=f"leave the class out: `advanced.efficiency.{key}: "
                f"{{OTHER_CLASS: {format_setting(value)}}}`",
            )
        settings[key] = value
        choices.append(SettingChoice(what=key, value=format_setting(value), why=why))
    return ChosenSettings(KernelSettings(**settings), tuple(choices))


def format_setting(value: bool | str) -> str:
    """Format a value as written in a job."""
    return ("on" if value else "off") if isinstance(value, bool) else value
