"""Two hosts over ssh: the same losses as one process, and nothing left behind whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.processes.commands import Done
from helpers.processes.running import MARK, Running, running
from helpers.processes.sshd import Hosts
from helpers.runs.jobs import CLUSTER, checkpoints, metrics, plan_for, run, toy, train, write_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

HOSTS = "gpx-a:1,gpx-b:2"
CARRIED = ("PYTHONPATH", "GLOO_SOCKET_IFNAME", "XDG_CACHE_HOME", "GPUMIX_ALLOW")
BY_PLAN = ("job.yaml", "--plan", "plan.json")


def options(two: Hosts, *more: str, carried=CARRIED) -> list[str]:
    env = [word for name in carried for word in ("--env", name)]
    return ["--ssh", two.ssh, *env, *(() if "--hosts" in more else ("--hosts", HOSTS)), *more]


def launch(two: Hosts, folder: Path, *words: str) -> Done:
    """`words`: options, and the program."""
    command = [sys.executable, "-m", "gpumix", "launch", *options(two), *words]
    return run(command, folder, {}, 90)


def job_of(folder: Path, **changes) -> Path:
    """A job, and a plan for it, so that nothing is measured."""
    job = write_job(folder, **changes)
    plan_for(job).save(folder / "plan.json")
    return job


WAITS = """
import os, pathlib, signal, sys, time

def save(*_):
    pathlib.Path(f"saved-{os.environ['RANK']}").touch()
    sys.exit(130)

signal.signal(signal.SIGINT, save)
print("waiting", flush=True)
time.sleep(600)
"""


@contextmanager
def waiting(two: Hosts, folder: Path, script: str = WAITS) -> Iterator[Running]:
    """A script that all ranks run, and that waits to be stopped."""
    (folder / "waits.py").write_text(script, encoding="utf-8")
    carried = options(two, "--grace-period", "20", carried=(*CARRIED, MARK))
    with running(folder, *carried, program=["waits.py"]) as started:
        started.wait_until(lambda: started.said.count("waiting") == 3)
        assert len(started.left()) >= 6  # ranks, launchers, and who connects them
        yield started


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("saved-*"))


@pytest.mark.extended
def test_two_hosts_train_to_the_losses_of_one_process(two, tmp_path):
    alone = write_job(
        tmp_path / "alone", cluster=[{"class": "big", "accelerator": "cpu", "memory": "64 MiB"}]
    )
    expected = train(alone, plan=plan_for(alone, (8,), (1.0,))).losses
    job_of(tmp_path)
    done = launch(two, tmp_path, "--json", "--logs", "logs", *BY_PLAN)
    assert done.code == 0, done.err
    told = done.json()
    assert [(host["host"], host["processes"]) for host in told["hosts"]] == [
        ("gpx-a", 1), ("gpx-b", 2)
    ]  # fmt: skip
    assert told["summary"]["losses"] == pytest.approx(expected, rel=1e-6)
    assert [one["loss"] for one in metrics(tmp_path / "run")] == pytest.approx(expected, rel=1e-6)
    assert "gpumix: rank 0 on gpx-a, ranks 1 to 2 on gpx-b; they meet at 127.0.0.1:" in done.err
    # One rank speaks, and its host's name stands before each line.
    assert "gpx-a | " in done.err and "gpx-b | " not in done.err
    assert "step 6/6" in (tmp_path / "logs" / "gpx-a.log").read_text(encoding="utf-8")


@pytest.mark.extended
def test_hosts_that_nobody_counted_run_a_process_for_each_device(two, tmp_path):
    """On hosts without a GPU the CPU is the only one."""
    (tmp_path / "meets.py").write_text(ADDS)
    words = [*options(two, "--hosts", "gpx-a,gpx-b"), "meets.py"]
    done = run([sys.executable, "-m", "gpumix", "launch", *words], tmp_path, {}, 90)
    assert done.code == 0, done.err
    assert sorted(done.out.splitlines()) == [f"gpx-{h} | {r} of 2: 3.0" for h, r in ("a0", "b1")]


@pytest.mark.extended
def test_printed_commands_of_two_hosts_meet(two, tmp_path):
    (tmp_path / "meets.py").write_text(ADDS)
    words = [*options(two, "--hosts", "gpx-a:1,gpx-b:1", "--print-commands"), "meets.py"]
    done = run([sys.executable, "-m", "gpumix", "launch", *words], tmp_path, {}, 60)
    assert done.code == 0, done.err
    lines = [line.replace(" -t ", " ") for line in done.out.splitlines()]
    assert len(lines) == 2
    with ThreadPoolExecutor(2) as shells:
        typed = list(shells.map(lambda line: run(["sh", "-c", line], tmp_path, {}, 60), lines))
    assert [one.code for one in typed] == [0, 0], [one.err for one in typed]
    assert [one.out.split() for one in typed] == [f"{rank} of 2: 3.0".split() for rank in (0, 1)]


ADDS = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
summed = torch.tensor(dist.get_rank() + 1.0)
dist.all_reduce(summed)
print(f"{dist.get_rank()} of {dist.get_world_size()}: {summed.item()}", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.extended
def test_ctrl_c_stops_all_and_the_run_is_saved(two, tmp_path):
    pair = [one | {"count": 1} for one in CLUSTER]
    job = write_job(tmp_path, cluster=pair, max_steps=1000, model=toy(sample_s=0.02))
    plan_for(job, (4, 4), (0.5, 0.5)).save(tmp_path / "plan.json")
    words = options(two, "--hosts", "gpx-a:1,gpx-b:1", carried=(*CARRIED, MARK))
    with running(tmp_path, *words, program=BY_PLAN) as started:
        started.wait_for_steps(3)
        os.kill(started.process.pid, signal.SIGINT)
        assert started.code() == 130, started.said
        assert "stopping, runs save now" in started.said
        started.wait_until_nothing_is_left()
    assert len(checkpoints(tmp_path / "run")) == 1
    assert "Traceback" not in started.said


@pytest.mark.extended
def test_a_second_ctrl_c_ends_what_does_not_stop(two, tmp_path):
    deaf = WAITS.replace("SIGINT, save", "SIGINT, signal.SIG_IGN")
    with waiting(two, tmp_path, deaf) as started:
        os.kill(started.process.pid, signal.SIGINT)
        started.wait_until(lambda: "stopping" in started.said)
        assert started.process.poll() is None
        os.kill(started.process.pid, signal.SIGINT)
        assert started.code(20) == 130, started.said
        started.wait_until_nothing_is_left()


@pytest.mark.extended
def test_a_connection_that_is_cut_ends_all(two, tmp_path):
    """The host that was lost stops its ranks, as a user would, and the launcher the others."""
    with waiting(two, tmp_path) as started:
        os.kill(started.one("ssh ", " gpx-b "), signal.SIGKILL)
        assert started.code() == 5, started.said
        assert "host gpx-b: lost with ranks 1 to 2; the other host was ended" in started.said
        started.wait_until_nothing_is_left()
    assert saved(tmp_path)[-2:] == ["saved-1", "saved-2"]


@pytest.mark.extended
def test_a_launcher_that_is_killed_leaves_nothing(two, tmp_path):
    with waiting(two, tmp_path) as started:
        started.process.kill()
        started.process.wait()
        started.wait_until_nothing_is_left()
    assert saved(tmp_path) == ["saved-0", "saved-1", "saved-2"]


@pytest.mark.extended
def test_what_runs_on_a_host_may_be_killed(two, tmp_path):
    with waiting(two, tmp_path) as started:
        os.kill(started.one(sys.executable, " --first-rank 0 "), signal.SIGKILL)
        assert started.code() == 5, started.said
        assert "host gpx-a: lost with rank 0" in started.said
        started.wait_until_nothing_is_left()


def test_the_first_host_that_fails_ends_all_with_its_own_code(two, tmp_path):
    script = (
        "import os, sys, time\n"
        "print('one line', flush=True)\n"
        "if os.environ['RANK'] == '2': sys.exit(7)\n"
        "time.sleep(600)\n"
    )
    (tmp_path / "fails.py").write_text(script, encoding="utf-8")
    done = launch(two, tmp_path, "fails.py")
    assert done.code == 7
    assert done.out.splitlines().count("gpx-b | one line") == 2
    assert "gpx-b | gpumix: rank 2 left with exit code 7" in done.err
    assert "gpumix: host gpx-b: ranks 1 to 2 left with exit code 7; the other host was" in done.err


@pytest.mark.extended
def test_a_printed_command_is_what_a_shell_runs(two, tmp_path):
    """With all that shells make something of in its words."""
    odd = ["it's", '"$HOME"', "a b", "*", "back\\slash", ""]
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a folder" / "tell.py").write_text(
        "import json, os, sys; print(json.dumps([os.getcwd(), os.environ['RANK'], sys.argv[1:]]))"
    )
    command = ["--hosts", "gpx-a:1", "--print-commands", "--env", "ODD=it's $HOME"]
    words = ["gpumix", "launch", *options(two, *command), "tell.py", *odd]
    done = run([sys.executable, "-m", *words], tmp_path / "a folder", {}, 60)
    assert done.code == 0, done.err
    (line,) = done.out.splitlines()
    typed = subprocess.run(
        ["sh", "-c", line.replace(" -t ", " ")], capture_output=True, text=True, timeout=60
    )
    assert typed.returncode == 0, typed.stderr
    assert json.loads(typed.stdout) == [str(tmp_path / "a folder"), "0", odd]


MEETS = """
import socket
import torch.distributed as dist
dist.init_process_group("gloo")
print("met on", socket.gethostname(), flush=True)
"""


@pytest.mark.extended
def test_hosts_that_are_apart_meet_and_a_cable_that_is_pulled_is_noticed(apart, joined, tmp_path):
    """Each has a name and addresses of its own. Nothing ends a connection then, but silence."""
    ssh = f"{apart.ssh} -o ServerAliveInterval=1"
    arguments = options(
        apart, "--ssh", ssh, "--hosts", "gpx-a:1,gpx-b:2", carried=("PYTHONPATH", MARK)
    )
    script = f"{MEETS}import time; time.sleep(600)\n"
    (tmp_path / "meets.py").write_text(script, encoding="utf-8")
    here = joined.on("gpx-a")
    with running(tmp_path, *arguments, program=["meets.py"], on=here) as started:
        started.wait_until(lambda: started.said.count("met on gpx-") == 3)
        assert "gpx-a | met on gpx-a" in started.said and "gpx-b | met on gpx-b" in started.said
        joined.cut()
        assert started.code(60) == 5, started.said
        assert "host gpx-b: lost with ranks 1 to 2; the other host was ended" in started.said


def test_a_dry_run_asks_the_hosts_and_starts_nothing(two, tmp_path):
    job_of(tmp_path)
    done = launch(two, tmp_path, "--dry-run", "job.yaml")
    assert done.code == 0, done.err
    assert "rank 0 on gpx-a" in done.out and "ranks 1 to 2 on gpx-b" in done.out
    assert "nothing was started" in done.out
    assert not (tmp_path / "run").exists()
