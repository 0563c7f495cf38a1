"""What trains, but hardly as it was meant: that is told in a line."""

from __future__ import annotations

import pytest

from gpumix.data.core.source import split_held_out
from gpumix.data.sources.iterable import StreamSource
from gpumix.data.sources.map_style import as_source
from gpumix.schema.reading.read import read_job
from gpumix.train.checks.job_warnings import warn_of_data, warn_of_schedule
from helpers.runs.jobs import gpumix, plan_for, write_job


def told(samples: int, held_out: float, global_batch: int = 8) -> list[str]:
    whole = as_source([{"k": k} for k in range(samples)])
    return warn_of_data(*split_held_out(whole, held_out), global_batch)


@pytest.mark.parametrize(
    ("samples", "held_out", "numbers"),
    [
        (8, 0.0, []),
        (9, 0.02, []),
        (16, 0.5, []),
        (7, 0.0, ["7 to train on, for a global_batch_size of 8"]),
        (8, 0.02, ["7 to train on, for a global_batch_size of 8"]),
        (64, 0.8, ["keeps 51 of 64 samples for evaluation, 13 are left"]),
        (
            64,
            0.999,
            ["keeps 63 of 64 samples for evaluation, 1 is left", "same samples several times"],
        ),
    ],
)
def test_what_is_odd_is_told_with_its_numbers(samples, held_out, numbers):
    lines = told(samples, held_out)
    assert len(lines) == len(numbers)
    for line, number in zip(lines, numbers):
        assert number in line


def test_a_peak_that_is_never_reached_is_told_with_the_last_rate(tmp_path):
    def told(**settings):
        return warn_of_schedule(read_job(write_job(tmp_path, **settings)))

    assert told(max_steps=5, lr_scheduler={"warmup_steps": 5}) == []  # the last step has it
    (line,) = told(max_steps=5, lr_scheduler={"warmup_steps": 20}, optimizer={"lr": 0.1})
    assert "is 20, but the run has 5 steps" in line
    assert "ends at 0.025, below optimizer.lr 0.1" in line


def test_a_stream_is_not_counted():
    stream = StreamSource(lambda number: iter([{"k": 1}] * 9), "stream", 8)
    assert warn_of_data(*stream.split(1, read=False), 8) == []


def test_a_run_says_it_once(tmp_path):
    data = {"factory": "toys:tokens", "arguments": {"samples": 6}, "validation_split": 0.6}
    job = write_job(tmp_path, data=data, max_steps=2, lr_scheduler={"warmup_steps": 3})
    plan_for(job).save(tmp_path / "plan.json")
    done = gpumix("train", "job.yaml", "--plan", "plan.json", folder=tmp_path)
    assert done.code == 0
    said = " ".join(done.err.split())
    assert said.count("data.validation_split keeps 3 of 6 samples") == 0  # half is not odd
    assert said.count("3 to train on, for a global_batch_size of 8") == 1
    assert said.count("lr_scheduler.warmup_steps is 3, but the run has 2 steps") == 1
