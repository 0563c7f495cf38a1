"""Choice of the device classes running compiled units, within the limits of the devices."""

from __future__ import annotations

from collections.abc import Mapping

from gpumix.schema.cluster.cluster import Cluster, DeviceClass
from gpumix.schema.errors import InputError

# GPUs only: Triton generates no code for older GPUs.
LEAST_COMPUTE_CAPABILITY = (7, 0)


def choose_compiled_classes(
    wanted: bool | Mapping[str, bool], cluster: Cluster, *, cpp_compiler: bool
) -> frozenset[str]:
    """Return the names of the classes whose units are compiled.

    Args:
        wanted: for all capable classes, or by class.
        cpp_compiler: whether a C++ compiler is available, as CPUs require.

    Raises:
        InputError: a named class does not exist, or cannot run compiled units.
    """
    obstacles = {c.name: _find_compile_obstacle(c, cpp_compiler) for c in cluster.classes}
    if not isinstance(wanted, Mapping):
        return frozenset(name for name, why in obstacles.items() if wanted and not why)
    cluster.refuse_unknown("torch_compile", wanted)
    for name, on in wanted.items():
        if on and obstacles[name]:
            raise InputError(
                f"units cannot be compiled for device class '{name}'",
                code="class-not-compilable",
                why=obstacles[name],
                fix=f"leave it out: `torch_compile: {{{name}: off}}`",
            )
    return frozenset(name for name, on in wanted.items() if on)


def _find_compile_obstacle(device_class: DeviceClass, cpp_compiler: bool) -> str:
    """Return the reason why units of a class cannot be compiled, or an empty string."""
    if device_class.emulated:
        return "an emulated device counts operations, which compiled code does not show"
    if device_class.accelerator == "cpu":
        return "" if cpp_compiler else "there is no C++ compiler (apt-get install g++)"
    capability = tuple(int(part) for part in device_class.compute_capability.split(".") if part)
    if capability and capability < LEAST_COMPUTE_CAPABILITY:
        least = ".".join(map(str, LEAST_COMPUTE_CAPABILITY))
        return f"Triton needs compute capability {least}, it has {device_class.compute_capability}"
    return ""
