"""Which dtype each device class computes in, and why; and the one in which all exchange parameters.

One table goes by what a device is. Sums of products are in fp32 wherever torch multiplies matrices,
so what counts is whether tensor cores take a dtype, not how fast its plain arithmetic is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from gpumix.spec.cluster import CLASS_NAME, Cluster, DeviceClass
from gpumix.spec.errors import InputError
from gpumix.spec.stage import ComputeDtype

Precision = (
    Literal["auto", "fp32", "bf16", "fp16"]
    | dict[Annotated[str, Field(pattern=CLASS_NAME)], ComputeDtype]
)


@dataclass(frozen=True)
class Support:
    """What a kind of device computes in.

    Attributes:
        usual: what it computes in unless it is told otherwise, and `why`.
        slow: dtypes that it computes in, but not well, and why.
        unable: dtypes that it does not compute in, and why.
    """

    usual: ComputeDtype
    why: str
    slow: Mapping[ComputeDtype, str] = field(default_factory=dict)
    unable: Mapping[ComputeDtype, str] = field(default_factory=dict)


_IN_SOFTWARE = "bf16 is computed in software there, which is slow"
_NO_BF16: Mapping[ComputeDtype, str] = {"bf16": "its libraries multiply no matrices in bf16"}
_PLAIN_FP16 = "without tensor cores fp16 is multiplied at the rate of fp32"

# The first row that a GPU's compute capability reaches counts.
NVIDIA: tuple[tuple[tuple[int, int], Support], ...] = (
    ((8, 0), Support("bf16", "its tensor cores take bf16, which has the range of fp32")),
    (
        (7, 0),
        Support(
            "fp16",
            "it computes fast in fp16 and has no bf16",
            slow={"bf16": _IN_SOFTWARE},
        ),
    ),
    (
        (6, 1),
        Support(
            "fp32",
            "it has no tensor cores, and its own fp16 arithmetic runs at 1/64 of the rate of fp32",
            slow={"fp16": _PLAIN_FP16},
            unable=_NO_BF16,
        ),
    ),
    (
        (6, 0),
        Support(
            "fp32",
            "it has no tensor cores, and its fp16 is faster only where sums are in fp16 too, which "
            "is too coarse to train with",
            slow={"fp16": _PLAIN_FP16},
            unable=_NO_BF16,
        ),
    ),
    (
        (0, 0),
        Support("fp32", "it has no tensor cores", slow={"fp16": _PLAIN_FP16}, unable=_NO_BF16),
    ),
)
AMD: Mapping[str, Support] = {
    "gfx906": Support("fp32", "it has no matrix cores", slow={"fp16": _PLAIN_FP16}),
    "gfx908": Support(
        "fp16",
        "its matrix cores take bf16 at half the rate of fp16",
        slow={"bf16": "bf16 runs at half the rate of fp16 there"},
    ),
    "gfx90a": Support("bf16", "its matrix cores take bf16, which has the range of fp32"),
    "gfx942": Support("bf16", "its matrix cores take bf16, which has the range of fp32"),
    "gfx950": Support("bf16", "its matrix cores take bf16, which has the range of fp32"),
}
CPU = Support(
    "fp32",
    "every CPU computes well in fp32, few in anything narrower",
    slow={
        "bf16": "bf16 is faster on CPUs with instructions for it, and slower on others",
        "fp16": "a CPU computes far slower in fp16",
    },
)
UNKNOWN = Support(
    "fp32",
    "its compute capability is not known, and fp32 runs everywhere",
)


def support_of(device_class: DeviceClass) -> Support:
    """What devices of this class compute in."""
    if device_class.accelerator == "cpu":
        return CPU
    if device_class.gfx_target:
        return AMD.get(device_class.gfx_target, UNKNOWN)
    return support_of_capability(device_class.compute_capability)


def support_of_capability(capability: str) -> Support:
    """What an NVIDIA GPU of a compute capability such as "8.6" computes in."""
    try:
        major, minor = map(int, capability.split("."))
    except ValueError:
        return UNKNOWN
    return next(support for least, support in NVIDIA if (major, minor) >= least)


def compute_dtypes(wanted: Precision, cluster: Cluster) -> dict[str, ComputeDtype]:
    """The dtype that each class of the cluster computes in, by name.

    Args:
        wanted: `auto` by the table, one for all classes, or by class, the others by the table.

    Raises:
        InputError: a class that is named is not there, or cannot compute in what it is to.
    """
    known = {c.name: support_of(c) for c in cluster.classes}
    if isinstance(wanted, dict):
        cluster.refuse_unknown("precision", wanted)
    asked = wanted if isinstance(wanted, dict) else {} if wanted == "auto" else wanted
    found: dict[str, ComputeDtype] = {}
    for name, support in known.items():
        dtype = asked.get(name, support.usual) if isinstance(asked, dict) else asked
        if dtype in support.unable:
            raise InputError(
                f"device class '{name}' does not compute in {dtype}",
                why=support.unable[dtype],
                fix=f"let it compute in {support.usual}: `precision: auto`, or "
                f"`precision: {{{name}: {support.usual}}}`",
            )
        found[name] = dtype
    return found


def communication_dtype(computed: Iterable[ComputeDtype]) -> ComputeDtype:
    """The dtype in which parameters are gathered, so that all ranks compute with the same values:
    the one that all compute in; else the narrow one, and of two the one with the wider range."""
    different = set(computed)
    if len(different) == 1:
        return different.pop()
    return "bf16" if "bf16" in different else "fp16"


def reason(device_class: DeviceClass, dtype: ComputeDtype) -> str:
    """Why a class computes in `dtype`: the table's reason, or that it was asked for, and what
    speaks against it."""
    support = support_of(device_class)
    if dtype == support.usual:
        return support.why
    against = support.slow.get(dtype, f"by itself it would be {support.usual}: {support.why}")
    return f"as asked; {against}"
