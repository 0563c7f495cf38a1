"""When a rank comes to harm the others stop, and the message says which one and why."""

from __future__ import annotations

import re

import pytest

from gpumix.schema.errors import GpumixError, MachineError, RankLost, TrainingError
from gpumix.train.checkpoint.checkpointer import open_checkpoint
from gpumix.train.checkpoint.manifest import verify
from helpers.extended import every_second, left_out
from helpers.runs.jobs import (
    EMULATED,
    checkpoints,
    gpumix,
    metrics,
    plan_for,
    progress,
    toy,
    train,
    write_job,
)


@pytest.fixture
def job(tmp_path):
    return write_job(tmp_path, save_steps=2)


def failure(job, kind: type[GpumixError] = TrainingError, **options) -> GpumixError:
    with pytest.raises(kind) as caught:
        train(job, plan=plan_for(job, **options))
    assert isinstance(caught.value, kind)
    assert "Traceback" not in str(caught.value)
    return caught.value


def harmed(tmp_path, fault: str, **changes):
    """A job whose rank 1 comes to harm in its third step, when the second one's state is saved."""
    saved = tmp_path / "run" / "checkpoints" / "step-00000002"
    return write_job(
        tmp_path,
        model=toy(fault=fault, rank=1, at=3, after=str(saved)),
        save_steps=2,
        memory_save_steps=0,
        **changes,
    )


@pytest.fixture(scope="module")
def losses(tmp_path_factory) -> list[float]:
    """Of the same job without the harm."""
    job = write_job(tmp_path_factory.mktemp("undisturbed"))
    return train(job, plan=plan_for(job)).losses


def test_a_killed_rank_is_named_with_its_signal(tmp_path):
    error = failure(harmed(tmp_path, "kill"))
    assert error.exit_code == 5
    told = r"rank 1 \(device 'small-0', pid \d+\) was killed by signal 9 \(SIGKILL\)"
    assert re.fullmatch(told, error.what)
    assert "--resume" in error.fix
    assert progress(tmp_path / "run")["state"] == "failed"
    assert checkpoints(tmp_path / "run") == ["step-00000002"]


@pytest.mark.extended
def test_a_run_goes_on_where_a_killed_rank_left_it(tmp_path, losses):
    failure(harmed(tmp_path, "kill"))
    job = write_job(tmp_path, save_steps=2)
    assert train(job, plan=plan_for(job), resume=True).losses == losses[2:]
    assert [record["step"] for record in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.extended
@pytest.mark.slow
def test_ranks_that_nobody_watches_are_ended_and_start_again(tmp_path, losses):
    """The process that they are forked from was killed: they live, and none of them is at fault."""
    fault = toy(fault="kill-parent", rank=1, at=3, once=str(tmp_path / "once"))
    plan_for(write_job(tmp_path, model=fault, max_restarts=1)).save(tmp_path / "plan.json")
    command = ("train", "job.yaml", "--plan", "plan.json", "--json")
    done = gpumix(*command, folder=tmp_path, fresh=True)
    assert done.code == 0
    assert "the process that ranks are forked from has ended" in done.err
    assert "Traceback" not in done.err and "exit code" not in done.err
    assert [record["loss"] for record in metrics(tmp_path / "run")] == losses
    [restart] = metrics(tmp_path / "run", "restart")
    assert "cannot be watched any more" in restart["why"]


@pytest.mark.parametrize(
    ("killed", "how"),
    [(False, "left with exit code 7"), (True, r"was killed by signal 9 \(SIGKILL\)")],
)
def test_a_dataset_that_ends_its_rank_is_named_with_the_sample(tmp_path, killed, how):
    """All ranks read the first sample, to know what they are like. What takes too much memory for
    one is killed by the system."""
    data = {
        "factory": "toys:leaving_tokens",
        "arguments": {"killed": killed},
        "validation_split": 0,
    }
    error = failure(write_job(tmp_path, data=data))
    assert re.fullmatch(rf"rank \d \(device '.*', pid \d+\) {how}", error.what)
    assert error.why.endswith("; sample 0 of toys:leaving_tokens was being read then")
    assert error.fix.startswith("look at that sample") is not killed


def test_a_rank_that_fails_leaves_no_semaphore(tmp_path):
    job = write_job(tmp_path, data={"factory": "toys:locked_tokens", "validation_split": 0})
    plan_for(job).save(tmp_path / "plan.json")
    done = gpumix("train", "job.yaml", "--plan", "plan.json", folder=tmp_path)
    assert done.code == 2
    assert "leaked" not in done.err


@pytest.mark.extended
@pytest.mark.slow  # it is waited for until the timeout, and then for its heartbeat
def test_a_stopped_rank_is_named_and_ended(tmp_path):
    error = failure(harmed(tmp_path, "stop", timeout=5))
    assert error.exit_code == 5
    assert re.fullmatch(r"rank 1 \(device 'small-0', pid \d+\) stopped answering", error.what)
    stopped, *others = error.why.split("; ")
    assert stopped == "its process was stopped (SIGSTOP)"
    in_what = r"(in|after) the (reduction of|all-gather of|exchange) .+"
    place = rf"((?:rank \d(?:, )?)+) stood at \w+\.py:\d+ in .+ \({in_what}\)"
    told = [re.fullmatch(place, other) for other in others]  # one, where both stand at one place
    assert all(told), error.why
    assert ", ".join(sorted(match[1] for match in told)) == "rank 0, rank 2"


@pytest.mark.extended
def test_a_full_disk_is_told_by_the_file_that_the_run_speaks_in(tmp_path):
    model = toy(fault="small-disk", rank=0, at=3)
    error = failure(write_job(tmp_path, model=model), MachineError)
    assert error.what == "cannot write what the run tells of itself"
    assert error.where == str(tmp_path / "run" / "metrics.jsonl")
    assert error.why == "File too large"
    assert "make room" in error.fix and "--resume" in error.fix
    assert progress(tmp_path / "run")["state"] == "failed"


@pytest.mark.slow  # it is waited for until the timeout
def test_a_rank_that_hangs_is_named_with_the_place_where_it_stands(tmp_path):
    """Its process lives, its device does not get on: the others wait in a collective."""
    error = failure(harmed(tmp_path, "hang", timeout=4))
    assert error.exit_code == 5
    assert isinstance(error, RankLost)
    assert (error.device, error.device_class) == ("small-0", "small")
    assert error.what == "rank 1 (device 'small-0' on localhost) did not take part"
    assert re.search(r"the (reduction|all-gather) of unit '.+' failed|exchange", error.why)
    told = r"; rank 1 \(device 'small-0' on localhost\) stands at toys\.py:\d+ in _hang, "
    assert re.search(told + r"toys\.py:\d+ in forward", error.why)


def test_what_a_rank_raises_is_told_with_its_place(tmp_path):
    error = failure(harmed(tmp_path, "raise"))
    assert error.exit_code == 5
    assert error.what == "the job's own code failed: ValueError: no such token"
    assert "rank 1 (device 'small-0' on localhost)" in error.where
    assert re.search(r"toys\.py:\d+ in _raise", error.where)
    assert "--debug" in error.fix


@pytest.mark.extended
def test_what_torch_raises_in_the_jobs_own_code_is_told_as_its_own(tmp_path):
    """Also on an emulated device, which sees every operation on its way."""
    error = failure(harmed(tmp_path, "multiply-wrongly", cluster=EMULATED))
    assert error.what.startswith("the job's own code failed: RuntimeError: mat1 and mat2")
    assert re.search(r"toys\.py:\d+ in _multiply_wrongly", error.where)


@pytest.mark.parametrize(("fault", "value"), every_second([("nan", "nan"), ("inf", "inf")]))
def test_a_loss_that_is_not_finite_stops_the_run_before_the_step(tmp_path, fault, value):
    error = failure(harmed(tmp_path, fault))
    assert error.exit_code == 5
    assert error.what == f"the loss of step 3 is {value}"
    assert error.where == "rank 1 (device 'small-0' on localhost)"
    assert "step-00000002" in error.fix
    assert "--resume" in error.fix
    run = tmp_path / "run"
    assert [record["step"] for record in metrics(run)] == [1, 2]
    told = ("state", "step", "steps", "loss")
    assert {key: progress(run)[key] for key in told} == {
        "state": "failed",
        "step": 2,
        "steps": 6,
        "loss": metrics(run)[-1]["loss"],
    }


@pytest.mark.extended
def test_a_run_goes_on_from_before_a_loss_that_was_not_finite(tmp_path, losses):
    failure(write_job(tmp_path, model=toy(fault="nan", rank=1, at=3)))  # nothing saved before
    job = write_job(tmp_path)
    assert train(job, plan=plan_for(job), resume=True).losses == losses[2:]


def test_a_gradient_that_is_not_finite_stops_the_run_before_the_step(tmp_path):
    """The loss may be finite and its gradient not: the step would spoil every weight."""
    error = failure(harmed(tmp_path, "nan-gradient"))
    assert error.what == "the gradient norm of step 3 is nan"
    assert checkpoints(tmp_path / "run") == ["step-00000002"]


@pytest.mark.extended
def test_a_run_goes_on_from_before_a_gradient_that_was_not_finite(tmp_path, losses):
    failure(harmed(tmp_path, "nan-gradient"))
    job = write_job(tmp_path)
    assert train(job, plan=plan_for(job), resume=True).losses == losses[2:]


@pytest.mark.extended
def test_weights_that_are_not_finite_already_are_not_saved(tmp_path):
    """The step before had made them so: what was saved earlier is worth more."""
    fast = {"name": "sgd", "lr": 1e300}
    job = write_job(tmp_path, optimizer=fast, max_grad_norm=None, lr_scheduler={"type": "constant"})
    error = failure(job)
    assert error.what.startswith("the loss of step 2 is")
    assert "nothing was saved" in error.fix
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.extended
def test_a_gradient_that_is_not_finite_is_seen_without_clipping_too(tmp_path):
    job = harmed(tmp_path, "nan-gradient", max_grad_norm=None)
    assert failure(job).what == "the gradient norm of step 3 is nan"


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path):
    error = failure(harmed(tmp_path, "small-disk"), MachineError)
    assert error.exit_code == 3
    assert "rank 1 could not" in error.what
    assert "File too large" in error.why
    assert checkpoints(tmp_path / "run") == ["step-00000002"]
    saved = tmp_path / "run" / "checkpoints" / "step-00000002"
    verify(saved, sorted(open_checkpoint(saved)[0].files.items()))


STUCK = [(1, 2), (1, 0), (-1, 0), (-1, 2)]


@pytest.mark.slow  # it is waited for until the timeout
@pytest.mark.parametrize(("rank", "every_steps"), left_out(STUCK, STUCK[1:]))
def test_a_disk_that_hangs_is_named_with_the_rank_and_the_folder(tmp_path, rank, every_steps):
    """Of one rank, or of all; beside training, or at its end, where nothing else is waited for."""
    model = toy(fault="stuck-disk", rank=rank, at=1)
    saving = {"save_steps": every_steps, "memory_save_steps": 0}
    error = failure(
        write_job(tmp_path, model=model, **saving, timeout=4, max_restarts=3), MachineError
    )
    assert error.exit_code == 3
    which = "1" if rank == 1 else r"\d"
    told = rf"rank {which} could not write a checkpoint within \d+ s"
    assert re.fullmatch(told, error.what)
    assert str(tmp_path / "run" / "checkpoints") in error.where


def test_a_rank_out_of_memory_is_named_with_its_limit(tmp_path):
    cluster = [
        {"class": name, "accelerator": "cpu", "memory": memory}
        for name, memory in (("big", "64 MiB"), ("small", "2 MiB"), ("spare", "64 MiB"))
    ]
    job = write_job(tmp_path, model=toy(width=256), cluster=cluster)
    error = failure(job, shares=(0.2, 0.6, 0.2))
    assert error.exit_code == 5
    assert error.what == "out of memory"
    assert "rank 1 (device 'small-0' on localhost)" in error.where
    assert "limit 2.0 MiB" in error.where
    assert "bytes in use of a cap of 2097152 bytes" in error.why
