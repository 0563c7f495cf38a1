"""A run that loses a rank goes on by itself, from what the hosts keep in memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpumix.hardware.host.environment import shared_memory_folder
from gpumix.schema.errors import DeviceMissing, GpumixError, RankLost, TrainingError
from gpumix.schema.reading.read import read_job
from gpumix.train.controller import JobController, UserPlan
from gpumix.train.processes.runner import LocalRunner
from helpers.extended import every_second
from helpers.runs.jobs import checkpoints, metrics, plan_for, progress, toy, train, write_job

STEPS = 12


def held_in(output: Path) -> list[str]:
    """The copies in memory of all runs with an output."""
    root = shared_memory_folder()
    assert root is not None
    places = [
        file.parent for file in root.glob("gpumix-*/whose.json") if str(output) in file.read_text()
    ]
    return [seal.name for place in places for seal in place.rglob("*.seal")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("undisturbed")
    job = write_job(folder, max_steps=STEPS)
    train(job, plan=plan_for(job))
    return metrics(folder / "run")


def disturbed(
    tmp_path, fault: str, rank: int = 1, at: int = 4, harm: dict | None = None, **changes
) -> Path:
    """A job of which a rank comes to harm in the fourth step after each start."""
    usual = {"max_restarts": 3, "memory_save_steps": 1}
    model = toy(fault=fault, rank=rank, at=at, **harm or {})
    return write_job(tmp_path, model=model, max_steps=STEPS, **usual | changes)


def check_same(run: Path, undisturbed: list[dict]) -> list[dict]:
    """Each step was done once, as without the harm; the records of starting again."""
    told = metrics(run)
    assert [one["step"] for one in told] == list(range(1, STEPS + 1))
    for mine, other in zip(told, undisturbed, strict=True):
        assert mine["tokens"] == other["tokens"]
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-6)
    return metrics(run, "restart")


def test_a_killed_rank(tmp_path, undisturbed):
    """No step but the one in which it was killed, and the one before at most, is done again; copies
    in memory are gone afterwards. It is the first rank, others are killed below."""
    job = disturbed(tmp_path, "kill", rank=0, harm={"once": str(tmp_path / "killed")})
    train(job, plan=plan_for(job))
    (restart,) = check_same(tmp_path / "run", undisturbed)
    assert "was killed by signal 9" in restart["why"]
    assert restart["resumed_from"] in (2, 3)
    assert metrics(tmp_path / "run", "plan") == []  # it is the same one
    assert progress(tmp_path / "run")["state"] == "finished"
    assert checkpoints(tmp_path / "run") == ["step-00000012"]
    assert not held_in(tmp_path / "run")


def test_how_losses_add_up_is_not_rehearsed_again(tmp_path, undisturbed):
    log, killed = tmp_path / "log", tmp_path / "killed"
    job = disturbed(tmp_path, "kill", harm={"once": str(killed), "log": str(log)})
    train(job, plan=plan_for(job))
    check_same(tmp_path / "run", undisturbed)
    passes = log.read_text().split()
    (tmp_path / "alone").mkdir()
    undisturbed_job = write_job(tmp_path / "alone", max_steps=1, model=toy(log=str(log)))
    log.unlink()
    train(undisturbed_job, plan=plan_for(undisturbed_job))
    assert sorted(passes) == sorted(log.read_text().split())


@pytest.mark.slow  # it is waited for until the timeout
@pytest.mark.extended
def test_a_stopped_rank(tmp_path, undisturbed):
    job = disturbed(tmp_path, "stop", at=9, timeout=5)
    train(job, plan=plan_for(job))
    restarts = check_same(tmp_path / "run", undisturbed)
    assert [one["resumed_from"] in (7, 8) for one in restarts] == [True]


@pytest.mark.extended
@pytest.mark.slow  # it is waited for until the timeout
def test_a_rank_that_hangs(tmp_path, undisturbed):
    """Its heart beats on: a call of a driver has not come back."""
    harm = {"once": str(tmp_path / "hung")}
    job = disturbed(tmp_path, "hang", at=6, harm=harm, timeout=5)
    train(job, plan=plan_for(job))
    restarts = check_same(tmp_path / "run", undisturbed)
    assert [one["resumed_from"] in (4, 5) for one in restarts] == [True]
    assert restarts[0]["why"] == "rank 1 (device 'small-0' on localhost) did not take part"


@pytest.mark.slow  # it is waited for until the timeout, twice
@pytest.mark.extended
def test_a_device_that_hangs_again_and_again_is_left_out(tmp_path, undisturbed):
    all_compute = {"strategy": "even"}
    sound = JobController.of_file(write_job(tmp_path / "sound", **all_compute), (), debug=False)
    profile = sound.profile()
    kept = {"memory_save_steps": 0}
    job = disturbed(tmp_path, "hang", 2, at=1, **kept, timeout=5, **all_compute)
    pipeline = JobController.of_file(job, (), debug=False)
    pipeline.train(UserPlan(sound.plan(profile), profile), resume=False)
    check_same(tmp_path / "run", undisturbed)
    assert [d.id for d in pipeline.cluster.devices] == ["big-0", "small-0"]


@pytest.mark.extended
@pytest.mark.slow  # it is waited for by the watchdog
@pytest.mark.parametrize("rank", every_second([2, 0]))
def test_of_a_rank_that_hangs_and_those_that_their_watchdogs_abort_the_first_is_named(
    tmp_path, undisturbed, rank
):
    """As on NCCL, where a wait cannot be given up: the one that waits is ended."""
    harm = {"once": str(tmp_path / "hung"), "watchdog_s": 4}
    job = disturbed(tmp_path, "hang", rank, at=6, harm=harm)
    train(job, plan=plan_for(job))
    restarts = check_same(tmp_path / "run", undisturbed)
    name = ("big-0", "small-0", "small-1")[rank]
    assert len(restarts) == 1
    told = rf"rank {rank} \(device '{name}', pid \d+\) did not take part"
    assert re.fullmatch(told, restarts[0]["why"])


@pytest.mark.slow  # until it is taken for lost
def test_a_stopped_rank_is_found_long_before_the_timeout(tmp_path, undisturbed, monkeypatch):
    monkeypatch.setattr("gpumix.train.processes.local_launcher.STOPPED_TIMEOUT_S", 2.0)
    harm = {"once": str(tmp_path / "stopped")}
    job = disturbed(tmp_path, "stop", at=6, harm=harm, timeout=3600)
    train(job, plan=plan_for(job))
    restarts = check_same(tmp_path / "run", undisturbed)
    assert [one["why"].endswith("stopped answering") for one in restarts] == [True]


@pytest.mark.extended
@pytest.mark.slow
def test_a_call_that_keeps_pythons_lock_is_waited_for(tmp_path, undisturbed, monkeypatch):
    """The heart stands still for longer than that of a process that is stopped may."""
    monkeypatch.setattr("gpumix.train.processes.local_launcher.STOPPED_TIMEOUT_S", 2.0)
    job = disturbed(tmp_path, "hold-lock")
    train(job, plan=plan_for(job))
    assert not check_same(tmp_path / "run", undisturbed)


@pytest.mark.extended
def test_without_copies_in_memory_a_run_goes_on_from_its_last_checkpoint(tmp_path, undisturbed):
    saving = {"save_steps": 3, "memory_save_steps": 0}
    saved = tmp_path / "run" / "checkpoints" / "step-00000003"
    harm = {"after": str(saved), "once": str(tmp_path / "killed")}
    job = disturbed(tmp_path, "kill", at=6, harm=harm, **saving)
    train(job, plan=plan_for(job))
    restarts = check_same(tmp_path / "run", undisturbed)
    assert [one["resumed_from"] for one in restarts] == [3]


@pytest.mark.extended
def test_a_device_whose_rank_is_lost_again_and_again_is_left_out(tmp_path, undisturbed):
    """In the end that of rank 0 is alone."""
    all_compute = {"strategy": "even"}
    sound = JobController.of_file(write_job(tmp_path / "sound", **all_compute), (), debug=False)
    profile = sound.profile()
    kept = {"memory_save_steps": 0}
    job = disturbed(tmp_path, "kill", at=1, **kept, **all_compute)
    pipeline = JobController.of_file(job, (), debug=False)
    pipeline.train(UserPlan(sound.plan(profile), profile), resume=False)
    restarts = check_same(tmp_path / "run", undisturbed)
    assert [one["resumed_from"] for one in restarts] == [0]
    assert restarts[0]["decided"].endswith("is left out: its rank was lost 2 times in a row")
    assert [d.id for d in pipeline.cluster.devices] == ["big-0"]
    (plan,) = metrics(tmp_path / "run", "plan")
    assert plan["why"] == restarts[0]["decided"]
    assert plan["samples_before"].keys() > plan["samples"].keys() == {"big-0"}
    assert sum(plan["samples_before"].values()) == plan["samples"]["big-0"]


class Scripted(LocalRunner):
    """Its ranks are not started: each start fails with the next error, if there is one."""

    def __init__(self, errors: list[GpumixError]) -> None:
        super().__init__()
        self.errors = errors
        self.starts: list[list[str]] = []

    def run(self, work, cluster, *args, saves=False):
        if not saves:
            return super().run(work, cluster, *args, saves=saves)
        _, plan, profile, devices, *_ = args
        names = [device.id for device in devices]
        assert sorted(worker.device for worker in plan.workers) == sorted(names)
        assert [device.id for device in profile.cluster.in_rank_order()] == names
        self.starts.append(names)
        if self.errors:
            raise self.errors.pop(0)
        return "trained"


def test_a_device_that_was_left_out_is_tried_once_more_later(tmp_path, monkeypatch):
    """When another rank is lost, some steps on; lost at once it stays out until the next time."""
    lost = [
        RankLost("lost", device=name, device_class=name.split("-")[0])
        for name in ["small-0"] * 2 + ["big-0", "small-0", "big-0"]
    ]
    newest = [5, 5, 9, 9, 12]
    monkeypatch.setattr(JobController, "_newest", lambda self: newest.pop(0))
    runs = Scripted(list(lost))
    job = read_job(write_job(tmp_path, strategy="even", max_restarts=3))
    pipeline = JobController(job, tmp_path, runs)
    assert pipeline.train(UserPlan(), resume=False) == "trained"
    every = ["big-0", "small-0", "small-1"]
    without = ["big-0", "small-1"]
    assert runs.starts == [every, every, without, every, without, every]


@pytest.mark.parametrize("lost_before", [True, False])
def test_a_gpu_that_is_not_there_any_more_is_left_out(tmp_path, monkeypatch, lost_before):
    """One that never was there is told of."""
    lost = RankLost("fell off the bus", device="small-0", device_class="small")
    missing = DeviceMissing("this process does not see GPU small-0", device="small-0")
    monkeypatch.setattr(JobController, "_newest", lambda self: 5)
    runs = Scripted([lost, missing] if lost_before else [missing])
    job = read_job(write_job(tmp_path, strategy="even", max_restarts=3))
    pipeline = JobController(job, tmp_path, runs)
    if lost_before:
        assert pipeline.train(UserPlan(), resume=True) == "trained"
        assert runs.starts[-1] == ["big-0", "small-1"]
    else:
        with pytest.raises(DeviceMissing):
            pipeline.train(UserPlan(), resume=True)


def test_without_any_state_it_begins_anew_and_gives_up_in_the_end(tmp_path):
    job = disturbed(tmp_path, "kill", max_restarts=1, memory_save_steps=0)
    with pytest.raises(TrainingError) as caught:
        train(job, plan=plan_for(job))
    assert "was killed by signal 9" in caught.value.what
    assert caught.value.why.endswith("that happened 2 times in a row")
    assert progress(tmp_path / "run")["state"] == "failed"
    assert caught.value.what in progress(tmp_path / "run")["why"]


@pytest.mark.extended
def test_who_does_not_want_it_is_told_at_once(tmp_path):
    job = disturbed(tmp_path, "kill", max_restarts=0)
    with pytest.raises(RankLost):
        train(job, plan=plan_for(job))
    assert not metrics(tmp_path / "run", "restart")


def test_what_a_killed_run_left_in_memory_is_gone_on_from(tmp_path, undisturbed):
    job = disturbed(tmp_path, "kill", max_restarts=0, at=6)
    with pytest.raises(RankLost):
        train(job, plan=plan_for(job))
    assert not (tmp_path / "run" / "checkpoints").exists()
    done = metrics(tmp_path / "run")[-1]["step"]
    job = write_job(tmp_path, max_steps=STEPS)
    summary = train(job, plan=plan_for(job), resume=True)
    assert len(summary.losses) in (STEPS - done, STEPS - done + 1)
    check_same(tmp_path / "run", undisturbed)


@pytest.mark.extended
def test_a_run_begun_anew_goes_by_nothing_that_an_earlier_one_left(tmp_path, undisturbed):
    """Neither by its copies in memory nor by its plan, though it has the same output, and loses a
    rank before it has any of its own."""
    job = disturbed(tmp_path, "kill", max_restarts=0, at=6, optimizer={"lr": 0.1})
    with pytest.raises(RankLost):
        train(job, plan=plan_for(job, (2, 2, 4)))
    assert held_in(tmp_path / "run")
    once = str(tmp_path / "killed")
    data = {"factory": "toys:deadly_tokens", "arguments": {"once": once}, "validation_split": 0.1}
    job = write_job(tmp_path, data=data, max_steps=STEPS, max_restarts=3)
    train(job, plan=plan_for(job))
    (restart,) = check_same(tmp_path / "run", undisturbed)
    assert (restart["resumed_from"], restart["kept_in"]) == (0, "")
    assert metrics(tmp_path / "run", "plan") == []
    assert not held_in(tmp_path / "run")


@pytest.mark.extended
def test_copies_in_memory_count_where_what_is_later_on_disk_is_damaged(tmp_path, undisturbed):
    """Before what is earlier on disk."""
    saved = tmp_path / "run" / "checkpoints" / "step-00000006"
    saving = {"save_steps": 3, "memory_save_steps": 4}
    harm = {"after": str(saved)}
    job = disturbed(tmp_path, "kill", max_restarts=0, at=8, harm=harm, **saving)
    with pytest.raises(RankLost):
        train(job, plan=plan_for(job))
    assert checkpoints(tmp_path / "run") == ["step-00000003", "step-00000006"]
    file = saved / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    job = write_job(tmp_path, max_steps=STEPS)
    summary = train(job, plan=plan_for(job), resume=True)
    assert len(summary.losses) == STEPS - 4
    check_same(tmp_path / "run", undisturbed)


@pytest.mark.extended
def test_a_rank_that_somebody_asks_to_end(tmp_path, undisturbed):
    """The others would wait for it: all save, and start again."""
    harm = {"once": str(tmp_path / "asked")}
    job = disturbed(tmp_path, "terminate", at=5, harm=harm)
    train(job, plan=plan_for(job))
    restarts = check_same(tmp_path / "run", undisturbed)
    assert [one["why"] for one in restarts] == [
        "somebody asked a rank to end: stopped after step 6 of 12"
    ]


def test_a_plan_that_takes_more_memory_than_there_is_is_made_again(tmp_path):
    """Once it is known that there is too little, and where: no sample is lost."""
    cluster = [
        {"class": "big", "accelerator": "cpu", "memory": "64 MiB"},
        {"class": "small", "accelerator": "cpu", "memory": "6 MiB", "count": 2},
    ]
    # So slow that its losses stay away from zero, where sums of another order show.
    usual = {"model": toy(width=256), "max_steps": STEPS, "optimizer": {"lr": 1e-4}}
    large = write_job(tmp_path / "large", **usual)
    train(large, plan=plan_for(large))
    job = write_job(tmp_path, cluster=cluster, max_restarts=3, **usual)
    train(job, plan=plan_for(job, shares=(0.1, 0.8, 0.1)))
    restarts = check_same(tmp_path / "run", metrics(tmp_path / "large" / "run"))
    (restart,) = restarts
    assert restart["why"] == "out of memory"
    assert restart["decided"] == "planning again, with 92% of the memory of class 'small'"
