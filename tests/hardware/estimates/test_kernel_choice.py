"""How each class computes: by the table, or as a job pins it; never what a class cannot do."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from gpumix.hardware.estimates.kernel_choice import (
    SETTINGS_TABLE,
    ChosenSettings,
    InstalledPackages,
    choose_kernel_settings,
)
from gpumix.schema.cluster.cluster import Cluster, Device, DeviceClass
from gpumix.schema.cluster.kernels import PLAIN_EFFICIENCY, EfficiencySpec, KernelSettings
from gpumix.schema.errors import InputError
from gpumix.schema.plan.dtypes import choose_compute_dtypes
from helpers.errors import raises

ALL = InstalledPackages(flash_attn=True, liger_kernel=True, triton=True)
CAPABILITIES = {"p40": "6.1", "v100": "7.0", "t4": "7.5", "a100": "8.0", "h100": "9.0"}
GPUS = tuple(
    DeviceClass(name=name, accelerator="cuda", memory_bytes=2**30, compute_capability=capability)
    for name, capability in CAPABILITIES.items()
)
OF_AMD = DeviceClass(name="mi250", accelerator="cuda", memory_bytes=2**30, gfx_target="gfx90a")


def chosen(
    spec: EfficiencySpec | None = None,
    *,
    classes: tuple[DeviceClass, ...] = GPUS,
    installed: InstalledPackages = ALL,
    precision: str = "auto",
    compiled: frozenset[str] = frozenset(),
) -> dict[str, ChosenSettings]:
    devices = tuple(Device(id=c.name, device_class=c.name) for c in classes)
    cluster = Cluster(classes=classes, devices=devices)
    return choose_kernel_settings(
        spec or EfficiencySpec(),
        cluster,
        dtypes=choose_compute_dtypes(precision, cluster),
        compiled=compiled,
        installed=installed,
    )


def test_classes_of_one_run_choose_by_what_they_can():
    found = {name: one.efficiency for name, one in chosen().items()}
    ampere = KernelSettings(
        tf32=True, attention="flash", kernels="liger", loss="triton", channels_last=True
    )
    volta = KernelSettings(loss="triton", channels_last=True)
    assert found == {
        "p40": PLAIN_EFFICIENCY,
        "v100": volta,
        "t4": volta,
        "a100": ampere,
        "h100": ampere,
    }


def test_cards_without_a_compute_capability_compute_plainly():
    found = chosen(classes=(OF_AMD,))
    assert found[OF_AMD.name].efficiency == PLAIN_EFFICIENCY


@pytest.mark.parametrize("emulate", [None, 1e9])
def test_cpus_and_emulated_devices_compute_plainly(emulate):
    one = DeviceClass(
        name="one", accelerator="cpu", memory_bytes=2**30, emulate_flops_per_s=emulate
    )
    assert chosen(classes=(one,))["one"].efficiency == PLAIN_EFFICIENCY


def test_what_is_not_installed_is_not_chosen_and_says_so():
    found = chosen(installed=InstalledPackages())["a100"]
    assert found.efficiency == KernelSettings(tf32=True, channels_last=True)
    for name, package in (
        ("attention", "flash-attn"),
        ("kernels", "liger-kernel"),
        ("loss", "triton"),
    ):
        assert f"{package} is not installed" in found.why(name)


def test_fp32_that_is_asked_for_stays_fp32():
    found = chosen(precision="fp32")["a100"].efficiency
    assert (found.tf32, found.attention, found.channels_last) == (False, "own", False)
    assert chosen(EfficiencySpec(tf32=True), classes=GPUS[3:], precision="fp32")[
        "a100"
    ].efficiency.tf32


def test_compiled_code_has_no_use_for_kernels():
    found = chosen(compiled=frozenset({"a100"}))
    assert (found["a100"].efficiency.kernels, found["h100"].efficiency.kernels) == (
        "torch",
        "liger",
    )


def test_each_choice_has_a_reason_and_what_is_dropped_another():
    for one in chosen().values():
        assert [c.what for c in one.choices] == ["dtype", "compile", *SETTINGS_TABLE]
        assert all(c.why for c in one.choices)
    dropped = chosen()["a100"].without("kernels", "not used: wrong")
    assert dropped.efficiency.kernels == "torch"
    assert dropped.why("kernels") == "not used: wrong"
    assert chosen()["a100"].without("dtype", "x").choices[0].value == "fp32"


def test_a_pin_is_for_all_classes_or_for_one():
    spec = EfficiencySpec(attention={"a100": "eager"}, fused_optimizer=False)
    found = {name: one.efficiency for name, one in chosen(spec).items()}
    assert [found[name].attention for name in ("a100", "h100", "v100")] == ["eager", "flash", "own"]
    assert not any(one.fused_optimizer for one in found.values())


@pytest.mark.parametrize(
    ("spec", "installed", "message"),
    [
        (
            EfficiencySpec(tf32=True),
            ALL,
            {"code": "efficiency-not-possible", "what": ("p40", "advanced.efficiency.tf32")},
        ),
        (
            EfficiencySpec(attention={"v100": "flash"}),
            ALL,
            {"code": "efficiency-not-possible", "why": "8.0"},
        ),
        (
            EfficiencySpec(kernels={"a100": "liger"}),
            InstalledPackages(),
            {"code": "efficiency-not-possible", "why": "pip install liger-kernel"},
        ),
        (
            EfficiencySpec(loss={"p40": "triton"}),
            ALL,
            {"code": "efficiency-not-possible", "why": "7.0"},
        ),
        (
            EfficiencySpec(tf32={"A100": True}),
            ALL,
            {"code": "device-class-unknown", "what": "A100"},
        ),
    ],
)
def test_what_cannot_be_is_an_error(spec, installed, message):
    with raises(InputError, **message):
        chosen(spec, installed=installed)


def test_what_is_no_choice_is_refused():
    with pytest.raises(ValidationError):
        EfficiencySpec(attention="fast")
