"""Cephalo's files as profiles, against numbers read from the files by hand."""

from __future__ import annotations

import pytest

from gpumix.cost.memory_layout.curves import interpolate_bytes, interpolate_seconds
from gpumix.cost.peak_memory import compute_usable_bytes
from gpumix.schema.profile.profile import ROOT
from published import GIB, cephalo

LLAMA = cephalo.Setting("llama_7b", "fp16")
GPT = cephalo.Setting("gpt_2.7b", "fp16")


def test_times_are_the_measured_points_and_backward_recomputes():
    found = cephalo.profile(LLAMA, {"l4": 2, "a6000": 1}).of_class("l4")
    block = found.units["block"]
    assert block.forward.values[:2] == pytest.approx((0.00419284153, 0.00744542140))
    assert block.gradient.values[1] == pytest.approx(0.0314939119)
    assert block.backward.values[1] == pytest.approx(0.00744542140 + 0.0314939119)
    assert found.largest_micro_batch == 16
    assert interpolate_seconds(found.units[ROOT].backward, 5) == 0


def test_where_only_a_fit_is_given_it_is_the_time():
    p40 = cephalo.profile(GPT, {"p40": 1, "l4": 1}).of_class("p40")
    assert interpolate_seconds(p40.units["block"].forward, 5) == pytest.approx(0.082319572)
    assert p40.largest_micro_batch is None


def test_peaks_go_on_by_their_largest_step():
    peak = cephalo.peak_bytes(GPT)
    assert interpolate_bytes(peak, 4) / GIB == pytest.approx(2.2334365845)
    step = 1.8626046181 - 1.4901814461
    assert interpolate_bytes(peak, 10) / GIB == pytest.approx(2.2334365845 + 6 * step)


def test_longer_samples_take_their_memory_and_fp32_stands_in_for_fp16():
    peak = cephalo.peak_bytes(cephalo.Setting("llama_3b", "fp16", 1024))
    assert interpolate_bytes(peak, 1) / GIB == pytest.approx(
        3.050779700
    )  # two samples of 512 tokens
    assert interpolate_bytes(peak, 2) / GIB == pytest.approx(3.367326617)


def test_three_quarters_of_a_card_may_be_used():
    profile = cephalo.profile(GPT, {"a6000": 1, "p40": 2})
    usable = compute_usable_bytes(profile.cluster.class_named("a6000"))
    assert usable == pytest.approx(0.75 * 47.99 * GIB, abs=2)
    assert profile.model.parameters == 2770621440 // 32 * 32


def test_a_planned_peak_is_theirs_with_what_they_set_aside():
    """Gathered parameters and gradients are in their peak, and counted by the cost model too."""
    profile = cephalo.profile(GPT, {"a6000": 1, "p40": 1})
    in_flight = 2 * (2 + 4) * profile.model.kinds[0].trainable
    working = float(interpolate_bytes(profile.model.kinds[0].backward, 3))
    assert (working + in_flight) / GIB == pytest.approx(1.8626046181 + 2)


def test_a_gpu_that_was_not_timed_is_an_error():
    with pytest.raises(ValueError, match="no times of bert_large fp16 512 on v100x16"):
        cephalo.profile(cephalo.Setting("bert_large", "fp16"), {"v100x16": 1})


def test_work_is_told_where_sizes_and_tokens_are_known():
    work = cephalo.block_work(LLAMA)
    assert work.elements == 202_383_360
    assert work.flops == 2 * 512 * 202_383_360 + 4 * 512**2 * 4096
    assert cephalo.block_work(cephalo.Setting("vit_g", "fp32")) is None
    assert cephalo.block_work(cephalo.Setting("bert_base", "fp32")) is None
