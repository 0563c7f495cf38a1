"""What is told of a function that no change from outside mends, by what its steps showed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumix.doctor.function.observations import (
    Observations,
    OperationCounts,
    OptimizerObservation,
    RepeatedLine,
    Site,
)
from gpumix.doctor.function.remarks import (
    remark_on_host_gap,
    remark_on_loops,
    remark_on_remade_optimizers,
)

# Ten steps of a tenth of a second.
SEEN = Observations(steps=10, seconds=1.0, losses=(1.0,), cores=4.0)
GPU = replace(SEEN, cuda=True, capability=8, between_s=0.6)
LINES = (
    Site("train.py:88", "log.write(row)", calls=70, seconds=0.7),
    Site("train.py:91", "torch.save(state, path)", calls=40, seconds=0.4),
    Site("train.py:92", "steps += 1", calls=1, seconds=0.01),
)


def gap(seen: Observations, kernels_share: float | None = None, lines=()) -> list[str]:
    found = list(remark_on_host_gap(seen, lines, kernels_share))
    assert all(one.name == "between" for one in found)
    return [one.text for one in found]


def test_time_that_passes_before_forward_passes_is_told():
    (told,) = gap(replace(SEEN, between_s=0.6))
    assert told.startswith("60% of a step passes between the update (or a backward pass) and")
    assert "gpumix.Loader" in told
    assert gap(replace(SEEN, between_s=0.05)) == []


def test_its_lines_are_named_largest_first():
    (told,) = gap(replace(SEEN, between_s=0.6), lines=LINES)
    assert (
        "in no DataLoader: train.py:88 `log.write(row)` 38%, train.py:91 `torch.save(state, path)` "
        "22%; write logs" in told
    )


def test_few_samples_say_nothing_of_lines():
    few = [replace(one, calls=2) for one in LINES]
    assert gap(replace(SEEN, between_s=0.6), lines=few) == gap(replace(SEEN, between_s=0.6))


def test_of_a_gpu_it_is_the_hosts_time_and_told_where_the_gpu_waits():
    assert gap(GPU, 0.95) == []
    (told,) = gap(GPU, 0.5)
    assert told.startswith("60% of the host's time in a step passes between")
    assert "the GPU computes in 50% of a step" in told


LOOP = RepeatedLine("model.py:7", operations=700, repeats=64)
COUNTS = OperationCounts(total=2000, forward=800, lines=(LOOP,))


def test_many_small_operations_of_a_loop():
    (told,) = remark_on_loops(COUNTS, step_s=0.02)
    assert told.name == "loop"
    assert told.text.startswith(
        "a step takes 2,000 operations of 10 us each; of the 800 outside of backward passes a loop "
        "of Python makes 700, at model.py:7 (700 in 64 rounds)"
    )
    assert "nn.LSTM" in told.text and "torch.compile" in told.text


@pytest.mark.parametrize(
    ("counts", "step_s"),
    [
        (None, 0.02),
        (COUNTS, 1.0),  # half a millisecond each
        (replace(COUNTS, lines=()), 0.02),  # of many layers, say
        (replace(COUNTS, lines=(replace(LOOP, operations=300),)), 0.02),  # others make most
        (replace(COUNTS, total=150, forward=60), 0.001),
    ],
)
def test_what_is_no_loop(counts, step_s):
    assert list(remark_on_loops(counts, step_s)) == []


def test_an_optimizer_that_loses_its_state():
    """However little time it takes."""
    adam = OptimizerObservation("train.py:8", "Adam", True, True, seconds=0.001, remade=10)
    (told,) = remark_on_remade_optimizers(replace(SEEN, optimizers=(adam,)))
    assert told.name == "remade_optimizer" and "train.py:8 (Adam)" in told.text
    once = replace(adam, remade=1)
    assert list(remark_on_remade_optimizers(replace(SEEN, optimizers=(once,)))) == []
