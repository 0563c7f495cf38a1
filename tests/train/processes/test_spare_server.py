"""The spare of the server that ranks are forked from takes its place once it was killed."""

from __future__ import annotations

import os
import signal
from multiprocessing.forkserver import _forkserver
from pathlib import Path

import pytest

from gpumix.schema.cluster.cluster import Cluster, Device
from gpumix.schema.errors import RankLost
from gpumix.schema.reading.read import read_job
from gpumix.train.processes import local_launcher, spare_fork
from gpumix.train.processes.runner import LocalRunner
from helpers.errors import raises
from helpers.processes import rank_server
from helpers.processes.waiting import wait_until
from helpers.runs.jobs import gpumix, metrics, plan_for, toy, train, write_job

DEVICES = [Device(id=f"cpu-{number}", device_class="cpu") for number in range(2)]
STEPS = 8


def family(seat: local_launcher.RankAddress) -> tuple[int, tuple[object, ...]]:
    """What a rank was forked from, and how it takes signals."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    return os.getppid(), tuple(map(signal.getsignal, numbers))


def parents() -> set[int]:
    return {parent for parent, _ in local_launcher.launch(family, DEVICES)}


def server() -> int:
    rank_server.warm_up()
    number = _forkserver._forkserver_pid
    assert number is not None
    return number


def kill(process: int) -> None:
    """Returns when nothing is left of it but its number, and what it had just forked has closed
    the pipe that it had of it."""
    pipe = _forkserver._forkserver_alive_fd if process == _forkserver._forkserver_pid else None
    os.kill(process, signal.SIGKILL)
    wait_until(
        lambda: not _runs(process) and (pipe is None or not spare_fork._has_reader(pipe)), 30
    )


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return False
    return state not in "ZX"


def kept() -> spare_fork.SpareServer:
    found = spare_fork.keep_spare()
    assert found is not None
    assert found.pid != server()
    return found


def test_ranks_are_forked_from_the_spare_of_a_killed_server_again_and_again():
    _, signals = local_launcher.launch(family, DEVICES[:1])[0]
    for _ in range(3):
        one = kept()
        assert spare_fork.keep_spare() is one
        kill(server())
        assert local_launcher.launch(family, DEVICES) == [(one.pid, signals)] * 2


def test_a_spare_that_was_killed_is_no_harm():
    first = kept()
    kill(first.pid)
    before = server()
    assert parents() == {before}
    second = kept()
    assert second.pid != first.pid
    kill(before)
    assert parents() == {second.pid}


def test_a_spare_outlives_what_is_sent_to_the_whole_group():
    one = kept()
    kill(server())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(one.pid, number)
    assert parents() == {one.pid}
    assert _runs(one.pid)


@pytest.mark.extended
@pytest.mark.slow  # torch is loaded anew
def test_a_server_that_is_killed_before_it_has_forked_a_spare_is_started_anew():
    first = server()
    kill(kept().pid)
    os.kill(first, signal.SIGSTOP)
    late = spare_fork.keep_spare()  # nothing is waited for
    assert late is not None
    kill(first)
    assert not late.is_alive
    assert first not in parents()


def test_a_rank_that_cannot_be_forked_is_one_that_was_lost(monkeypatch):
    """The server is killed after it was looked for."""
    one, first = kept(), server()
    monkeypatch.setattr(_forkserver, "ensure_running", lambda: None)
    monkeypatch.setattr(local_launcher, "warm_up", lambda: None)
    kill(first)
    with raises(RankLost, code="rank-not-started"):
        local_launcher.launch(family, DEVICES)
    monkeypatch.undo()
    assert parents() == {one.pid}


# -- runs ------------------------------------------------------------------------------------------


@pytest.fixture
def forked_from(monkeypatch) -> list[int]:
    """Of each rank that is started, in this order, what it is forked from."""
    found: list[int] = []
    start = local_launcher._start

    def started(process) -> None:
        start(process)
        status = Path(f"/proc/{process.pid}/stat").read_text()
        found.append(int(status.rpartition(") ")[2].split()[1]))

    monkeypatch.setattr(local_launcher, "_start", started)
    return found


def test_a_run_whose_server_is_killed_goes_on_from_memory_and_with_the_spare(
    tmp_path, forked_from, monkeypatch
):
    train(sound := write_job(tmp_path / "sound", max_steps=STEPS), plan=plan_for(sound))
    first, seen = server(), []
    keep = local_launcher.keep_spare
    monkeypatch.setattr(local_launcher, "keep_spare", lambda: seen.append(keep()))
    del forked_from[:]
    fault = toy(fault="kill-parent", rank=1, at=5, once=str(tmp_path / "once"))
    job = write_job(tmp_path, model=fault, max_steps=STEPS, max_restarts=1, memory_save_steps=1)
    train(job, plan=plan_for(job))
    assert seen[0] is not None
    assert forked_from == [first] * 3 + [seen[0].pid] * 3
    [restart] = metrics(tmp_path / "run", "restart")
    assert "cannot be watched any more" in restart["why"]
    assert (restart["resumed_from"] in (3, 4), restart["kept_in"]) == (True, "memory")
    losses = [
        [one["loss"] for one in metrics(folder / "run")] for folder in (tmp_path, sound.parent)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert len(losses[0]) == STEPS
    # And there is another one by now.
    assert seen[-1] is not None
    assert seen[-1].pid not in (first, seen[0].pid)


@pytest.mark.extended
def test_runs_that_do_not_start_again_and_profiles_have_no_spare(tmp_path, monkeypatch):
    monkeypatch.setattr(local_launcher, "keep_spare", lambda: pytest.fail("a spare is made"))
    job = write_job(tmp_path, max_restarts=0)
    train(job, plan=plan_for(job))
    cluster = read_job(job).cluster
    assert isinstance(cluster, Cluster)
    assert LocalRunner(restarts=True).run(family, cluster)[0] == server()


@pytest.mark.extended
def test_a_launcher_that_is_killed_leaves_no_spare_behind(tmp_path):
    fault = toy(fault="kill-launcher", rank=1, at=3)
    job = write_job(tmp_path, model=fault, max_restarts=1)
    plan_for(job).save(tmp_path / "plan.json")
    done = gpumix("train", "job.yaml", "--plan", "plan.json", folder=tmp_path)
    assert done.code == -9  # and `gpumix` has looked for processes that are left
