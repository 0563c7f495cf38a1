"""Ctrl-C and SIGTERM: the step is finished and the state saved; the same command goes on."""

from __future__ import annotations

import os
import signal
from multiprocessing import active_children

import pytest
from pytest import approx

from gpumix.schema.errors import Interrupted
from gpumix.train.processes.stop_signals import StopRequest
from helpers.errors import raises
from helpers.extended import every_second
from helpers.runs.jobs import (
    OWN_PROFILES,
    checkpoints,
    gpumix,
    metrics,
    plan_for,
    progress,
    toy,
    train,
    write_job,
)


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """Of a run that nobody disturbs."""
    job = write_job(tmp_path_factory.mktemp("undisturbed"))
    return train(job, plan=plan_for(job)).losses


def disturbed(tmp_path, fault: str):
    """A job whose rank 1 sends a signal in its third step, and a plan for it."""
    job = write_job(tmp_path, model=toy(fault=fault, rank=1, at=3))
    plan_for(job).save(tmp_path / "plan.json")
    return job, plan_for(job)


def steps_of(tmp_path) -> list[int]:
    return [record["step"] for record in metrics(tmp_path / "run")]


def last_saved(tmp_path) -> int:
    """The step of the only checkpoint. A signal comes while step 3 is computed; ranks tell each
    other of it in that step or in the next."""
    [checkpoint] = checkpoints(tmp_path / "run")
    step = int(checkpoint.removeprefix("step-"))
    assert step in (3, 4)
    return step


def assert_goes_on(tmp_path, losses: list[float]) -> None:
    """The rest of the run is as if nothing had happened; but that matrix products round by where
    their operands lie in memory."""
    done = last_saved(tmp_path)
    job = write_job(tmp_path)
    assert train(job, plan=plan_for(job), resume=True).losses == approx(losses[done:], rel=1e-6)
    assert [record["loss"] for record in metrics(tmp_path / "run")] == approx(losses, rel=1e-6)
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert progress(tmp_path / "run")["state"] == "finished"


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path, losses):
    disturbed(tmp_path, "ctrl-c")
    done = gpumix("train", "job.yaml", "--plan", "plan.json", "--json", folder=tmp_path)
    assert done.code == 130
    assert "Ctrl-C ends it at once" in done.err
    assert "Traceback" not in done.err
    last = last_saved(tmp_path)
    assert f"{checkpoints(tmp_path / 'run')[0]}: stopped after step {last} of 6" in done.err
    assert "go on with the same command and --resume" in done.err
    assert done.json()["exit_code"] == 130
    assert progress(tmp_path / "run")["state"] == "interrupted"
    assert steps_of(tmp_path) == list(range(1, last + 1))
    assert_goes_on(tmp_path, losses)


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("fault", every_second(["terminate-group", "hang-up-group"]))
def test_a_signal_to_the_whole_group_saves_as_well(tmp_path, losses, fault):
    """The processes that ranks are forked from outlive it: without them nobody would know how ranks
    ended."""
    disturbed(tmp_path, fault)
    command = ("train", "job.yaml", "--plan", "plan.json")
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may have nohup
    try:
        done = gpumix(*command, folder=tmp_path, fresh=True)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert done.code == 130
    last = last_saved(tmp_path)
    assert f"{checkpoints(tmp_path / 'run')[0]}: stopped after step {last} of 6" in done.err
    for wrong in ("Traceback", "starting again", "resource_tracker", "exit code"):
        assert wrong not in done.err
    assert_goes_on(tmp_path, losses)


@pytest.mark.slow
@pytest.mark.parametrize("fault", every_second(["kill-launcher-and-hold-lock", "kill-launcher"]))
def test_ranks_do_not_outlive_their_launcher(tmp_path, fault):
    """Also where no thread of Python's can run in a rank any more."""
    disturbed(tmp_path, fault)
    done = gpumix("train", "job.yaml", "--plan", "plan.json", folder=tmp_path)
    assert done.code == -9  # and `gpumix` has looked for processes that are left


@pytest.mark.extended
@pytest.mark.parametrize(
    "fault",
    every_second(
        ["interrupt-launcher", "terminate-launcher", "terminate", "terminate-launcher-twice"]
    ),
)
def test_a_signal_to_any_process_stops_all_of_them(tmp_path, losses, fault):
    job, plan = disturbed(tmp_path, fault)
    code = "rank-asked-to-end" if fault == "terminate" else "stopped-after-step"
    with raises(Interrupted, code=code, what=6):
        train(job, plan=plan)
    assert_goes_on(tmp_path, losses)


@pytest.mark.extended
def test_a_rank_that_is_lost_before_it_answers_makes_no_run_go_on(tmp_path, losses):
    """Ranks start again, to save: what was asked for is not forgotten."""
    fault = toy(fault="interrupt-and-die", rank=1, at=3, once=str(tmp_path / "once"))
    job = write_job(tmp_path, model=fault, max_restarts=1)
    with raises(Interrupted, code="stopped-after-step", what=6):
        train(job, plan=plan_for(job))
    [restart] = metrics(tmp_path / "run", "restart")
    assert "was killed" in restart["why"]
    assert_goes_on(tmp_path, losses)


def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path):
    job, plan = disturbed(tmp_path, "interrupt-launcher-twice")
    with pytest.raises(KeyboardInterrupt):
        train(job, plan=plan)
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert active_children() == []
    told = progress(tmp_path / "run")
    assert told["state"] == "interrupted"
    assert "without saving" in told["why"]


def test_a_signal_ends_a_profile_at_once(tmp_path):
    model = toy(fault="interrupt-launcher", rank=0, at=1)
    job = write_job(tmp_path, model=model, **OWN_PROFILES)
    with pytest.raises(KeyboardInterrupt):
        train(job)
    assert not (tmp_path / "profiles").exists()
    assert active_children() == []


@pytest.fixture
def by_nohup():
    """What is started is to outlive its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup leaves it
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.extended
def test_a_run_by_nohup_goes_on_when_the_terminal_closes(tmp_path, by_nohup):
    job, plan = disturbed(tmp_path, "hang-up-launcher")
    assert train(job, plan=plan).steps == 6


def test_who_started_it_by_nohup_wants_no_end_when_the_terminal_closes(by_nohup):
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_terminal_that_closes_stops_a_run(tmp_path):
    job, plan = disturbed(tmp_path, "hang-up-launcher")
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may have nohup
    try:
        with raises(Interrupted, code="stopped-after-step", what=6):
            train(job, plan=plan)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.extended
def test_a_signal_in_the_last_step_comes_too_late(tmp_path):
    job = write_job(tmp_path, model=toy(fault="terminate", rank=1, at=6))
    assert train(job, plan=plan_for(job)).steps == 6
    assert progress(tmp_path / "run")["state"] == "finished"
