"""What the planner says when nothing fits: how much is missing, where, and what would help."""

from __future__ import annotations

import re

import pytest

from gpumix.cost.peak_memory import compute_usable_bytes
from gpumix.planner.common.strategy import PlanRequest
from gpumix.planner.data_parallel.no_fit_error import UNREACHABLE
from gpumix.planner.data_parallel.search import plan_one_stage
from gpumix.schema.errors import NoFeasiblePlanError
from gpumix.schema.job.search_space import EVERYTHING, Space
from helpers.errors import raises
from helpers.extended import every_second
from helpers.plans.brute import plan_of
from helpers.plans.profiles import GIB, Card, block, curve, line, profile, steady

# Where all that is done takes memory: nothing runs one after the other, nothing is kept elsewhere.
LAYERED = Space(
    zero_stages=(3,),
    shardings=("all",),
    gradient_checkpointing=(True,),
    checkpoints_on=("device",),
    orders=("layered",),
)


def test_what_is_missing_is_named_to_the_byte():
    """With the missing bytes the plan fits, with one less per device it does not."""
    kinds = [block(trainable=10_000, kept=line(2_000))]

    def cluster(memory):
        cards = [Card("a", 1, memory, steady(1.0)), Card("b", 1, memory // 2, steady(1.0))]
        return profile(cards, kinds=kinds)

    with pytest.raises(NoFeasiblePlanError) as caught:
        plan_one_stage(cluster(400_000), PlanRequest(global_batch=4, space=LAYERED))
    error = caught.value
    assert error.exit_code == 4
    assert "the 2 devices are short of" in error.what
    assert "a can use" in error.why
    assert "more on each b would do" in error.why
    short = int(re.findall(r"(\d+) bytes", error.what)[-1])

    def with_more(extra):
        setting = cluster(400_000)
        # The reserve is taken of the whole memory, so that more of it is usable than was added.
        classes = [c.model_copy(update={"framework_bytes": 0}) for c in setting.classes]
        grown = [
            c.model_copy(
                update={"memory_bytes": -(-(c.memory_bytes * 98 // 100 + extra) * 100 // 98)}
            )
            for c in setting.cluster.classes
        ]
        update = {"classes": tuple(grown)}
        return setting.model_copy(
            update={
                "classes": tuple(classes),
                "cluster": setting.cluster.model_copy(update=update),
            }
        )

    assert plan_of(with_more(short + 2), 4, LAYERED) is not None
    assert plan_of(with_more(short - 2), 4, LAYERED) is None


@pytest.mark.parametrize("space", [LAYERED, EVERYTHING.model_copy(update={"zero_stages": (3, 2)})])
def test_the_largest_batch_that_fits_is_named(space):
    kinds = [block(trainable=100, kept=line(2_000))]
    setting = profile([Card("c", 2, 50_000, steady(1.0))], kinds=kinds)
    with raises(NoFeasiblePlanError, code="no-plan-fits") as caught:
        plan_one_stage(setting, PlanRequest(global_batch=40, space=space))
    largest = int(caught.value.fix.split("global_batch_size: ")[1].split("`")[0])
    assert plan_of(setting, largest, space) is not None
    assert plan_of(setting, largest + 1, space) is None


def test_a_device_too_small_to_take_part_is_named():
    cards = [Card("big", 1, GIB, steady(1.0)), Card("tiny", 1, 100, steady(1.0))]
    with raises(NoFeasiblePlanError, code="no-plan-fits") as caught:
        plan_one_stage(profile(cards), PlanRequest(global_batch=4, space=LAYERED))
    assert "leave tiny out" in caught.value.fix


def test_kernels_that_like_large_micro_batches_count_as_they_are():
    """Four samples at once keep 13 KB, one by one 40 KB."""
    kept = curve(10_000, 11_000, 12_000, 13_000)
    setting = profile([Card("c", 1, 160_000, steady(1.0))], kinds=[block(kept=kept)])
    with pytest.raises(NoFeasiblePlanError) as caught:
        plan_one_stage(setting, PlanRequest(global_batch=40, space=LAYERED))
    largest = int(caught.value.fix.split("global_batch_size: ")[1].split("`")[0])
    assert [plan_of(setting, largest + n, LAYERED) is not None for n in range(4)] == [
        True,
        False,
        False,
        False,
    ]


# -- every way out is one --------------------------------------------------------------------------

GRAPHS = EVERYTHING.model_copy(update={"gradient_checkpointing": (False,), "zero_stages": (3,)})
REPLICATED = LAYERED.model_copy(update={"zero_stages": (0,)})
TO_HOST = LAYERED.model_copy(update={"checkpoints_on": ("host",)})
COPY = curve(1e-4, 1e-3, sizes=(100.0, 2000.0))


def times(forward=1.0):
    """As `steady`, and what the backward takes where the graph was kept."""
    of = steady(forward)
    kept = of["block"].model_copy(update={"gradient": line(2 * forward)})
    return of | {"block": kept}


def cards(memory=50_000, elements=100, **changes):
    """Two like devices; a sample keeps 2 KB at each call, or a graph of 8 KB."""
    kinds = [block(trainable=elements, kept=line(2_000), saved=line(8_000))]
    return profile([Card("c", 2, memory, times(), **changes)], kinds=kinds)


def refusal(setting, batch, space=LAYERED):
    with pytest.raises(NoFeasiblePlanError) as caught:
        plan_one_stage(setting, PlanRequest(global_batch=batch, space=space))
    assert " 0 bytes" not in str(caught.value)
    assert str(UNREACHABLE) not in str(caught.value)
    return caught.value


def with_memory(setting, extra):
    """The classes that `extra` names with so many more usable bytes on each device."""
    classes = tuple(grown(c, extra.get(c.name, 0)) for c in setting.cluster.classes)
    cluster = setting.cluster.model_copy(update={"classes": classes})
    return setting.model_copy(update={"cluster": cluster})


def grown(of, extra):
    """The reserve is a part of the whole, so more is added than is usable."""
    usable = compute_usable_bytes(of) + extra
    near = range(int(usable / 0.98) - 2, int(usable / 0.98) + 3)
    sizes = (of.model_copy(update={"memory_bytes": n}) for n in near)
    return next(c for c in sizes if compute_usable_bytes(c) == usable)


@pytest.mark.parametrize(
    ("setting", "batch", "space", "technique", "wider"),
    [
        (cards(), 10, GRAPHS, "gradient checkpointing", {"gradient_checkpointing": (True,)}),
        (cards(600_000, 10_000), 4, REPLICATED, "ZeRO-3", {"zero_stages": (3,)}),
        (
            cards(700_000, 10_000),
            16,
            REPLICATED.model_copy(update={"gradient_checkpointing": (False,)}),
            "gradient checkpointing and ZeRO-3",
            {"gradient_checkpointing": (True,), "zero_stages": (3,)},
        ),
    ],
    ids=["recompute", "ZeRO-3", "both"],
)
def test_a_technique_with_which_it_fits_is_named(setting, batch, space, technique, wider):
    error = refusal(setting, batch, space)
    assert error.fix == f"allow {technique}: with it the batch fits"
    assert plan_of(setting, batch, space.model_copy(update=wider)) is not None


def test_a_technique_that_was_not_measured_is_named_with_the_class():
    setting = profile(
        [Card("with", 1, 50_000, times()), Card("without", 1, 50_000, steady(1.0))],
        kinds=[block(trainable=100, saved=line(10))],
    )
    error = refusal(setting, 2, GRAPHS)
    assert "what class 'without' takes to keep graphs was not measured" in error.what
    assert error.where == "1 x with, 1 x without"
    assert "allow gradient checkpointing" in error.fix


def test_the_bytes_for_each_class_are_those_that_it_would_take():
    kinds = [block(trainable=10_000, kept=line(2_000))]
    cards = [Card("a", 2, 300_000, steady(1.0)), Card("b", 1, 200_000, steady(1.0))]
    setting = profile(cards, kinds=kinds)
    found = re.findall(r"(\d+) bytes\)? more on each (\w) would do", refusal(setting, 4).why)
    assert [name for _, name in found] == ["a", "b"]
    for amount, name in found:
        assert plan_of(with_memory(setting, {name: int(amount)}), 4, LAYERED) is not None
        assert plan_of(with_memory(setting, {name: int(amount) - 2}), 4, LAYERED) is None


def test_classes_too_small_are_left_out_only_if_others_remain():
    small = {"kinds": [block(trainable=10_000)]}
    tiny = Card("tiny", 1, 1_000, steady(1.0))
    fits = refusal(profile([Card("c", 2, 1_000_000, steady(1.0)), tiny], **small), 10)
    assert fits.fix == "leave tiny out of the cluster: the rest fits"
    short = refusal(profile([Card("c", 2, 400_000, steady(1.0)), tiny], **small), 10)
    assert short.fix == "leave tiny out of the cluster, or train a smaller model"
    assert refusal(profile([tiny], **small), 10).fix == "train a smaller model"


def test_the_sequence_length_that_is_named_fits():
    """A sample of half the length keeps half as much."""
    setting = cards(500_000, 3_000)
    length = int(re.search(r"sequence_length: (\d+)`", refusal(setting, 300).fix)[1])
    assert length in (64, 32, 16, 8)

    def at(tokens):
        kinds = [block(trainable=3_000, kept=line(2_000 * tokens / 128))]
        return profile([Card("c", 2, 500_000, times())], kinds=kinds)

    assert plan_of(at(length), 300, LAYERED) is not None
    assert plan_of(at(2 * length), 300, LAYERED) is None


def test_what_hosts_are_short_of_is_told_apart():
    setting = cards(160_000, host_copy=COPY, host_bytes=500)
    error = refusal(setting, 40, TO_HOST)
    short = int(re.search(r"hosts are short of .*?(\d+) bytes.* for each device", error.what)[1])
    assert "more memory there alone would not help" in error.why
    assert plan_of(cards(160_000, host_copy=COPY, host_bytes=500 + short), 40, TO_HOST) is not None
    assert plan_of(cards(160_000, host_copy=COPY, host_bytes=500 + short - 1), 40, TO_HOST) is None


def test_a_graph_that_large_micro_batches_make_smaller_counts_as_it_is():
    """The graphs of four samples at once take 13 KB, one by one 40 KB."""
    saved = curve(10_000, 11_000, 12_000, 13_000)
    setting = profile([Card("c", 1, 160_000, times())], kinds=[block(saved=saved)])
    error = refusal(setting, 12, GRAPHS)
    short = int(re.search(r"short of .*?(\d+) bytes", error.what)[1])
    assert plan_of(with_memory(setting, {"c": short}), 12, GRAPHS) is not None
    assert plan_of(with_memory(setting, {"c": short - 1}), 12, GRAPHS) is None


@pytest.mark.parametrize("batch", every_second([600, 5_000]))
def test_a_large_batch_that_does_not_fit_is_told_what_fits(batch):
    """Micro-batches of one sample are not the least here."""
    kinds = [block(trainable=100, kept=line(100, start=5))]
    setting = profile([Card("c", 2, 60_000, steady(1.0))], kinds=kinds)
    error = refusal(setting, batch)
    fitting = int(re.search(r"`global_batch_size: (\d+)`, which fits", error.fix)[1])
    assert plan_of(setting, fitting, LAYERED) is not None
    assert plan_of(setting, fitting + batch // 10, LAYERED) is None
