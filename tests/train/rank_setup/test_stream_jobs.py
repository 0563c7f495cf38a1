"""Jobs whose factory gives a stream: its order, what is held out of it, and where it goes on."""

from __future__ import annotations

import pytest
import torch
import toys

from gpumix.engine.model.deferred_init import build
from gpumix.schema.errors import InputError
from gpumix.train.controller import JobController
from helpers.errors import raises
from helpers.extended import left_out
from helpers.runs.jobs import BATCH, LENGTH, metrics, plan_for, train, write_job

SAMPLES = 20  # of a pass; the first batch of it is held out
LEFT = SAMPLES - BATCH
STREAMS = ["toys:token_stream", "toys:token_passes", "toys:token_iterable"]


def stream_job(folder, factory: str = STREAMS[0], **changes):
    data = {"factory": factory, "arguments": {"samples": SAMPLES}, **changes.pop("data", {})}
    return write_job(folder, data=data, eval_steps=2, eval_batches=1, max_steps=4, **changes)


def losses_of(numbers: list[list[int]]) -> list[float]:
    """Of the model as it is at first, with the samples of these numbers, by torch alone."""
    model = build(toys.model, seed=0)
    samples = toys.tokens(SAMPLES, LENGTH)
    found = []
    for batch in numbers:
        ids = torch.stack([samples[k]["input_ids"] for k in batch])
        with torch.no_grad():
            loss, count = model(ids, ids)
        found.append(float(loss / count))
    return found


@pytest.mark.parametrize("factory", left_out(STREAMS, STREAMS[1:]))
def test_a_stream_is_read_in_its_order_without_what_is_held_out(tmp_path, factory):
    """With next to no learning rate each loss tells which samples were in its batch."""
    job = stream_job(tmp_path, factory, optimizer={"lr": 1e-12})
    summary = train(job, plan=plan_for(job))
    read = [[BATCH + (BATCH * step + k) % LEFT for k in range(BATCH)] for step in range(4)]
    assert summary.losses == pytest.approx(losses_of(read), rel=1e-5)
    held_out = losses_of([list(range(BATCH))])
    found = [record["loss"] for record in metrics(tmp_path / "run", "evaluation")]
    assert found == pytest.approx(2 * held_out, rel=1e-5)


def test_a_stream_goes_on_where_it_was_with_another_plan(tmp_path):
    job = stream_job(tmp_path, lr_scheduler={"type": "constant"})
    whole = train(job, f"output_dir={tmp_path / 'whole'}", plan=plan_for(job))
    train(job, "max_steps=2", plan=plan_for(job, (2, 3, 3)))
    rest = train(job, plan=plan_for(job, (8, 0, 0)), resume=True)
    assert rest.losses == pytest.approx(whole.losses[2:], rel=1e-5)


@pytest.mark.extended
def test_other_samples_held_out_make_another_order(tmp_path):
    job = stream_job(tmp_path)
    train(job, "max_steps=1", plan=plan_for(job))
    with raises(InputError, code="checkpoint-of-other-data"):
        train(job, "data.validation_split=0", "eval_steps=0", plan=plan_for(job), resume=True)


@pytest.mark.extended
def test_a_stream_is_profiled_and_planned_without_what_it_takes(tmp_path):
    """Each rank reads all of it, whatever its share."""
    pipeline = JobController.of_file(
        stream_job(tmp_path), ["advanced.profile_budget=1"], debug=False
    )
    profile = pipeline.profile()
    assert profile.inputs == ()
    assert sum(worker.samples for worker in pipeline.plan(profile).workers) == BATCH


def test_an_evaluation_needs_samples_that_are_held_out(tmp_path):
    job = stream_job(tmp_path, data={"validation_split": 0})
    with raises(InputError, code="no-held-out-samples"):
        train(job, plan=plan_for(job))
