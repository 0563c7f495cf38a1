"""Which device classes run compiled units: what a job asks for, as far as they can."""

from __future__ import annotations

from collections.abc import Mapping

from gpumix.spec.cluster import Cluster, DeviceClass
from gpumix.spec.errors import InputError

# Of GPUs: Triton generates no code for older ones.
LEAST_COMPUTE_CAPABILITY = (7, 0)


def compiled_classes(
    wanted: bool | Mapping[str, bool], cluster: Cluster, *, cpp_compiler: bool
) -> frozenset[str]:
    """Names of the classes whose units are compiled.

    Args:
        wanted: for all classes that can, or by class.
        cpp_compiler: whether there is one, as CPUs need it.

    Raises:
        InputError: a class that is named is not there, or cannot.
    """
    obstacles = {c.name: _obstacle(c, cpp_compiler) for c in cluster.classes}
    if not isinstance(wanted, Mapping):
        return frozenset(name for name, why in obstacles.items() if wanted and not why)
    cluster.refuse_unknown("compile", wanted)
    for name, on in wanted.items():
        if on and obstacles[name]:
            raise InputError(
                f"units cannot be compiled for device class '{name}'",
                why=obstacles[name],
                fix=f"leave it out: `compile: {{{name}: off}}`",
            )
    return frozenset(name for name, on in wanted.items() if on)


def _obstacle(device_class: DeviceClass, cpp_compiler: bool) -> str:
    """Why units of this class cannot be compiled; empty if they can."""
    if device_class.emulated:
        return "an emulated device counts operations, which compiled code does not show"
    if device_class.accelerator == "cpu":
        return "" if cpp_compiler else "there is no C++ compiler (apt-get install g++)"
    capability = tuple(int(part) for part in device_class.compute_capability.split(".") if part)
    if capability and capability < LEAST_COMPUTE_CAPABILITY:
        least = ".".join(map(str, LEAST_COMPUTE_CAPABILITY))
        return f"Triton needs compute capability {least}, it has {device_class.compute_capability}"
    return ""
