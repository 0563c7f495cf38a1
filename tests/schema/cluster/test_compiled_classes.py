"""Which classes are compiled: all that can, or those that are named, which then must."""

from __future__ import annotations

import pytest

from gpumix.schema.cluster.cluster import Cluster, Device, DeviceClass
from gpumix.schema.errors import InputError
from gpumix.schema.job.compile_choice import choose_compiled_classes
from helpers.errors import raises


def gpus(**capabilities: str) -> Cluster:
    classes = tuple(
        DeviceClass(name=n, accelerator="cuda", memory_bytes=2**30, compute_capability=c)
        for n, c in capabilities.items()
    )
    devices = tuple(Device(id=f"GPU-{c.name}", device_class=c.name) for c in classes)
    return Cluster(classes=classes, devices=devices)


def cpu(**settings) -> Cluster:
    one = DeviceClass(name="cpu", accelerator="cpu", memory_bytes=2**30, **settings)
    return Cluster(classes=(one,), devices=(Device(id="c", device_class="cpu"),))


MIXED = gpus(p40="6.1", v100="7.0", a100="8.0", b200="10.0")


@pytest.mark.parametrize(
    "wanted, found",
    [
        (False, set()),
        (True, {"v100", "a100", "b200"}),
        ({"a100": True}, {"a100"}),
        ({"a100": True, "v100": False, "p40": False}, {"a100"}),
    ],
)
def test_gpus(wanted, found):
    assert choose_compiled_classes(wanted, MIXED, cpp_compiler=False) == found


@pytest.mark.parametrize(
    "wanted, message",
    [
        ({"p40": True}, {"code": "class-not-compilable", "what": "p40", "why": ("7.0", "6.1")}),
        ({"A100": True}, {"code": "device-class-unknown", "what": "A100"}),
    ],
)
def test_what_is_named_must_be_possible(wanted, message):
    with raises(InputError, **message):
        choose_compiled_classes(wanted, MIXED, cpp_compiler=True)


@pytest.mark.parametrize(
    "cluster, cpp_compiler, obstacle",
    [
        (cpu(), True, ""),
        (cpu(), False, "C++"),
        (cpu(emulate_flops_per_s=1e9), True, "emulated"),
    ],
)
def test_cpus(cluster, cpp_compiler, obstacle):
    found = choose_compiled_classes(True, cluster, cpp_compiler=cpp_compiler)
    assert found == (set() if obstacle else {"cpu"})
    if obstacle:
        with raises(InputError, code="class-not-compilable", why=obstacle):
            choose_compiled_classes({"cpu": True}, cluster, cpp_compiler=cpp_compiler)
