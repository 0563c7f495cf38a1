"""What the planner says when nothing fits: how much is missing, where, and what would help."""

from __future__ import annotations

import pytest
from brute import plan_of
from profiles import GIB, Card, block, curve, line, profile, steady

from gpumix.planner.base import PlanRequest
from gpumix.planner.optimal import optimal
from gpumix.spec.errors import NoFeasiblePlanError
from gpumix.spec.space import ENGINE, EVERYTHING


def test_what_is_missing_is_named_to_the_byte():
    """With the missing bytes the plan fits, with one less per device it does not."""
    kinds = [block(trainable=10_000, kept=line(2_000))]

    def cluster(memory):
        cards = [Card("a", 1, memory, steady(1.0)), Card("b", 1, memory // 2, steady(1.0))]
        return profile(cards, kinds=kinds)

    with pytest.raises(NoFeasiblePlanError) as caught:
        optimal(cluster(400_000), PlanRequest(global_batch=4))
    error = caught.value
    assert error.exit_code == 4
    assert "the 2 devices are short of" in error.what
    assert "a can use" in error.why
    assert "more on each b would do" in error.why
    short = int(error.what.split(", ")[-1].split()[0])

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

    assert plan_of(with_more(short + 2), 4, ENGINE) is not None
    assert plan_of(with_more(short - 2), 4, ENGINE) is None


@pytest.mark.parametrize("space", [ENGINE, EVERYTHING.model_copy(update={"zero_stages": (3, 2)})])
def test_the_largest_batch_that_fits_is_named(space):
    kinds = [block(trainable=100, kept=line(2_000))]
    setting = profile([Card("c", 2, 50_000, steady(1.0))], kinds=kinds)
    with pytest.raises(NoFeasiblePlanError, match="the largest that fits") as caught:
        optimal(setting, PlanRequest(global_batch=40, space=space))
    largest = int(caught.value.fix.split("global_batch: ")[1].split("`")[0])
    assert plan_of(setting, largest, space) is not None
    assert plan_of(setting, largest + 1, space) is None


def test_a_device_too_small_to_take_part_is_named():
    cards = [Card("big", 1, GIB, steady(1.0)), Card("tiny", 1, 100, steady(1.0))]
    with pytest.raises(NoFeasiblePlanError, match="even without samples and state") as caught:
        optimal(profile(cards), PlanRequest(global_batch=4))
    assert "leave tiny out" in caught.value.fix


def test_kernels_that_like_large_micro_batches_count_as_they_are():
    """Four samples at once keep 13 KB, one by one 40 KB."""
    kept = curve(10_000, 11_000, 12_000, 13_000)
    setting = profile([Card("c", 1, 160_000, steady(1.0))], kinds=[block(kept=kept)])
    largest = max(n for n in range(1, 40) if plan_of(setting, n, ENGINE) is not None)
    with pytest.raises(NoFeasiblePlanError) as caught:
        optimal(setting, PlanRequest(global_batch=largest + 1))
    assert f"`global_batch: {largest}`" in caught.value.fix
