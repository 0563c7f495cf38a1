"""Whose gradient stands out in a step."""

from __future__ import annotations

import math
import random

from gpumix.train.monitor.gradient_spikes import LEAST_HISTORY_STEPS, SpikeDetector

COUNTS = [30, 10, 10, 0]  # the last rank computes nothing


def norms(noise: random.Random, times: dict[int, float] | None = None) -> list[float]:
    """Of a step; each rank's part of the gradient is as large as its part of the samples."""
    shares = [count / 50 for count in COUNTS]
    return [
        share * noise.lognormvariate(0, 0.3) * (times or {}).get(rank, 1.0)
        for rank, share in enumerate(shares)
    ]


def settled() -> tuple[SpikeDetector, random.Random]:
    spikes, noise = SpikeDetector(), random.Random(0)
    for _ in range(LEAST_HISTORY_STEPS):
        assert not spikes.after_step(norms(noise), COUNTS)
    return spikes, noise


def test_noise_is_none():
    spikes, noise = settled()
    assert not any(spikes.after_step(norms(noise), COUNTS) for _ in range(1000))


def test_a_rank_that_stands_out_is_named():
    spikes, noise = settled()
    (found,) = spikes.after_step(norms(noise, {1: 100.0}), COUNTS)
    assert found.rank == 1
    assert 30 < found.times < 300
    assert found.others < 3
    # It is not usual then.
    assert not spikes.after_step(norms(noise), COUNTS)


def test_what_all_see_is_training():
    spikes, noise = settled()
    assert not spikes.after_step(norms(noise, dict.fromkeys(range(4), 100.0)), COUNTS)


def test_what_is_no_number_stands_out():
    spikes, noise = settled()
    (found,) = spikes.after_step(norms(noise, {2: math.nan}), COUNTS)
    assert found.rank == 2
    assert not spikes.after_step(norms(noise), COUNTS)


def test_before_it_is_known_what_is_usual_nothing_is():
    spikes, noise = SpikeDetector(), random.Random(0)
    assert not any(
        spikes.after_step(norms(noise, {0: 100.0}), COUNTS) for _ in range(LEAST_HISTORY_STEPS)
    )


def test_a_rank_with_more_samples_than_before_does_not():
    """A split anew changes how large its part is, not the mean of its samples."""
    spikes, _ = settled()
    assert not spikes.after_step([0.01, 0.98, 0.01, 0.0], [1, 98, 1, 0])


def test_one_rank_alone():
    spikes = SpikeDetector()
    for _ in range(LEAST_HISTORY_STEPS):
        spikes.after_step([1.0], [8])
    (found,) = spikes.after_step([50.0], [8])
    assert (found.times, found.others) == (50.0, 1.0)
