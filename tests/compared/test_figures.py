"""What the benchmarks of the engine compute from what they measure."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compared.least_memory import ELEMENT, Sizes, least_bytes
from compared.rounds import Ratio
from compared.setting import Model, Setting
from compared.systems import Plain
from engine_memory import largest
from gpumix.hardware.memory_limit import limit_memory

TINY = Model(width=32, layers=3, vocabulary=64, sequence=16)


@given(limit=st.integers(0, 40), guess=st.integers(1, 40), most=st.integers(1, 40))
def test_the_largest_possible_number_is_found_from_any_guess(limit, guess, most):
    tried = []

    def is_possible(number):
        assert 1 <= number <= most and number not in tried
        tried.append(number)
        return number <= limit

    assert largest(is_possible, guess, most) == min(limit, most)


def test_a_ratio_is_of_rounds_and_not_of_medians():
    ratio = Ratio.of([1.0, 10.0, 2.0], [2.0, 20.0, 4.0])
    assert (ratio.low, ratio.median, ratio.high) == (2.0, 2.0, 2.0)


def test_the_least_of_plain_data_parallelism_is_whole_state_and_graphs():
    """Counted by hand: no unit is sharded, and all that autograd saves is there at the end."""
    sizes = Sizes(root=100, unit=50, layers=2, boundary_bytes=8, saved_bytes=80, logits_bytes=16)
    plan = Setting(TINY, world=2, samples=3).plan(TINY.build(), 0, "layered")
    elements = 100 + 2 * 50
    weights_and_moments = ELEMENT * 3 * elements
    in_last_unit = ELEMENT * (100 + 50) + 3 * (2 * 80 + 8)
    in_first_unit = ELEMENT * elements + 3 * (80 + 8)
    assert least_bytes(sizes, plan, 0) == weights_and_moments + max(in_last_unit, in_first_unit)


def test_shards_take_less():
    sizes = Sizes.of(TINY)
    setting = Setting(TINY, world=4, recompute=True)
    least = [least_bytes(sizes, setting.plan(TINY.build(), n, "layered"), 0) for n in (0, 1, 2, 3)]
    assert least == sorted(least, reverse=True)
    assert len(set(least)) == 4


@pytest.mark.parametrize("recompute", [True, False])
def test_a_plain_loop_takes_little_more_than_the_least(recompute):
    memory = limit_memory(None)
    if not memory.exact:
        pytest.skip(f"bytes cannot be counted here: {memory.why_inexact}")
    setting = Setting(TINY, world=1, samples=16, recompute=recompute)
    least = least_bytes(Sizes.of(TINY), setting.plan(TINY.build(), 0, "sequential"), 0)
    gc.collect()
    before = memory.current_bytes
    loop = Plain().make(setting, torch.device("cpu"))
    for step in range(2):
        loop.step(setting.batch(step, 0))
    memory.reset_peak()
    loop.step(setting.batch(2, 0))
    assert least < memory.peak_bytes - before < 1.25 * least


def test_batches_of_ranks_differ_and_are_the_same_again():
    setting = Setting(TINY, world=2)
    first, second = (setting.batch(0, rank)["input_ids"] for rank in (0, 1))
    assert not torch.equal(first, second)
    assert torch.equal(first, setting.batch(0, 0)["input_ids"])
