"""Sailor's files as profiles, links and plans, against numbers read from the files by hand."""

from __future__ import annotations

from itertools import accumulate

import pytest

from gpumix.cost.memory_layout.curves import interpolate_seconds
from gpumix.cost.pipeline_schedule import Action
from gpumix.schema.profile.profile import ROOT
from published import GIB
from published.deepspeed import Receive, Send, instructions
from published.sailor import BLOCK_PARAMETERS, FP32, PARAMETERS, Group, Setup, profile
from published.sailor_links import network, rate
from published.sailor_runs import runs

SETUP = Setup(framework_bytes=GIB)


def v100(count: int = 4):
    return profile([Group("V100-16", 1, count)], SETUP, None).of_class("V100-16")


def test_a_block_takes_the_mean_of_24_layers():
    block = v100().units["block"]
    assert interpolate_seconds(block.forward, 2) == pytest.approx((0.014626 + 23 * 0.014086) / 24)
    both = interpolate_seconds(block.forward, 2) + interpolate_seconds(block.gradient, 2)
    assert interpolate_seconds(block.backward, 2) == pytest.approx(both)


def test_the_root_is_the_embedding_before_and_the_head_after():
    root = v100().units[ROOT]
    assert root.forward.values[root.forward.sizes.index(2)] == pytest.approx(0.000527)
    assert interpolate_seconds(root.backward, 2) == pytest.approx(0.036702 + 0.059358 + 0.000003)


def test_an_update_is_that_of_26_layers():
    assert v100().optimizer_s_per_element * PARAMETERS == pytest.approx(26 * 0.00485, rel=0.01)


def test_parameters_are_those_of_the_model():
    """Four matrices of attention, two of the feed-forward, biases, two norms."""
    width = 1024
    attention, feed_forward = 4 * (width**2 + width), 8 * width**2 + 5 * width
    assert attention + feed_forward + 4 * width == BLOCK_PARAMETERS
    assert pytest.approx(1.63, abs=0.005) == FP32 * PARAMETERS / 1e9


def test_a_group_of_gpus_is_one_device_with_their_memory():
    cluster = profile([Group("V100-16", 2, 4)], SETUP, None).cluster
    assert cluster.class_named("V100-16.x2").memory_bytes == 32 * GIB
    assert [d.host for d in cluster.devices] == sorted(d.host for d in cluster.devices)
    assert len({d.host for d in cluster.devices}) == 2  # hosts of four GPUs


def test_the_rate_of_a_link_is_a_quadratic_of_the_message_and_at_most_the_stated_one():
    fit = ([-0.008450897567554275, 0.32345407867588116, 3.446937175278422], 5787468328.312377)
    assert rate(fit, 1e6) == pytest.approx(3.446937175e9)
    assert rate(fit, 8e6) == pytest.approx(1e9 * (3.446937175 + 3 * 0.323454079 - 9 * 0.008450898))
    assert rate(fit, 2**40) <= 5787468328.312377


def test_hosts_send_with_all_their_gpus():
    links = network([Group("V100-16", 1, 8)])
    link = links.of("between", "V100-16", "V100-16")
    seconds = (
        4
        * 2**20
        / rate(
            ([-0.008450897567554275, 0.32345407867588116, 3.446937175278422], 5787468328.312377),
            2**20,
        )
    )
    assert interpolate_seconds(link.times, 4 * 2**20) == pytest.approx(seconds)


def test_links_between_unlike_hosts_of_one_laboratory_are_slow():
    links = network([Group("RTX-3090", 8, 1), Group("RTX-2080", 8, 1)])
    slow = links.of("between", "RTX-3090.x8", "RTX-2080.x8").largest_bytes_per_s
    assert slow == pytest.approx(0.115e9, rel=0.05)


def test_runs_are_plans():
    found = {run.name: run for run in runs()}
    in_one = [name for name, run in found.items() if len(run.parts) == 1]
    assert sorted(in_one) == [
        "gh200/N1_D1_M4_G1", "gh200/N1_D1_M4_G32", "gh200/N2_D2", "gh200/N4_D4", "mixed/N4_D4",
    ]  # fmt: skip
    run = found["mixed/N4_D4"]
    assert (run.step_s, run.reduce_s, run.peak_bytes) == (83.45238, 21.59317, 9387900928)
    assert [g.gpu for g in run.groups] == ["RTX-3090", "RTX-2080", "Titan-RTX", "RTX-2080"]
    plan = run.plan(run.profile())
    assert {(w.samples, w.micro_batch, w.mode.recompute) for w in plan.workers} == {(64, 2, False)}
    assert plan.zero_stage == 0


def test_runs_in_pipelines_are_plans_of_stages():
    run = {run.name: run for run in runs()}["mixed/N4_D2"]
    plan = run.plan(run.profile())
    assert [len(stage.units) for stage in plan.stages] == [11, 13]  # and embedding, and head
    assert [[w.device_class for w in stage.workers] for stage in plan.stages] == [
        ["RTX-3090.x8", "RTX-2080.x8"], ["Titan-RTX.x8", "RTX-2080.x8"],
    ]  # fmt: skip
    assert {w.samples for w in plan.workers} == {128}
    assert [stage.root for stage in plan.stages] == [("embedding",), ("norm", "head")]
    assert [t.call for t in plan.stages[1].takes] == [10]


def test_deepspeed_tells_its_neighbours_first_and_then_computes():
    """`TrainSchedule` of DeepSpeed's own file, for two stages and two micro-batches, by hand."""

    def told(stage):
        letters = {Send: "S", Receive: "R", Action: ""}
        return [
            f"{letters[type(one)]}{one.kind[0]}{one.batch}"
            for one in instructions(stage, 2, range(2))
        ]

    assert told(0) == ["f0", "Sf0", "f1", "Rb0", "Sf1", "b0", "Rb1", "b1"]
    assert told(1) == ["Rf0", "f0", "b0", "Sb0", "Rf1", "f1", "b1", "Sb1"]


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_every_micro_batch_passes_all_stages_of_deepspeed_once(stages):
    for stage in range(stages):
        done = [one for one in instructions(stage, stages, range(4)) if type(one) is Action]
        assert [one.batch for one in done if one.kind == "forward"] == list(range(4))
        assert [one.batch for one in done if one.kind == "backward"] == list(range(4))
        begun = accumulate(1 if one.kind == "forward" else -1 for one in done)
        assert max(begun) == min(4, stages - stage)  # as many wait as with 1F1B
