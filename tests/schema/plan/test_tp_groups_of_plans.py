"""Tensor-parallel groups of a stage: their ranks, the parts of units each has, and what is none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Mode, Stage, Worker


def worker(number: int, **more: Any) -> Worker:
    usual = {"samples": 2, "micro_batch": 1, "state_share": 0.5}
    return Worker(device=f"d{number}", device_class="c", **usual | more)


def stage(parts: Sequence[int], tensor: int, **more: Any) -> Stage:
    workers = tuple(worker(n, parts=p, **more) for n, p in enumerate(parts))
    return Stage(units=("a",), workers=workers, tensor=tensor)


@pytest.mark.parametrize(
    ("parts", "tensor", "said"),
    [
        ([1, 1, 1], 2, "worker d2 cannot form a tensor-parallel group: their parts (1)"),
        (
            [2, 1],
            3,
            "d0, d1 cannot form a tensor-parallel group: their parts (2, 1) are to be alike",
        ),
        ([1, 2], 2, "workers d0, d1 cannot form a tensor-parallel group: their parts (1, 2)"),
        ([2, 2], 2, "a tensor parallel degree of 2 is more than any group has workers: make it 1"),
        ([2], 1, "worker d0 cannot form a tensor-parallel group: their parts (2)"),
    ],
)
def test_workers_that_are_no_tp_groups(parts, tensor, said):
    with pytest.raises(ValidationError) as caught:
        stage(parts, tensor)
    assert said in str(caught.value)


def test_members_of_a_tp_group_do_the_same():
    workers = (worker(0), worker(1, samples=1))
    with pytest.raises(
        ValidationError, match=r"of a tensor-parallel group \(d0, d1\) must have the same samples"
    ):
        Stage(units=("a",), workers=workers, tensor=2)


def test_who_is_alone_in_a_tp_group_may_be_compiled():
    workers = (worker(0, parts=2, compile=True), worker(1), worker(2))
    assert Stage(units=("a",), workers=workers, tensor=2).has_mixed_degrees
    with pytest.raises(ValidationError, match="are not compiled"):
        Stage(units=("a",), workers=(worker(0, compile=True), worker(1)), tensor=2)


@given(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=5), st.randoms())
def test_each_part_is_divided_among_those_that_have_it(sizes, random):
    degree, count = max(sizes), len(sizes)
    weights = [n + 1 for n in range(count)]
    workers = []
    for size, weight in zip(sizes, weights):
        share = weight / sum(weights)
        workers += [
            worker(len(workers) + n, parts=degree // size, state_share=share) for n in range(size)
        ]
    ranks = [one.device for one in workers]
    random.shuffle(ranks)
    plan = Plan(
        strategy="test",
        model="m",
        sequence_length=8,
        global_batch=2 * count,
        stages=(Stage(units=("a",), workers=tuple(workers), tensor=degree),),
        ranks=tuple(ranks),
    )
    (only,) = plan.stages
    assert [len(tp_group) for tp_group in only.tp_groups] == sizes
    assert plan.degrees == tuple(sorted(set(sizes)))
    assert sum(map(only.stored_by, only.workers)) == pytest.approx(1.0)
    held: Counter[int] = Counter()
    for rank in range(len(workers)):
        parts = plan.parts_of(rank, 0)
        held.update(parts)
        tp_group = plan.get_tp_group(rank, 0)
        assert sorted(p for r in tp_group for p in plan.parts_of(r, 0)) == list(range(degree))
        for part in range(degree):
            assert (rank in plan.shares_among([0], part)) == (part in parts)
    assert held == Counter(dict.fromkeys(range(degree), count))
    for part in (None, *range(degree)):
        assert sum(plan.shares_among([0], part).values()) == pytest.approx(1.0)


def test_workers_of_a_stage_with_tp_groups_make_the_head_alike():
    """Tensor parallelism divides the head, and chunked cross-entropy does not."""
    chunked = [worker(n, mode=Mode(head="chunked")) for n in range(2)]
    others = [worker(n + 2) for n in range(2)]
    with pytest.raises(ValidationError, match="use chunked cross-entropy, or none"):
        Stage(units=("a",), workers=(*chunked, *others), tensor=2)
