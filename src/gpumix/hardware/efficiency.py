"""How each device class computes best: one table, with reasons.

What a row chooses is still checked on the device, where it is measured (`profiler.agreement`): what
computes something else than plain fp32 does, within a tolerance, is not used. A job may pin any of
them. Pure; the table's sources are in `docs/design/efficiency.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpumix.spec.cluster import Cluster, DeviceClass
from gpumix.spec.dtypes import reason
from gpumix.spec.efficiency import PLAIN_EFFICIENCY, Choice, Efficiency, EfficiencySpec
from gpumix.spec.errors import InputError
from gpumix.spec.stage import ComputeDtype

# Of GPUs: what flash-attn and Liger are written for, and what Triton makes code for.
AMPERE, VOLTA = (8, 0), (7, 0)


@dataclass(frozen=True)
class Installed:
    """Packages that are here."""

    flash_attn: bool = False
    liger_kernel: bool = False
    triton: bool = False


@dataclass(frozen=True)
class Setting:
    """A class, and how it is to compute."""

    device_class: DeviceClass
    dtype: ComputeDtype
    compiled: bool
    installed: Installed

    @property
    def capability(self) -> tuple[int, int]:
        """Of NVIDIA's cards; (0, 0) where it is not known, and of all other devices."""
        parts = self.device_class.compute_capability.split(".")
        if self.device_class.accelerator != "cuda" or len(parts) != 2:
            return 0, 0
        return int(parts[0]), int(parts[1])

    def lacks(self, least: tuple[int, int]) -> str:
        """Why it has no such compute capability; empty if it has."""
        if self.device_class.emulated:
            return "an emulated device computes by plain operations, which it counts"
        if self.device_class.accelerator == "cpu":
            return "that is for GPUs"
        if self.capability < least:
            return f"that begins with compute capability {least[0]}.{least[1]}"
        return ""


Found = tuple[Any, str]
"""A value, and why."""


@dataclass(frozen=True)
class Row:
    """One thing to choose.

    Attributes:
        auto: what is chosen, and why.
        obstacle: why a class cannot do what a job wants; empty if it can.
    """

    auto: Callable[[Setting], Found]
    obstacle: Callable[[Setting, Any], str]


def _tf32(at: Setting) -> Found:
    if lacks := at.lacks(AMPERE):
        return False, lacks
    if at.dtype == "fp32":
        return False, "fp32 is asked for, of whose 23 bits TF32 keeps 10"
    return True, f"beside {at.dtype} nothing needs the other 13 bits"


def _attention(at: Setting) -> Found:
    lacks = at.lacks(AMPERE)
    if lacks or at.dtype == "fp32":
        return "own", "torch has kernels for every device" if lacks else "flash-attn has no fp32"
    if not at.installed.flash_attn:
        return "own", "torch's own fused kernels; flash-attn is not installed"
    return "flash", "flash-attn is installed, and made for these cards"


def _kernels(at: Setting) -> Found:
    if lacks := at.lacks(AMPERE):
        return "torch", f"Liger's: {lacks}"
    if at.compiled:
        return "torch", "compiled code fuses them by itself"
    if not at.installed.liger_kernel:
        return "torch", "liger-kernel is not installed"
    return "liger", "norms and gated layers in one kernel each, without their temporaries"


def _loss(at: Setting) -> Found:
    if lacks := at.lacks(VOLTA):
        return "torch", f"Triton's: {lacks}"
    if not at.installed.triton:
        return "torch", "triton is not installed"
    return "triton", "losses and their gradient in one kernel, where it is faster"


def _fused_optimizer(at: Setting) -> Found:
    return True, "one pass over memory, and no temporaries"


def _channels_last(at: Setting) -> Found:
    if lacks := at.lacks(VOLTA):
        return False, f"convolutions on tensor cores: {lacks}"
    if at.dtype == "fp32":
        return False, "it brings nothing in fp32"
    return True, "tensor cores convolve images that lie so; other batches have none"


def _never(at: Setting, wanted: Any) -> str:
    return ""


def _no_tf32(at: Setting, wanted: Any) -> str:
    return at.lacks(AMPERE) if wanted else ""


def _no_attention(at: Setting, wanted: Any) -> str:
    if wanted != "flash":
        return ""
    lacks = at.lacks(AMPERE) or ("it has no fp32" if at.dtype == "fp32" else "")
    return lacks or _missing(at.installed.flash_attn, "flash-attn")


def _no_liger(at: Setting, wanted: Any) -> str:
    if wanted != "liger":
        return ""
    return at.lacks(AMPERE) or _missing(at.installed.liger_kernel, "liger-kernel")


def _no_triton(at: Setting, wanted: Any) -> str:
    return (at.lacks(VOLTA) or _missing(at.installed.triton, "triton")) * (wanted == "triton")


def _missing(installed: bool, package: str) -> str:
    return "" if installed else f"{package} is not installed (pip install {package})"


TABLE: Mapping[str, Row] = {
    "tf32": Row(_tf32, _no_tf32),
    "attention": Row(_attention, _no_attention),
    "kernels": Row(_kernels, _no_liger),
    "loss": Row(_loss, _no_triton),
    "fused_optimizer": Row(_fused_optimizer, _never),
    "channels_last": Row(_channels_last, _never),
}


# Beside what is plain by default.
_PLAINEST: dict[str, bool | str] = {"dtype": "fp32", "compile": False, "fused_optimizer": False}


@dataclass(frozen=True)
class Chosen:
    """How a class computes, and why; the dtype and compiled code with it."""

    efficiency: Efficiency
    choices: tuple[Choice, ...]

    def why(self, name: str) -> str:
        """Of one thing."""
        return next((one.why for one in self.choices if one.what == name), "")

    def without(self, name: str, why: str) -> Chosen:
        """The same with the plain way of one thing."""
        plain = (PLAIN_EFFICIENCY.settings() | _PLAINEST)[name]
        changed = {name: plain} if name in TABLE else {}
        told = self._told(name, value=show(plain), why=why)
        return Chosen(self.efficiency.model_copy(update=changed), told)

    def because(self, name: str, why: str) -> Chosen:
        """The same, with another reason."""
        return Chosen(self.efficiency, self._told(name, why=why))

    def _told(self, name: str, **changes: str) -> tuple[Choice, ...]:
        """The choices, with something else said of one."""
        return tuple(
            one.model_copy(update=changes) if one.what == name else one for one in self.choices
        )


PLAIN = Chosen(PLAIN_EFFICIENCY, ())


def choose(
    spec: EfficiencySpec,
    cluster: Cluster,
    *,
    dtypes: Mapping[str, ComputeDtype],
    compiled: frozenset[str],
    installed: Installed,
) -> dict[str, Chosen]:
    """How each class of a cluster computes, by its name.

    Raises:
        InputError: the job names a class that is not there, or wants what one cannot do.
    """
    for key, name in spec.named():
        cluster.refuse_unknown(f"efficiency.{key}", [name])
    return {
        c.name: _chosen(spec, Setting(c, dtypes[c.name], c.name in compiled, installed))
        for c in cluster.classes
    }


def _chosen(spec: EfficiencySpec, at: Setting) -> Chosen:
    name, pins = at.device_class.name, spec.pins(at.device_class.name)
    compiled = "as asked" if at.compiled else "compiling takes a while: `compile: on` asks for it"
    choices = [
        Choice(what="dtype", value=at.dtype, why=reason(at.device_class, at.dtype)),
        Choice(what="compile", value=show(at.compiled), why=compiled),
    ]
    settings: dict[str, Any] = {}
    for key, row in TABLE.items():
        value, why = (pins[key], "as asked") if key in pins else row.auto(at)
        if key in pins and (obstacle := row.obstacle(at, value)):
            raise InputError(
                f"device class '{name}' cannot have 'efficiency.{key}' {show(value)}",
                why=obstacle,
                fix=f"leave the class out: `efficiency: {{{key}: {{OTHER_CLASS: {show(value)}}}}}`",
            )
        settings[key] = value
        choices.append(Choice(what=key, value=show(value), why=why))
    return Chosen(Efficiency(**settings), tuple(choices))


def show(value: bool | str) -> str:
    """As a job has it."""
    return ("on" if value else "off") if isinstance(value, bool) else value
