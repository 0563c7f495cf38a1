"""What is chosen from what was measured."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.data.workers.autotune import (
    MEASURED_STEPS,
    PAUSE_STEPS,
    WINDOW,
    BatchMeasurements,
    Bounds,
    Limit,
    Tuner,
    choose_settings,
)
from gpumix.data.workers.fetch import Cost
from gpumix.data.workers.prefetcher import MOST_AHEAD, WHOLE_BATCH_SAMPLES, PrefetchSettings
from gpumix.data.workers.step_timing import TimedStep

BOUNDS = Bounds(cores=8, processes=True, threads=False, memory_bytes=2**30)
SAMPLES = 32
STEP_S = 0.04


def measured(wall_s: float, cpu_s: float | None = None, **given) -> BatchMeasurements:
    """Of a batch; by default all of it computes."""
    cpu_s = wall_s if cpu_s is None else cpu_s
    tail_s = given.pop("tail_s", wall_s)
    return BatchMeasurements(
        SAMPLES, 2**20, wall_s, cpu_s, tail_s, given.pop("step_s", STEP_S), **given
    )


@pytest.mark.parametrize(
    ("found", "bounds", "kind", "workers"),
    [
        (measured(0.0002), BOUNDS, "threads", 1),  # cheap
        (measured(0.02), BOUNDS, "processes", 1),  # keeps up alone, but holds the interpreter
        (measured(0.1), BOUNDS, "processes", 3),  # 0.1 / (0.9 * 0.04)
        (measured(0.1, tail_s=0.3), BOUNDS, "processes", 5),  # 0.1 / (0.6 * 0.04): much in a few
        (measured(0.1), replace(BOUNDS, cores=2), "processes", 2),  # as many as there are cores
        (measured(0.14, 0.001), replace(BOUNDS, cores=1), "processes", 4),  # waiting needs none
        (measured(0.1), replace(BOUNDS, threads=True), "processes", 3),
        (measured(0.1, threads_gain=1.9), replace(BOUNDS, threads=True), "threads", 3),
        (measured(0.1, threads_gain=1.1), replace(BOUNDS, threads=True), "processes", 3),
        (measured(0.1), replace(BOUNDS, processes=False), "threads", 1),
        (measured(0.1), replace(BOUNDS, workers=5), "processes", 5),
        (measured(0.1), replace(BOUNDS, workers=0), "threads", 1),
        (measured(0.1), replace(BOUNDS, kind="threads", threads=True), "threads", 3),
    ],
)
def test_workers(found, bounds, kind, workers):
    setting = choose_settings(found, bounds, splits=True)
    assert (setting.kind, setting.workers) == (kind, workers)


@pytest.mark.parametrize("cpu_s", [0.1, 0.001])  # samples that compute, samples that wait
def test_until_the_device_is_known_there_are_as_many_as_cores(cpu_s):
    few = replace(BOUNDS, cores=2)
    assert choose_settings(measured(0.1, cpu_s, step_s=0.0), few, splits=True).workers == 2
    assert choose_settings(measured(0.1, cpu_s, step_s=0.0), BOUNDS, splits=True).workers == 8
    assert (
        choose_settings(measured(0.1, 0.001), few, splits=True).workers == 3
    )  # then by the device


def test_batches_ahead_hide_slow_samples_as_far_as_memory_goes():
    slow = measured(0.1, tail_s=0.6)
    assert choose_settings(slow, BOUNDS, splits=True).ahead == 1.2 * 0.6 / STEP_S + 2
    assert choose_settings(slow, BOUNDS, splits=False).ahead == 2 * 1.2 * 0.6 / STEP_S + 2
    assert choose_settings(slow, replace(BOUNDS, memory_bytes=5 * 2**20), splits=True).ahead == 5
    assert choose_settings(slow, replace(BOUNDS, ahead=3), splits=True).ahead == 3


def test_parts_of_a_batch_are_as_many_as_may_be_handed_over():
    """2 % of a step of 40 ms: eight that take 0.1 ms each, or two that take 0.4 ms."""
    assert choose_settings(measured(0.1), BOUNDS, splits=True).chunk == SAMPLES // 8
    assert choose_settings(measured(0.1, handed_s=4e-4), BOUNDS, splits=True).chunk == SAMPLES // 2
    assert (
        choose_settings(measured(0.1, handed_s=1e-2), BOUNDS, splits=True).chunk
        == WHOLE_BATCH_SAMPLES
    )
    assert choose_settings(measured(0.1, handed_s=1e-6), BOUNDS, splits=True).chunk == 1


def test_where_cores_are_short_batches_have_as_few_parts_as_keep_workers_at_something():
    """What a part costs is missing there. Three for each worker are under way."""
    few = replace(BOUNDS, cores=2)
    for bounds, chunk in [
        (few, WHOLE_BATCH_SAMPLES),
        (replace(few, ahead=6), WHOLE_BATCH_SAMPLES),
        (replace(few, ahead=2), SAMPLES // 2 - 5),  # three parts
        (replace(few, memory_bytes=4 * 2**20), SAMPLES // 2),
    ]:
        assert choose_settings(measured(0.1), bounds, splits=True).chunk == chunk
    assert (
        choose_settings(measured(0.1, step_s=0.0), few, splits=True).chunk < SAMPLES
    )  # nor is it known


def test_what_it_takes_to_hand_them_over_is_measured():
    world = World(0.1, 0.1)
    world.handed_s = 4e-4
    world.run(MEASURED_STEPS + 2)
    assert world.tuner.setting.chunk == SAMPLES // 2


@given(
    wall_s=st.floats(1e-6, 10),
    part=st.floats(0.001, 1),
    tail=st.floats(0.01, 3),
    step_s=st.one_of(st.just(0.0), st.floats(1e-4, 10)),
    cores=st.floats(0.1, 128),
    splits=st.booleans(),
)
def test_settings_are_within_bounds(wall_s, part, tail, step_s, cores, splits):
    found = measured(wall_s, part * wall_s, tail_s=tail * wall_s, step_s=step_s)
    setting = choose_settings(found, replace(BOUNDS, cores=cores), splits)
    assert setting.workers >= 1 and (
        1 <= setting.chunk <= SAMPLES or setting.chunk == WHOLE_BATCH_SAMPLES
    )
    assert 1 <= setting.ahead <= MOST_AHEAD
    # Workers that compute are no more than there are cores.
    assert setting.workers * part <= max(1.0, cores + 0.25)
    # And enough for the device, where there are.
    if step_s and setting.workers < cores - 1:
        assert wall_s / setting.workers <= step_s


class World:
    """A device and workers as they would behave: batches that are late are waited for."""

    def __init__(self, wall_s: float, cpu_s: float, bounds: Bounds = BOUNDS) -> None:
        self.wall_s, self.cpu_s, self.bounds = wall_s, cpu_s, bounds
        self.handed_s = 0.0
        self.tuner = Tuner(bounds, splits=True)

    def run(self, steps: int, step_s: float = STEP_S) -> None:
        for _ in range(steps):
            costs = [Cost(SAMPLES, self.wall_s, self.cpu_s, self.handed_s)]
            if not self.tuner.knows:
                self.tuner.first(costs, SAMPLES, 2**20)
                continue
            all_s = max(
                step_s,
                self.wall_s / self.tuner.setting.workers,
                self.cpu_s / self.bounds.cores,
            )
            waited_s = all_s - step_s
            self.tuner.step(TimedStep(waited_s, step_s, waited_s == 0), costs, 2**20)

    @property
    def moves(self) -> int:
        return len(self.tuner.reasons)


def test_what_is_cheap_is_left_alone():
    world = World(2e-4, 2e-4)
    world.run(500)
    assert world.moves == 0 and world.tuner.setting == PrefetchSettings()


def test_one_jump_for_the_device_and_no_more():
    world = World(0.1, 0.1)
    world.run(500)
    assert world.tuner.setting.workers == 3 and world.moves == 2  # as many as can be, at first
    assert world.tuner.limit is Limit.DEVICE


def test_where_there_are_too_few_cores_that_is_said_and_nothing_is_tried():
    world = World(0.4, 0.4, replace(BOUNDS, cores=2))
    world.run(500)
    assert world.tuner.setting.workers == 2 and world.tuner.setting.chunk == WHOLE_BATCH_SAMPLES
    assert world.moves == 2  # as many as can be, at first
    assert world.tuner.limit is Limit.CORES


def test_more_workers_where_samples_take_longer_later():
    world = World(0.1, 0.01)
    world.run(MEASURED_STEPS + 2 * WINDOW)
    before = world.tuner.setting.workers
    world.wall_s = 0.3  # a slow disk: it only waits
    world.run(PAUSE_STEPS + 6 * WINDOW)
    assert world.tuner.setting.workers >= 0.3 / STEP_S > before
    assert world.tuner.limit is Limit.DEVICE


def test_much_waiting_is_no_noise():
    world = World(0.1, 0.01)
    world.run(1 + MEASURED_STEPS + WINDOW)  # the first batch, the jump, a look
    before = world.tuner.setting.workers
    world.wall_s = 0.3
    world.run(WINDOW)  # one look
    assert world.tuner.setting.workers > before


@pytest.mark.parametrize(
    ("bounds", "most"),
    [(replace(BOUNDS, ahead=1), 1), (replace(BOUNDS, memory_bytes=3 * 2**20), 3)],
)
@pytest.mark.parametrize("ready", [False, True])
def test_corrections_too_keep_to_what_is_pinned_and_to_the_memory(bounds, most, ready):
    tuner = Tuner(bounds, splits=True)
    tuner.first([Cost(SAMPLES, 0.1, 0.1)], SAMPLES, 2**20)
    found = set()
    for _ in range(MEASURED_STEPS + 10 * WINDOW):
        cost = Cost(SAMPLES, 0.1, 0.1)
        found.add(tuner.step(TimedStep(STEP_S / 2, STEP_S, ready), [cost], 2**20).ahead)
    assert len(tuner.reasons) > 2 or ready
    assert max(found) <= most


def test_threads_are_tried_with_the_batches_ahead_that_are_pinned():
    tuner = Tuner(replace(BOUNDS, threads=True, ahead=1), splits=True)
    tried = tuner.first([Cost(SAMPLES, 0.1, 0.1)], SAMPLES, 2**20)
    assert (tried.kind, tried.workers, tried.ahead) == ("threads", 2, 1)


def test_where_a_few_samples_take_most_of_the_time_all_say_what_one_takes():
    """Those without a slow one come first."""
    tuner = Tuner(BOUNDS, splits=True)
    quick, slow = Cost(SAMPLES, 0.03, 0.001), Cost(SAMPLES, 0.63, 0.001)
    tuner.first([quick], SAMPLES, 2**20)
    for number in range(MEASURED_STEPS):
        tuner.step(
            TimedStep(0.0, STEP_S, True), [quick] * 2 if number < 4 else [slow, quick], 2**20
        )
    mean_s = (11 * 0.03 + 2 * 0.63) / 13
    assert tuner.setting.workers == ceil(mean_s / (0.6 * STEP_S)) == 6


@pytest.mark.parametrize(("beside", "kind"), [(1.0, "threads"), (1.9, "processes")])
def test_two_threads_are_tried_where_they_may_be(beside, kind):
    """Beside each other they take as long as alone, or twice as long: they share Python."""
    world = World(0.1, 0.1, replace(BOUNDS, threads=True))
    world.run(1)
    assert world.tuner.setting == PrefetchSettings("threads", 2)
    world.wall_s = 0.1 * beside
    world.run(4)
    world.wall_s = 0.1
    world.run(200)
    assert (world.tuner.setting.kind, world.tuner.setting.workers) == (kind, 3)


def test_a_noisy_step_moves_nothing():
    world = World(0.1, 0.1)
    world.run(MEASURED_STEPS + WINDOW)
    moves = world.moves
    for k in range(40):
        world.tuner.step(TimedStep(0.04 * (k % 40 == 7), STEP_S, True), [], 2**20)
    assert world.moves == moves
