"""A cluster with cards more or less, or other links."""

from __future__ import annotations

from collections import Counter

import pytest

from gpumix.cost.memory_layout.curves import interpolate_seconds
from gpumix.hardware.estimates.cluster_shorthand import parse_cluster
from gpumix.hardware.estimates.decoder_shapes import KIND, make_llama_like
from gpumix.hardware.estimates.estimate import estimate_class, estimate_profile, scale_estimates
from gpumix.hardware.estimates.gpu_catalogue import find_card
from gpumix.hardware.estimates.what_if import (
    add_devices,
    class_named,
    remove_devices,
    set_link_between_hosts,
    set_link_inside_hosts,
)
from gpumix.planner.common.strategy import PlanRequest
from gpumix.planner.data_parallel.search import plan_one_stage
from gpumix.schema.cluster.network import Network
from gpumix.schema.errors import InputError
from gpumix.schema.job.search_space import Space
from gpumix.schema.profile.profile import CollectiveTimes, EndParameters, Profile, RootParameter
from helpers.errors import raises
from helpers.plans.profiles import curve

ONE_STAGE = Space(max_pipeline_stages=1, tensor_parallel_size=1)


def model_in(dtype):
    return make_llama_like(3e8).model(512, dtype, "300M")


def estimated(text: str = "2x rtx3090, 2x p40", network: str | None = None) -> Profile:
    return estimate_profile(model_in, parse_cluster(text, "auto", network), sequence_length=512)


def measured(off_by: float = 1.0, **changes) -> Profile:
    """Of the same cards, which take `off_by` times what is estimated; measured up to 64 samples,
    and the collectives between all of them."""
    profile = estimated()
    classes = []
    for of_class in scale_estimates(profile.classes, off_by):
        units = {
            kind: times.model_copy(
                update={
                    name: curve(*map(float, interpolate_seconds(of, [1, 8, 64])), sizes=(1, 8, 64))
                    for name, of in times
                    if of is not None
                }
            )
            for kind, times in of_class.units.items()
        }
        classes.append(of_class.model_copy(update={"units": units, "estimated": False}))
    cluster = profile.cluster.model_copy(update={"network": None})
    bus = curve(1e-4, 0.1, sizes=(1e3, 1e9))
    network = tuple(
        CollectiveTimes(operation=operation, form="list", times=bus)
        for operation in ("gather", "reduce")
    )
    update = {"classes": tuple(classes), "cluster": cluster, "network": network}
    return profile.model_copy(update=update | changes)


def renamed(profile: Profile, name: str, new: str, product: str = "") -> Profile:
    """A class of the cluster's owner's own naming."""
    classes = tuple(
        c.model_copy(update={"name": new, "product": product}) if c.name == name else c
        for c in profile.cluster.classes
    )
    devices = tuple(
        d.model_copy(update={"device_class": new}) if d.device_class == name else d
        for d in profile.cluster.devices
    )
    of_classes = tuple(
        c.model_copy(update={"device_class": new}) if c.device_class == name else c
        for c in profile.classes
    )
    there = profile.cluster.model_copy(update={"classes": classes, "devices": devices})
    return profile.model_copy(update={"cluster": there, "classes": of_classes})


def counts(profile: Profile) -> dict[str, int]:
    return dict(Counter(d.device_class for d in profile.cluster.devices))


def whole(profile: Profile) -> Profile:
    """The same profile, checked; and a plan for it there is: of one stage, which is found soon."""
    assert (
        plan_one_stage(profile, PlanRequest(global_batch=8, space=ONE_STAGE)).prediction is not None
    )
    return checked(profile)


def checked(profile: Profile) -> Profile:
    """The same profile, read again."""
    return Profile.model_validate_json(profile.model_dump_json())


# -- more ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "text", "expected"),
    [
        (measured(), "p40", {"rtx3090": 2, "p40": 3}),
        (estimated(), "2x p40", {"rtx3090": 2, "p40": 4}),
        (measured(), "3x3090", {"rtx3090": 5, "p40": 2}),
        (measured(), "2 * rtx3090", {"rtx3090": 4, "p40": 2}),
        (estimated(), "2xt4", {"rtx3090": 2, "p40": 2, "t4": 2}),
        (measured(), "NVIDIA A10", {"rtx3090": 2, "p40": 2, "a10": 1}),
    ],
)
def test_more_cards(profile, text, expected):
    larger = whole(add_devices(profile, text))
    assert counts(larger) == expected
    assert {d.host for d in larger.cluster.devices} == {"host-0"}
    assert len({d.ordinal for d in larger.cluster.devices}) == len(larger.cluster.devices)
    old = {c.device_class: c for c in profile.classes}
    for of_class in larger.classes:
        assert of_class == old.get(of_class.device_class, of_class)
        assert of_class.estimated == (of_class.device_class not in old or profile.estimated != ())


def test_cards_of_the_same_kind_join_twice():
    larger = whole(add_devices(add_devices(measured(), "t4"), "2x t4"))
    assert counts(larger)["t4"] == 3
    assert larger.estimated == ("t4",)


@pytest.mark.parametrize("off_by", [0.5, 1.0, 1.7])
def test_new_cards_are_set_right_by_how_far_the_others_are_off(off_by):
    larger = add_devices(measured(off_by), "t4")
    raw = estimate_class(find_card("t4"), model_in("fp16"), "t4")
    for n in (1, 8, 64):
        found, expected = (
            float(interpolate_seconds(of.units[KIND].forward, n))
            for of in (larger.of_class("t4"), raw)
        )
        assert found == pytest.approx(off_by * expected)


def test_cards_that_the_catalogue_does_not_know_set_nothing_right():
    profile = measured(3.0)
    for name in ("rtx3090", "p40"):
        profile = renamed(profile, name, f"my-{name}")
    raw = estimate_class(find_card("t4"), model_in("fp16"), "t4")
    assert add_devices(profile, "t4").of_class("t4") == raw
    known = renamed(profile, "my-p40", "mine", product="Tesla P40")
    found = add_devices(known, "t4").of_class("t4").units[KIND].forward.values[-1]
    assert found == pytest.approx(3.0 * raw.units[KIND].forward.values[-1])


def test_measured_times_that_are_nothing_set_nothing_right():
    profile = measured(0.0)
    assert add_devices(profile, "t4").of_class("t4") == estimate_class(
        find_card("t4"), model_in("fp16"), "t4"
    )


def test_new_cards_keep_the_jobs_optimizer():
    profile = measured(optimizer_bytes_per_element=0)
    expected = estimate_class(find_card("t4"), model_in("fp16"), "t4", 0).optimizer_s_per_element
    assert add_devices(profile, "t4").of_class("t4").optimizer_s_per_element == expected


def test_frozen_parameters_take_more_in_a_wider_dtype():
    """All of the root's, also as parts of it: stages have those."""
    known = estimated("2x rtx3090")
    end = EndParameters(names=("embed",), frozen_bytes=100)
    root = known.model.root.model_copy(
        update={
            "frozen_bytes": 100,
            "before": end,
            "parameters": (RootParameter(name="embed", frozen_bytes=100),),
        }
    )
    half = known.model.model_copy(update={"compute_dtype": "fp16", "root": root})
    only = known.model_copy(update={"model": half, "other_models": ()})
    wide = add_devices(only, "p40").model_in("fp32").root
    assert wide.frozen_bytes == wide.before.frozen_bytes == wide.parameters[0].frozen_bytes == 200


def test_of_several_hosts_new_cards_have_one_of_their_own():
    profile = estimated("2x rtx3090; 2x p40", "25GbE")
    assert [d.host for d in add_devices(profile, "p40").cluster.devices][-1] == "host-1"
    larger = whole(add_devices(profile, "2x t4"))
    assert [d.host for d in larger.cluster.devices][-2:] == ["new-host"] * 2
    assert larger.cluster.network.of("between", "t4", "p40").name == "25GbE"
    assert larger.cluster.network.of("inside", "t4", "t4").name == "PCIe 3.0 x16"


def test_links_that_are_stated_stay_and_new_cards_bring_their_own():
    profile = renamed(estimated(), "rtx3090", "mine")
    stated = Network(inside="nvlink3")
    there = profile.cluster.model_copy(update={"network": stated})
    larger = add_devices(profile.model_copy(update={"cluster": there}), "2x t4")
    network = checked(larger).cluster.network
    assert network.of("inside", "mine", "p40").name == "nvlink3"
    assert network.of("inside", "t4", "mine").name == "nvlink3"
    assert network.of("inside", "t4", "p40").name == "PCIe 3.0 x16"
    assert network.of("inside", "t4", "t4").name == "PCIe 3.0 x16"


@pytest.mark.parametrize("text", ["0x p40", "", "2x", "3x voodoo2", "-1x p40", "2x rtx6000"])
@pytest.mark.parametrize("change", [add_devices, remove_devices])
def test_what_is_no_number_of_cards_is_refused(change, text):
    with pytest.raises(InputError):
        change(measured(), text)


def test_real_cards_do_not_join_emulated_ones():
    profile = measured()
    classes = tuple(
        c.model_copy(update={"emulate_flops_per_s": 1e9}) for c in profile.cluster.classes
    )
    there = profile.cluster.model_copy(update={"classes": classes})
    emulated = profile.model_copy(update={"cluster": there})
    for text in ("t4", "2x tiny"):
        with raises(InputError, code="class-to-add-unknown") as caught:
            add_devices(emulated, text)
        assert "'tiny'" in caught.value.what or text == "t4"
        assert "p40" in caught.value.fix and "plan for --cluster" in caught.value.fix
    assert counts(add_devices(emulated, "p40"))["p40"] == 3


# -- less ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "text", "expected"),
    [
        (measured(), "p40", {"rtx3090": 2}),
        (measured(), "1x p40", {"rtx3090": 2, "p40": 1}),
        (estimated(), "2x p40", {"rtx3090": 2}),
        (measured(), "3090", {"p40": 2}),
        (estimated(), "1x3090", {"rtx3090": 1, "p40": 2}),
    ],
)
def test_fewer_cards(profile, text, expected):
    smaller = whole(remove_devices(profile, text))
    assert counts(smaller) == expected
    assert {c.name for c in smaller.cluster.classes} == set(expected)
    assert {c.device_class for c in smaller.classes} == set(expected)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("t4", {"code": "class-to-remove-unknown", "what": "t4"}),
        ("3x p40", {"code": "too-few-devices-to-remove", "what": ("p40", 2)}),
    ],
)
def test_what_is_not_there_cannot_be_removed(text, said):
    with raises(InputError, **said):
        remove_devices(measured(), text)


def test_something_must_be_left():
    with raises(InputError, code="no-device-left"):
        remove_devices(remove_devices(measured(), "p40"), "rtx3090")


def test_what_was_added_can_be_removed():
    profile = measured()
    assert counts(remove_devices(add_devices(profile, "2x t4"), "t4")) == counts(profile)


# -- other links -----------------------------------------------------------------------------------


def test_other_links_between_hosts():
    profile = estimated("2x rtx3090; 2x p40", "10GbE")
    network = whole(set_link_between_hosts(profile, "ib-hdr")).cluster.network
    assert network.of("between", "rtx3090", "p40").name == "ib-hdr"
    assert network.of("inside", "p40", "p40").name == "PCIe 3.0 x16"


def test_on_one_host_the_links_of_its_devices_change():
    profile = set_link_inside_hosts(estimated(), "nvlink3")
    assert checked(profile).cluster.network.of("inside", "p40", "rtx3090").name == "nvlink3"


def test_other_links_inside_several_hosts():
    profile = set_link_inside_hosts(estimated("2x rtx3090; 2x p40", "10GbE"), "nvlink3")
    network = whole(profile).cluster.network
    assert network.of("inside", "p40", "p40").name == "nvlink3"
    assert network.of("between", "rtx3090", "p40").name == "10GbE"


def test_one_host_has_no_links_to_others():
    with raises(InputError, code="network-with-one-host"):
        set_link_between_hosts(measured(), "25GbE")


def test_measured_collectives_are_of_the_links_that_were_there():
    profile = set_link_inside_hosts(measured(), "pcie5")
    assert whole(profile).network == ()
    assert profile.cluster.network.of("inside", "p40", "p40").name == "pcie5"


def test_inside_measured_hosts_the_cards_own_links_are_taken():
    """Where the catalogue knows them."""
    profile = measured()
    devices = tuple(d.model_copy(update={"host": d.device_class}) for d in profile.cluster.devices)
    there = profile.cluster.model_copy(update={"devices": devices})
    profile = profile.model_copy(update={"cluster": there})
    network = whole(set_link_between_hosts(profile, "25GbE")).cluster.network
    assert network.of("between", "p40", "rtx3090").name == "25GbE"
    assert network.of("inside", "p40", "p40").name == "PCIe 3.0 x16"
    with raises(InputError, code="links-measured-together"):
        set_link_inside_hosts(profile, "nvlink3")
    unknown = set_link_between_hosts(renamed(profile, "p40", "mine"), "25GbE").cluster.network
    assert unknown.of("inside", "rtx3090", "rtx3090").name == "25GbE"


@pytest.mark.parametrize("text", ["", "fast", "0 GB/s", "-1 GB/s", "0GbE"])
def test_what_is_no_link_is_refused(text):
    with pytest.raises(InputError) as caught:
        set_link_between_hosts(measured(), text)
    assert caught.value.where == "--network"


def test_names_of_classes():
    names = ["rtx3090", "mine"]
    assert class_named(names, "3090") == class_named(names, "RTX 3090") == "rtx3090"
    assert class_named(names, "mine") == "mine"
    assert class_named(names, "p40") is class_named(names, "nonsense") is None


def test_no_more_cards_are_added_than_a_cluster_may_have():
    with raises(InputError, code="too-many-devices", what=200000):
        add_devices(estimated(), "900000000x p40")


def test_what_leaves_takes_its_tensor_parallel_groups_along():
    shape = make_llama_like(3e8)
    profile = estimate_profile(
        model_in,
        parse_cluster("2x t4, 2x p40"),
        sequence_length=512,
        parts_in=lambda dtype: shape.parts(512, dtype, "300M"),
    )
    assert any(
        c.device_class == "p40" for tp_profile in profile.tp_profiles for c in tp_profile.classes
    )
    left = remove_devices(profile, "p40")
    assert all(
        c.device_class == "t4" for tp_profile in left.tp_profiles for c in tp_profile.classes
    )
    assert left.tp_profiles and all(
        set(tp_profile.told) == {"t4"} for tp_profile in left.tp_profiles
    )
