"""Jobs that cannot be cut over unequal workers: against every possible assignment."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from gpumix.engine.optimizers.assign_work import assign_jobs

COSTS = st.lists(st.floats(0.1, 100), max_size=6)
SPEEDS = st.lists(st.floats(0.1, 10), min_size=1, max_size=3)


def ends(costs, speeds, chosen, busy):
    """When the last worker is done."""
    load = list(busy)
    for cost, worker in zip(costs, chosen):
        load[worker] += cost
    return max(amount / speed for amount, speed in zip(load, speeds))


def earliest(costs, speeds):
    idle = [0.0] * len(speeds)
    workers = range(len(speeds))
    return min(ends(costs, speeds, c, idle) for c in product(workers, repeat=len(costs)))


@given(COSTS, SPEEDS)
def test_unequal_workers_end_within_twice_the_least(costs, speeds):
    found = ends(costs, speeds, assign_jobs(costs, speeds), [0.0] * len(speeds))
    assert found <= 2 * earliest(costs, speeds) * (1 + 1e-9)


@given(COSTS, st.integers(1, 3))
def test_equal_workers_end_within_a_third_of_the_least(costs, world):
    speeds = [1.0] * world
    found = ends(costs, speeds, assign_jobs(costs, speeds), [0.0] * world)
    assert found <= (4 / 3 - 1 / (3 * world)) * earliest(costs, speeds) * (1 + 1e-9)


@given(COSTS, SPEEDS, st.data())
def test_no_single_job_is_better_elsewhere(costs, speeds, data):
    """Also with what workers have to do already: moving the last job that one got helps nobody."""
    busy = data.draw(st.lists(st.floats(0, 100), min_size=len(speeds), max_size=len(speeds)))
    chosen = assign_jobs(costs, speeds, busy=busy)
    if costs:
        last = min(range(len(costs)), key=lambda job: (costs[job], -job))
        mine = sum(c for c, w in zip(costs, chosen) if w == chosen[last]) + busy[chosen[last]]
        for worker, speed in enumerate(speeds):
            if worker != chosen[last]:
                other = sum(c for c, w in zip(costs, chosen) if w == worker) + busy[worker]
                here = mine / speeds[chosen[last]]
                assert here <= (other + costs[last]) / speed * (1 + 1e-9)


@given(COSTS, SPEEDS)
def test_a_worker_without_speed_gets_nothing_unless_all_are(costs, speeds):
    assert 0 not in assign_jobs(costs, [0.0, *speeds])
    assert assign_jobs(costs, [0.0] * len(speeds)) == assign_jobs(costs, [1.0] * len(speeds))


def test_between_equals_the_nearer_one_does_it():
    assert assign_jobs([1.0, 1.0], [1.0, 1.0], near=[[0.2, 0.8], [0.9, 0.1]]) == [1, 0]
