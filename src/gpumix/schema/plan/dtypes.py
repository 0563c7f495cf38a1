"""Compute dtype of each device class, with reasons, and the dtype of parameter all-gathers.

A table maps device types to dtypes. torch accumulates matrix products in fp32 everywhere, so tensor
core support for a dtype matters, not the speed of plain arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from gpumix.schema.cluster.cluster import CLASS_NAME, Cluster, DeviceClass
from gpumix.schema.errors import InputError
from gpumix.schema.plan.stage import ComputeDtype

Precision = (
    Literal["auto", "fp32", "bf16", "fp16"]
    | dict[Annotated[str, Field(pattern=CLASS_NAME)], ComputeDtype]
)


@dataclass(frozen=True)
class DtypeSupport:
    """Compute dtypes supported by a type of device.

    Attributes:
        usual: the default compute dtype; `why` is the reason.
        slow: dtypes supported at low speed, with reasons.
        unable: unsupported dtypes, with reasons.
    """

    usual: ComputeDtype
    why: str
    slow: Mapping[ComputeDtype, str] = field(default_factory=dict)
    unable: Mapping[ComputeDtype, str] = field(default_factory=dict)


_IN_SOFTWARE = "bf16 is computed in software there, which is slow"
_NO_BF16: Mapping[ComputeDtype, str] = {"bf16": "its libraries multiply no matrices in bf16"}
_PLAIN_FP16 = "without tensor cores fp16 is multiplied at the rate of fp32"


def _before_tensor_cores(more: str = "") -> DtypeSupport:
    why = f"it has no tensor cores{more}"
    return DtypeSupport("fp32", why, slow={"fp16": _PLAIN_FP16}, unable=_NO_BF16)


# The first row with a compute capability not above the GPU's applies.
NVIDIA: tuple[tuple[tuple[int, int], DtypeSupport], ...] = (
    ((8, 0), DtypeSupport("bf16", "its tensor cores take bf16, which has the range of fp32")),
    (
        (7, 0),
        DtypeSupport(
            "fp16", "it computes fast in fp16 and has no bf16", slow={"bf16": _IN_SOFTWARE}
        ),
    ),
    (
        (6, 1),
        _before_tensor_cores(", and its own fp16 arithmetic runs at 1/64 of the rate of fp32"),
    ),
    (
        (6, 0),
        _before_tensor_cores(
            ", and its fp16 is faster only where sums are in fp16 too, which is too coarse to "
            "train with"
        ),
    ),
    ((0, 0), _before_tensor_cores()),
)
_MATRIX_CORES = DtypeSupport("bf16", "its matrix cores take bf16, which has the range of fp32")
_WMMA = DtypeSupport(
    "bf16", "its matrix instructions (WMMA) take bf16, which has the range of fp32"
)
_DOT_PRODUCTS = DtypeSupport(
    "fp16",
    "its dot products take fp16 at twice the rate of fp32, and not bf16",
    slow={"bf16": _IN_SOFTWARE},
)
AMD: Mapping[str, DtypeSupport] = {
    "gfx906": DtypeSupport("fp32", "it has no matrix cores", slow={"fp16": _PLAIN_FP16}),
    "gfx908": DtypeSupport(
        "fp16",
        "its matrix cores take bf16 at half the rate of fp16",
        slow={"bf16": "bf16 runs at half the rate of fp16 there"},
    ),
    **dict.fromkeys(("gfx90a", "gfx942", "gfx950"), _MATRIX_CORES),
    **dict.fromkeys(("gfx1030", "gfx1031", "gfx1032"), _DOT_PRODUCTS),  # RDNA 2
    **dict.fromkeys(("gfx1100", "gfx1101", "gfx1102", "gfx1150", "gfx1151"), _WMMA),  # RDNA 3
    **dict.fromkeys(("gfx1200", "gfx1201"), _WMMA),  # RDNA 4
}
_XMX = DtypeSupport("bf16", "its matrix engines (XMX) take bf16, which has the range of fp32")
INTEL: Mapping[str, DtypeSupport] = {
    **dict.fromkeys(("dg2", "pvc", "bmg", "arl-h", "lnl-m", "ptl-h"), _XMX),
    "mtl-h": DtypeSupport("fp32", "it has no matrix engines (XMX)", slow={"bf16": _IN_SOFTWARE}),
}
GAUDI = DtypeSupport("bf16", "its matrix engines are made for bf16, which has the range of fp32")
CPU = DtypeSupport(
    "fp32",
    "every CPU computes well in fp32, few in anything narrower",
    slow={
        "bf16": "bf16 is faster on CPUs with instructions for it, and slower on others",
        "fp16": "a CPU computes far slower in fp16",
    },
)
UNKNOWN = DtypeSupport("fp32", "its compute capability is not known, and fp32 runs everywhere")


def get_dtype_support(device_class: DeviceClass) -> DtypeSupport:
    """Return the compute dtypes supported by a device class."""
    if device_class.accelerator == "cpu":
        return CPU
    if device_class.accelerator == "hpu":
        return GAUDI
    if device_class.accelerator == "xpu":
        return INTEL.get(device_class.xe_target, UNKNOWN)
    if device_class.gfx_target:
        return AMD.get(device_class.gfx_target, UNKNOWN)
    return get_nvidia_dtype_support(device_class.compute_capability)


def get_nvidia_dtype_support(capability: str) -> DtypeSupport:
    """Return the compute dtypes of an NVIDIA GPU with a compute capability such as "8.6"."""
    try:
        major, minor = map(int, capability.split("."))
    except ValueError:
        return UNKNOWN
    return next(support for least, support in NVIDIA if (major, minor) >= least)


def choose_compute_dtypes(wanted: Precision, cluster: Cluster) -> dict[str, ComputeDtype]:
    """Return the compute dtype of each class of the cluster, by class name.

    Args:
        wanted: `auto` (the table), a dtype for all classes, or by class with the table as default.

    Raises:
        InputError: a named class does not exist, or does not support the dtype.
    """
    known = {c.name: get_dtype_support(c) for c in cluster.classes}
    if isinstance(wanted, dict):
        cluster.refuse_unknown("precision", wanted)
    asked = wanted if isinstance(wanted, dict) else {} if wanted == "auto" else wanted
    found: dict[str, ComputeDtype] = {}
    for name, support in known.items():
        dtype = asked.get(name, support.usual) if isinstance(asked, dict) else asked
        if dtype in support.unable:
            raise InputError(
                f"device class '{name}' does not compute in {dtype}",
                code="dtype-unsupported-by-class",
                why=support.unable[dtype],
                fix=f"let it compute in {support.usual}: `precision: auto`, or "
                f"`precision: {{{name}: {support.usual}}}`",
            )
        found[name] = dtype
    return found


def choose_communication_dtype(computed: Iterable[ComputeDtype]) -> ComputeDtype:
    """Return the dtype of parameter all-gathers: all ranks compute with equal values. Mixed compute
    dtypes gather in a 16-bit dtype; bf16, with a wider range, is preferred to fp16."""
    different = set(computed)
    if len(different) == 1:
        return different.pop()
    return "bf16" if "bf16" in different else "fp16"


def explain_compute_dtype(device_class: DeviceClass, dtype: ComputeDtype) -> str:
    """Return the reason for a class computing in `dtype`: the table's, or the user's request with
    the arguments against it."""
    support = get_dtype_support(device_class)
    if dtype == support.usual:
        return support.why
    against = support.slow.get(dtype, f"by itself it would be {support.usual}: {support.why}")
    return f"as asked; {against}"
