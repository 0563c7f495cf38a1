"""Asked to end in a step that does not end in time: the state before it is saved."""

from __future__ import annotations

import signal
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from gpumix.schema.errors import Interrupted, MachineError
from gpumix.train.checkpoint.checkpointer import open_checkpoint
from gpumix.train.checkpoint.manifest import verify
from gpumix.train.preemption_save import AT_ONCE, PreemptionSaver, StopTiming
from helpers.errors import raises
from helpers.processes.commands import begin
from helpers.processes.ports import free_port
from helpers.processes.warm_commands import Command
from helpers.runs.jobs import (
    CLUSTER,
    checkpoints,
    environment,
    metrics,
    plan_for,
    toy,
    train,
    write_job,
)

EACH_STEP = {"memory_save_steps": 1}
GRACE_S = 13.0


@pytest.fixture(scope="module")
def losses(tmp_path_factory) -> list[float]:
    """Of a run that nobody disturbs."""
    job = write_job(tmp_path_factory.mktemp("undisturbed"))
    return train(job, plan=plan_for(job)).losses


# -- when ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "step_s", "tells", "save_s", "late"),
    [
        (100.0, 1.0, False, 5.0, False),
        (100.0, 60.0, False, 5.0, True),  # the next step is the first that all hear of it with
        (100.0, 10.0, False, 5.0, False),  # 5 s of this step, 10 s of the next one: 15 s are left
        (100.0, 20.0, False, 5.0, True),  # 15 s of this step, 20 s of the next one
        (100.0, 20.0, True, 5.0, False),
        (100.0, 20.0, True, 12.0, True),  # times the margin
        (115.0, 1.0, True, 5.0, False),  # a step that takes longer than others is waited for
        (123.0, 1.0, True, 5.0, True),  # for as long as a save has time
        (114.0, 0.0, True, None, False),  # half of the time, where nothing is known
        (116.0, 0.0, True, None, True),
    ],
)
def test_a_step_is_waited_for_while_there_is_time_for_a_save(now, step_s, tells, save_s, late):
    """Asked at 100 s, in a step that began at 95 s, by somebody who waits for 30 s."""
    assert StopTiming(100.0, 30.0, 95.0, step_s, tells, save_s).too_late(now) is late


@pytest.mark.parametrize(
    ("now", "save_s", "writing_since", "late"),
    [
        (109.0, 8.0, None, False),
        (109.0, 8.0, 99.0, False),  # it is whole in 2 s, and another one 12 s later: 21 s are left
        (109.0, 8.0, 108.0, True),  # in 11 s
        (119.0, 2.0, 110.0, True),  # it takes longer than the last, so may another one
        (104.0, None, 96.0, False),  # perhaps in 8 s, and another one takes 15 s: 26 s are left
        (106.0, None, 96.0, True),  # in 10 s: 24 s are left
    ],
)
def test_no_checkpoint_begins_before_the_one_under_way_is_whole(now, save_s, writing_since, late):
    moment = StopTiming(100.0, 30.0, 95.0, 1.0, True, save_s, writing_since)
    assert moment.too_late(now) is late


def test_a_save_that_does_not_end_is_waited_for_as_long_as_one_may_take(tmp_path):
    """The disk hangs, under the thread beside the main one."""
    goes_on = threading.Event()
    word = f"{AT_ONCE}0.1"
    ranks = SimpleNamespace(rank=3, claim=lambda *_: word, claimed=lambda _: word)
    advanced = SimpleNamespace(grace_period=0.1)
    job = SimpleNamespace(max_steps=6, advanced=advanced, output_dir=tmp_path)
    keeping = SimpleNamespace(
        is_step_saved=lambda done, deadline: False,
        checkpointer=SimpleNamespace(writing_since=None),
        save_s=None,
        patience_s=0.1,
        save_copies=lambda deadline, needs_s: goes_on.wait() and None,
        resume_copying=lambda: None,
    )
    stop: Any = SimpleNamespace(asked_at=None, wait=lambda _: None, wake=lambda: None)
    late = {"code": "checkpoint-io-timeout", "what": (3, 0)}
    last: Any = PreemptionSaver(SimpleNamespace(ranks=ranks, job=job), keeping, lambda: 2)
    with last.beside(stop):
        try:
            with raises(MachineError, **late) as caught:
                last.claim_last_save()
        finally:
            goes_on.set()
    assert str(tmp_path) in caught.value.where


# -- in a run --------------------------------------------------------------------------------------


def asked(tmp_path, fault: str, **changes):
    """A job of which a rank is asked to end in its fourth step, which takes a minute then."""
    harm = toy(fault=fault, rank=1, at=4, once=str(tmp_path / "asked"))
    return write_job(tmp_path, model=harm, **{"grace_period": 2} | EACH_STEP | changes)


def check_stopped_after_three(tmp_path, losses, job) -> None:
    with pytest.raises(Interrupted) as caught:
        train(job, plan=plan_for(job))
    assert caught.value.what == "stopped after step 3 of 6"
    assert checkpoints(tmp_path / "run")[-1] == "step-00000003"
    assert caught.value.where.endswith("step-00000003")
    assert "`advanced.grace_period`" in caught.value.why
    assert train(job, plan=plan_for(job), resume=True).losses == pytest.approx(losses[3:], rel=1e-6)
    assert [record["step"] for record in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def test_a_long_step_is_given_up_and_no_other_one(tmp_path, losses):
    check_stopped_after_three(tmp_path, losses, asked(tmp_path, "notice"))


@pytest.mark.extended
def test_with_updates_beside_the_backward_pass(tmp_path):
    """Part of the parameters may be those of the next step by then."""
    unclipped = {"optimizer": {"lr": 1e-2}, "max_grad_norm": None}
    job = write_job(tmp_path / "undisturbed", **unclipped)
    losses = train(job, plan=plan_for(job)).losses
    check_stopped_after_three(tmp_path, losses, asked(tmp_path, "notice", **unclipped))


@pytest.mark.extended
def test_on_a_slow_disk_that_is_busy(tmp_path, losses):
    """It still writes the checkpoint of the step before: that is waited for."""
    slow = {
        "factory": "toys:tokens_on_slow_disk",
        "arguments": {"sync_s": 0.2},
        "validation_split": 0.1,
    }
    job = asked(tmp_path, "notice", data=slow, save_steps=3, save_total_limit=3, **EACH_STEP)
    check_stopped_after_three(tmp_path, losses, job)


@pytest.mark.extended
def test_on_a_disk_too_slow_for_another_checkpoint(tmp_path):
    """That of step 3 is whole in time; one of step 4, after it, would not be."""
    slow = {
        "factory": "toys:tokens_on_slow_disk",
        "arguments": {"sync_s": 1.2},
        "validation_split": 0.1,
    }
    harm = toy(fault="notice", rank=1, at=5, once=str(tmp_path / "asked"))
    often = {"save_steps": 3} | EACH_STEP
    job = write_job(tmp_path, model=harm, data=slow, grace_period=GRACE_S, **often)
    with raises(Interrupted, code="stopped-after-step", what=(3, 6)):
        train(job, plan=plan_for(job))
    assert time.time() - (tmp_path / "asked").stat().st_mtime < GRACE_S + 10
    assert checkpoints(tmp_path / "run") == ["step-00000003"]
    whole = open_checkpoint(tmp_path / "run" / "checkpoints" / "step-00000003")[0]
    verify(tmp_path / "run" / "checkpoints" / "step-00000003", sorted(whole.files.items()))


@pytest.mark.extended
def test_one_rank_that_is_asked_tells_the_others(tmp_path, losses):
    """All save, and start again from there."""
    job = asked(tmp_path, "notice-to-one", max_restarts=3)
    train(job, plan=plan_for(job))
    told = metrics(tmp_path / "run")
    assert [one["loss"] for one in told] == pytest.approx(losses, rel=1e-6)
    (restart,) = metrics(tmp_path / "run", "restart")
    assert restart["resumed_from"] == 3
    assert restart["why"] == "somebody asked a rank to end: stopped after step 3 of 6"


@pytest.mark.extended
def test_a_first_step_that_does_not_end_is_given_up(tmp_path, losses):
    harm = toy(fault="notice", rank=1, at=1, once=str(tmp_path / "asked"))
    job = write_job(tmp_path, model=harm, grace_period=2)
    with raises(Interrupted, code="stopped-before-first-step") as caught:
        train(job, plan=plan_for(job))
    assert "`advanced.grace_period`" in caught.value.why and not list(
        (tmp_path / "run" / "checkpoints").glob("*")
    )
    again = write_job(tmp_path, model=harm, output_dir="again")
    assert train(again, plan=plan_for(again)).losses == pytest.approx(losses, rel=1e-6)


@pytest.mark.extended
def test_a_step_after_a_checkpoint_is_given_up_without_copies_in_memory(tmp_path, losses):
    saved = {"save_steps": 3, "memory_save_steps": 0}
    job = asked(tmp_path, "notice", **saved)
    check_stopped_after_three(tmp_path, losses, job)


@pytest.mark.extended
def test_without_copies_in_memory_the_step_is_waited_for(tmp_path, losses):
    """There is nothing else to save: who has none is asked to choose a `grace` of several steps."""
    slow = toy(fault="terminate", rank=1, at=3, sample_s=0.2)
    none = {"memory_save_steps": 0}
    job = write_job(tmp_path, model=slow, **none, grace_period=0.1)
    with raises(Interrupted, code="rank-asked-to-end", what=6):
        train(job, plan=plan_for(job))


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.extended
def test_a_host_of_an_elastic_run_that_is_asked_to_end(tmp_path, losses):
    """torchrun passes it on to the ranks there; the others go on without them."""
    slow = toy(rank=1, at=3, sample_s=1.0)
    two = {"cluster": [*CLUSTER[:1], CLUSTER[1] | {"count": 1}]}
    job = write_job(tmp_path, model=slow, grace_period=2, max_restarts=3, **EACH_STEP, **two)
    plan_for(job, (4, 4), (0.5, 0.5)).save(tmp_path / "plan.json")
    run = tmp_path / "run"
    port = free_port()
    agents = [agent(tmp_path, port, number) for number in range(2)]
    try:
        while not (run / "metrics.jsonl").exists() or len(metrics(run)) < 2:
            assert agents[0].poll() is None, (tmp_path / "said-0").read_text()
            time.sleep(0.1)
        time.sleep(1.0)  # of step 3, which takes longer
        agents[1].send_signal(signal.SIGTERM)
        assert agents[0].wait(120) == 0, (tmp_path / "said-0").read_text()
    finally:
        for one in agents:
            one.send_signal(signal.SIGTERM)
            one.wait(60)
    told = metrics(run)
    assert [one["step"] for one in told] == [1, 2, 3, 4, 5, 6]
    assert [one["loss"] for one in told] == pytest.approx(losses, rel=1e-5)
    (restart,) = metrics(run, "restart")
    assert restart["resumed_from"] == 2
    assert "stopped after step 2 of 6" in (tmp_path / "said-1").read_text()


def agent(folder, port: int, number: int) -> Command:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1",
        "--max-restarts", "3", "--rdzv-backend", "gpumix", "--rdzv-id", "asked",
        "--rdzv-endpoint", f"127.0.0.1:{port}", "--monitor-interval", "0.2",
        "--rdzv-conf", "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=10,"
        f"is_host={number == 0}".lower(),
        "-m", "gpumix", "train", "job.yaml", "--plan", "plan.json",
    ]  # fmt: skip
    env = environment(folder) | {"OMP_NUM_THREADS": "1"}
    return begin(command, folder=folder, env=env, said=folder / f"said-{number}")
