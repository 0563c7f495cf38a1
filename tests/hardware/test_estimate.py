"""Profiles of cards that nobody has measured."""

from __future__ import annotations

import pytest

from gpumix.cost.curves import seconds_at
from gpumix.hardware.decoder import KIND, decoder, llama_shaped
from gpumix.hardware.describe import cluster
from gpumix.hardware.estimate import estimate, rescaled
from gpumix.planner.explain import plan
from gpumix.spec.errors import InputError
from gpumix.spec.profile import ROOT


def model_in(dtype):
    return llama_shaped(1e9).model(1024, dtype, "1B")


MODEL = model_in("bf16")


def estimated(text="2x rtx3090, 1x p40", model=model_in, **changes):
    return estimate(model, cluster(text), sequence_length=1024, **changes)


def test_every_class_is_there_and_marked():
    profile = estimated()
    assert profile.estimated == ("p40", "rtx3090")
    assert {c.name for c in profile.cluster.classes} == {"p40", "rtx3090"}
    for of_class in profile.classes:
        assert set(of_class.units) == {KIND, ROOT}
        assert of_class.disturbed() == ""
    made = plan(profile, 8)
    assert set(made.estimated) == {w.device_class for w in made.workers}
    assert not made.emulated


def test_the_recompute_is_a_forward_more():
    for of_class in estimated().classes:
        times = of_class.units[KIND]
        for n in (1, 3, 50):
            both = seconds_at(times.forward, n) + seconds_at(times.gradient, n)
            assert seconds_at(times.backward, n) == pytest.approx(both)


def test_a_longer_sequence_takes_longer_than_in_proportion():
    """Attention grows with its square."""
    short, long = (
        estimate(
            lambda dtype, tokens=tokens: llama_shaped(1e9).model(tokens, dtype, "1B"),
            cluster("1x rtx3090"),
            sequence_length=tokens,
        )
        for tokens in (1024, 8192)
    )
    times = [float(seconds_at(p.classes[0].units[KIND].forward, 16)) for p in (short, long)]
    assert times[1] > 8.5 * times[0]


def test_an_optimizer_without_state_needs_less_of_everything():
    adamw, sgd = estimated(), estimated(optimizer_bytes=0)
    assert (adamw.optimizer_bytes_per_element, sgd.optimizer_bytes_per_element) == (8, 0)
    plans = [plan(p, 8).prediction for p in (adamw, sgd)]
    for one, other in zip(*(p.workers for p in plans)):
        # Beside masters of 4 bytes an element there are 8 of the optimizer's, or none.
        assert other.memory_bytes["state"] == pytest.approx(one.memory_bytes["state"] / 3, rel=0.1)
        assert other.optimizer_s < one.optimizer_s


def test_a_model_whose_flops_nobody_counted_is_refused():
    (kind,) = MODEL.kinds
    unknown = MODEL.model_copy(update={"kinds": (kind.model_copy(update={"flops": 0.0}),)})
    with pytest.raises(InputError, match="how many FLOPs") as caught:
        estimated(model=lambda dtype: unknown.model_copy(update={"compute_dtype": dtype}))
    assert "gpumix profile" in caught.value.fix


def test_estimates_that_were_off_are_set_right():
    profile = estimated()
    for slow, of_class in zip(rescaled(profile.classes, 1.5), profile.classes):
        assert slow.estimated
        for kind, times in of_class.units.items():
            assert slow.units[kind].forward.values == pytest.approx(
                [1.5 * v for v in times.forward.values]
            )
        assert slow.units[ROOT].gradient is None


@pytest.mark.parametrize("size", [1e3, 1e13])
def test_a_size_that_no_llama_has_is_refused(size):
    with pytest.raises(InputError, match="shaped like a Llama"):
        llama_shaped(size)


def test_what_a_model_holds_does_not_depend_on_the_cards():
    one, other = estimated("1x l4"), estimated("8x h100-sxm")
    assert one.model == other.model == MODEL
    assert estimated("1x t4").model == model_in("fp16")
    config = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 2,
              "num_attention_heads": 8, "intermediate_size": 1024, "vocab_size": 1000}  # fmt: skip

    def model(dtype):
        return decoder(config).model(64, dtype, "llama")

    assert estimated(model=model).model.parameters == decoder(config).parameters
