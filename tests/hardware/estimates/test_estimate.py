"""Profiles of cards that nobody has measured."""

from __future__ import annotations

import pytest

from gpumix.cost.memory_layout.curves import interpolate_one_seconds, interpolate_seconds
from gpumix.cost.network.link_times import PER_OWNER
from gpumix.cost.tensor_parallel_groups import make_group_profile
from gpumix.hardware.estimates.cluster_shorthand import explain_short_names, parse_cluster
from gpumix.hardware.estimates.decoder_shapes import KIND, make_decoder, make_llama_like
from gpumix.hardware.estimates.estimate import estimate_profile, scale_estimates
from gpumix.planner.common.strategy import PlanRequest, get_prediction
from gpumix.planner.data_parallel.search import plan_one_stage
from gpumix.planner.optimal import plan_fastest
from gpumix.planner.pipeline_parallel.staged_plans import plan_staged
from gpumix.schema.errors import InputError
from gpumix.schema.job.search_space import Space
from gpumix.schema.profile.profile import ROOT
from helpers.errors import raises


def model_in(dtype):
    return make_llama_like(1e9).model(1024, dtype, "1B")


MODEL = model_in("bf16")
ONE_STAGE = Space(max_pipeline_stages=1, tensor_parallel_size=1)  # which is found soon


def estimated(text="2x rtx3090, 1x p40", model=model_in, **changes):
    return estimate_profile(model, parse_cluster(text), sequence_length=1024, **changes)


def test_every_class_is_there_and_marked():
    profile = estimated()
    assert profile.estimated == ("p40", "rtx3090")
    assert {c.name for c in profile.cluster.classes} == {"p40", "rtx3090"}
    for of_class in profile.classes:
        assert set(of_class.units) == {KIND, ROOT}
        assert of_class.disturbed() == ""
    made = plan_one_stage(profile, PlanRequest(global_batch=8, space=ONE_STAGE))
    assert set(made.estimated) == {w.device_class for w in made.workers}
    assert not made.emulated


def test_the_recompute_is_a_forward_more():
    for of_class in estimated().classes:
        times = of_class.units[KIND]
        for n in (1, 3, 50):
            both = interpolate_seconds(times.forward, n) + interpolate_seconds(times.gradient, n)
            assert interpolate_seconds(times.backward, n) == pytest.approx(both)


def test_the_halves_of_a_backward_are_together_the_whole():
    for of_class in estimated().classes:
        times = of_class.units[KIND]
        both = [a + b for a, b in zip(times.inputs.values, times.weights.values)]
        assert both == pytest.approx(list(times.gradient.values))
        assert all(a < b for a, b in zip(times.inputs.values, times.gradient.values))


SIZES = {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
         "intermediate_size": 2816, "vocab_size": 4000}  # fmt: skip
SMALL = make_decoder({"model_type": "llama"} | SIZES)


def small(text, network=None):
    return estimate_profile(
        lambda dtype: SMALL.model(256, dtype, "small"),
        parse_cluster(text, network=network),
        sequence_length=256,
        parts_in=lambda dtype: SMALL.parts(256, dtype, "small"),
    )


def test_tp_groups_are_of_as_many_cards_as_a_host_has_of_a_class():
    profile = small("4x rtx3090, 2x p40; 1x t4", "1GbE")
    assert {
        tp_profile.degree: sorted(c.device_class for c in tp_profile.classes)
        for tp_profile in profile.tp_profiles
    } == {
        2: ["p40", "rtx3090"],
        4: ["rtx3090"],
    }
    for tp_profile in profile.tp_profiles:
        assert {m.compute_dtype for m in (tp_profile.model, *tp_profile.other_models)} == {
            m.compute_dtype for m in (profile.model, *profile.other_models)
        }
        for of_class in tp_profile.classes:
            alone = profile.of_class(of_class.device_class).units[KIND].forward
            part = of_class.units[KIND].forward
            # Each rank has its part of the products, and the norms and additions of all.
            assert (
                0.75 * tp_profile.degree
                < alone.values[-1] / part.values[-1]
                < 1.01 * tp_profile.degree
            )
    assert small("1x rtx3090").tp_profiles == ()


def test_what_tp_groups_tell_each_other_takes_as_long_as_their_link_is_slow():
    """Two sums of a sample's hidden states, each there and back in parts of a half."""
    profile = small("2x rtx3090")
    (tp_profile,) = profile.tp_profiles
    samples, size = 64, 64 * 256 * 1024 * 2
    forward = make_group_profile(profile, 2).of_class("rtx3090").units[KIND].forward
    waits = interpolate_seconds(forward, samples) - interpolate_seconds(
        tp_profile.classes[0].units[KIND].forward, samples
    )
    link = profile.cluster.network.of("inside", "rtx3090", "rtx3090")
    there_and_back = 2 * interpolate_one_seconds(link.times, size / 2)
    assert 2 * there_and_back <= waits <= 2 * PER_OWNER * there_and_back * 1.001


def test_updates_that_exchange_matrices_take_longer_in_teams():
    """Parts of matrices travel to one rank and back, in bf16."""
    profile = small("2x rtx3090")
    [tp_profile] = profile.tp_profiles
    exchanging = profile.model_copy(update={"exchanges_matrices": True})
    without, with_exchange = (
        make_group_profile(one, 2).of_class("rtx3090").optimizer_s_per_element
        for one in (exchanging.model_copy(update={"exchanges_matrices": False}), exchanging)
    )
    assert without == tp_profile.classes[0].optimizer_s_per_element
    link = profile.cluster.network.of("inside", "rtx3090", "rtx3090")
    matrices = (
        tp_profile.model.mean_per_element(of_matrices=1, of_others=0) * tp_profile.model.parameters
    )
    there_and_back = 2 * interpolate_one_seconds(link.times, 2 * matrices / 2)
    waits = (with_exchange - without) * tp_profile.model.parameters
    assert there_and_back <= waits * 1.001 and waits <= PER_OWNER * there_and_back * 1.001


def test_stages_are_weighed_between_hosts_with_a_slow_link():
    profile = small("2 hosts of 1x rtx3090", "1GbE")
    few = Space(gradient_checkpointing=False, cross_entropy="whole", pipeline_schedules="1f1b")
    request = PlanRequest(global_batch=16, space=few)
    in_one = plan_one_stage(profile, request.model_copy(update={"space": few.with_all_devices()}))
    found = plan_staged(profile, request)
    assert get_prediction(found).step_s < get_prediction(in_one).step_s
    assert [len(stage.workers) for stage in found.stages] == [1, 1]
    assert sum(len(stage.units) for stage in found.stages) == SMALL.layers
    assert found.estimated == ("rtx3090",)


@pytest.mark.parametrize("schedule", ["zero-bubble", "interleaved"])
def test_every_schedule_can_be_told(schedule):
    profile = small("2x rtx3090")
    few = Space(gradient_checkpointing=False, cross_entropy="whole", pipeline_schedules=schedule)
    found = plan_staged(profile, PlanRequest(global_batch=8, space=few))
    assert found.schedule == schedule
    assert get_prediction(found).step_s > 0


def test_a_longer_sequence_takes_longer_than_in_proportion():
    """Attention grows with its square."""
    short, long = (
        estimate_profile(
            lambda dtype, tokens=tokens: make_llama_like(1e9).model(tokens, dtype, "1B"),
            parse_cluster("1x rtx3090"),
            sequence_length=tokens,
        )
        for tokens in (1024, 8192)
    )
    times = [
        float(interpolate_seconds(p.classes[0].units[KIND].forward, 16)) for p in (short, long)
    ]
    assert times[1] > 8.5 * times[0]


def test_an_optimizer_without_state_needs_less_of_everything():
    adamw, sgd = estimated(), estimated(optimizer_bytes=0)
    assert (adamw.optimizer_bytes_per_element, sgd.optimizer_bytes_per_element) == (8, 0)
    request = PlanRequest(global_batch=8, space=ONE_STAGE)
    plans = [get_prediction(plan_fastest(p, request)) for p in (adamw, sgd)]
    for one, other in zip(*(p.workers for p in plans)):
        # Beside masters of 4 bytes an element there are 8 of the optimizer's, or none.
        assert other.memory_bytes["state"] == pytest.approx(one.memory_bytes["state"] / 3, rel=0.1)
        assert other.optimizer_s < one.optimizer_s


def test_a_model_whose_flops_nobody_counted_is_refused():
    (kind,) = MODEL.kinds
    unknown = MODEL.model_copy(update={"kinds": (kind.model_copy(update={"flops": 0.0}),)})
    with raises(InputError, code="profile-without-flops") as caught:
        estimated(model=lambda dtype: unknown.model_copy(update={"compute_dtype": dtype}))
    assert "gpumix profile" in caught.value.fix


def test_estimates_that_were_off_are_set_right():
    profile = estimated()
    for slow, of_class in zip(scale_estimates(profile.classes, 1.5), profile.classes):
        assert slow.estimated
        for kind, times in of_class.units.items():
            assert slow.units[kind].forward.values == pytest.approx(
                [1.5 * v for v in times.forward.values]
            )
        assert slow.units[ROOT].gradient is None


@pytest.mark.parametrize("size", [1e3, 1e13])
def test_a_size_that_no_llama_has_is_refused(size):
    with raises(InputError, code="no-llama-of-size"):
        make_llama_like(size)


def test_what_a_model_holds_does_not_depend_on_the_cards():
    one, other = estimated("1x l4"), estimated("8x h100-sxm")
    assert one.model == other.model == MODEL
    assert estimated("1x t4").model == model_in("fp16")
    config = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 2,
              "num_attention_heads": 8, "intermediate_size": 1024, "vocab_size": 1000}  # fmt: skip

    def model(dtype):
        return make_decoder(config).model(64, dtype, "llama")

    assert estimated(model=model).model.parameters == make_decoder(config).parameters


def test_plus_signs_join_cards_like_commas():
    assert parse_cluster("2x rtx4090 + p40") == parse_cluster("2x rtx4090, p40")
    assert explain_short_names("a100+p40") == explain_short_names("a100, p40") != []
