"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import errno
import os
import threading

import pytest
import torch

from gpumix.schema.errors import MachineError
from gpumix.train.checkpoint import checkpointer as checkpoint
from gpumix.train.checkpoint.dcp_storage import BoxedTensor
from gpumix.train.checkpoint.host_copy import HostCopy
from helpers.errors import raises
from helpers.extended import every_second
from helpers.processes.harness import run_ranks
from helpers.runs.jobs import gpumix, metrics, plan_for, train, write_job
from helpers.training.checkpoints import (
    ALONE,
    UNEVEN,
    assert_same,
    blank,
    checkpointer,
    model_values,
    optimizer_values,
    trained,
    whole,
)
from helpers.training.checkpoints import train as go_on


def _save_beside(folder, room):
    """Begin to save, and train on before it is written; what was to be saved."""
    with pytest.MonkeyPatch.context() as patches:
        if not room:
            patches.setattr(checkpoint, "has_room_for", lambda size, ranks: False)
        engine, optimizer = trained(UNEVEN)
        saver = checkpointer(folder)
        for step in (2, 3):  # the second into the memory of the first
            values = model_values(engine), optimizer_values(engine, optimizer)
            saver.begin(step, engine, optimizer, cursor={"position": step})
            assert saver.under_way
            saver.settle()
            go_on(engine, optimizer, UNEVEN, range(step, step + 1))
            assert saver.finish().step == step
            assert not (saver.under_way or saver.written or saver.failed)
    return values


def _load(folder):
    engine, optimizer = blank(UNEVEN)
    state = checkpointer(folder).load(engine, optimizer)
    assert state.cursor == {"position": 3}
    return model_values(engine), optimizer_values(engine, optimizer)


@pytest.mark.parametrize("room", [True, False], ids=["copied", "no memory for a copy"])
def test_what_is_saved_is_as_it_was_when_it_was_begun(tmp_path, room):
    saved = run_ranks(_save_beside, 4, tmp_path, room)
    loaded = run_ranks(_load, 4, tmp_path)
    assert_same(loaded[0][0], saved[0][0])
    assert_same(*(whole([states for _, states in of_ranks]) for of_ranks in (loaded, saved)))


def test_training_goes_on_before_it_is_written(tmp_path, monkeypatch):
    engine, optimizer = trained(ALONE)
    saver, may_write = checkpointer(tmp_path), threading.Event()
    write = checkpoint.write_boxes
    monkeypatch.setattr(checkpoint, "write_boxes", lambda *a: may_write.wait(20) and write(*a))
    saver.begin(2, engine, optimizer, cursor={})
    saver.settle()
    go_on(engine, optimizer, ALONE, range(2, 4))
    assert not saver.written and not any(tmp_path.glob("step-????????"))
    may_write.set()
    assert saver.finish().path.is_dir()


def test_a_disk_that_is_full_is_told_at_the_end(tmp_path, monkeypatch):
    engine, optimizer = trained(ALONE)
    saver = checkpointer(tmp_path)
    saver.save(1, engine, optimizer, cursor={})
    with monkeypatch.context() as patches:

        def write(*arguments):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patches.setattr(checkpoint.checkpoint_folder, "write_durably", write)
        saver.begin(2, engine, optimizer, cursor={})
        saver.settle()
        go_on(engine, optimizer, ALONE, range(2, 3))
        with raises(MachineError, code="checkpoint-io-failed"):
            saver.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    saver.save(3, engine, optimizer, cursor={})


def test_a_copy_is_of_the_same_names_shapes_and_values():
    tensors = {
        "model": {
            "a": BoxedTensor.whole(torch.arange(5.0)),
            "b": BoxedTensor.whole(torch.tensor(3)),
        },
        "optimizer": {"a": {"step": BoxedTensor.whole(torch.tensor(2.0, dtype=torch.float64))}},
    }
    copy = HostCopy(tensors, pinned=False)
    copy.fill(tensors)
    assert copy.fits(tensors)
    assert not copy.fits({"model": tensors["model"]})
    for of_copy, one in (
        (copy.boxed["model"]["a"], tensors["model"]["a"]),
        (copy.boxed["model"]["b"], tensors["model"]["b"]),
        (copy.boxed["optimizer"]["a"]["step"], tensors["optimizer"]["a"]["step"]),
    ):
        ((offset, view),) = of_copy.views.items()
        assert torch.equal(view, one.views[offset]) and view.dtype == one.views[offset].dtype
        assert view.data_ptr() % 64 == 0
        assert of_copy.shape == one.shape


def test_a_run_tells_what_its_checkpoints_took(tmp_path):
    job = write_job(tmp_path, max_steps=6, save_steps=2)
    train(job, plan=plan_for(job))
    records = metrics(tmp_path / "run", "checkpoint")
    assert [record["step"] for record in records] == [2, 4, 6]
    assert all(record["stalled_s"] > 0 and record["seconds"] > 0 for record in records)


@pytest.mark.extended
@pytest.mark.parametrize("data", every_second(["tokens_without_room", "tokens"]))
def test_a_run_whose_checkpoints_are_not_copied_says_so_once(tmp_path, data):
    often = {"save_steps": 1, "memory_save_steps": 0, "logging_steps": 1}
    job = write_job(tmp_path, data={"factory": f"toys:{data}", "validation_split": 0.1}, **often)
    plan_for(job).save(tmp_path / "plan.json")
    done = gpumix("train", "job.yaml", "--plan", "plan.json", folder=tmp_path)
    assert done.code == 0, done.err
    says = "training stands still while a checkpoint is written: "
    said = [line for line in done.err.splitlines() if line.startswith(says)]
    assert len(said) == (data == "tokens_without_room")
    assert all("the host has no memory for a copy of " in line for line in said)


def on_a_slow_disk(folder, steps, **settings):
    """Steps of a run with a checkpoint for each, of which checkpoints were written, and put off."""
    slow = {"factory": "toys:tokens_on_slow_disk", "arguments": settings, "validation_split": 0.1}
    often = {"save_steps": 1, "save_total_limit": 99, "memory_save_steps": 0}
    job = write_job(folder, data=slow, max_steps=steps, **often)
    train(job, plan=plan_for(job))
    assert [one["step"] for one in metrics(folder / "run")] == list(range(1, steps + 1))
    return [
        [one["step"] for one in metrics(folder / "run", event)]
        for event in ("checkpoint", "checkpoint-late")
    ]


@pytest.mark.extended
@pytest.mark.slow
def test_a_slow_disk_has_fewer_checkpoints_and_steps_that_do_not_wait(tmp_path):
    written, late = on_a_slow_disk(tmp_path, 30, sync_s=0.3, stall_s=0.05)
    assert written[0] == 1 and written[-1] == 30
    assert len(written) < 20
    assert late
    # One that was put off was begun when the disk was free.
    assert all(any(step < other for other in written) for step in late)


@pytest.mark.extended
def test_one_that_is_nearly_written_is_waited_for(tmp_path):
    assert on_a_slow_disk(tmp_path, 5, sync_s=0.05, stall_s=60.0) == [[1, 2, 3, 4, 5], []]
