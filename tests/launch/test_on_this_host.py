"""Programs on all devices of this host; an unchanged script of plain gpumix on emulated ones."""

from __future__ import annotations

import os
import signal
import sys

import pytest
import yaml

from helpers.extended import left_out
from helpers.processes.running import running
from helpers.runs.jobs import CLUSTER, EMULATED, gpumix, metrics, plan_for, run, train, write_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SCRIPT = """
import sys
import torch
import gpumix
import toys

LENGTH, BATCH = 8, 8

def some_batch(samples):
    tokens = torch.zeros(samples, LENGTH, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}

profile = gpumix.profile(
    toys.model, some_batch, sequence_length=LENGTH, global_batch=BATCH, budget_s=1.0,
    progress=lambda line: None,
)
plan = gpumix.plan(profile, global_batch=BATCH)
with gpumix.open_device() as device:
    engine = gpumix.prepare(gpumix.build(toys.model, seed=0), plan)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-2)
    with gpumix.Loader(toys.tokens(), engine.plan, engine.comm.rank) as loader:
        for step, batch in zip(range(4), loader):
            loss = engine.step(batch)
            optimizer.step()
            optimizer.zero_grad()
            if engine.comm.rank == 0:
                print("loss", loss.item())
    if engine.comm.rank == 0:
        print("devices", *sorted(device.id for device in profile.cluster.devices))
        print("arguments", *sys.argv[1:])
"""
# Each process imports torch anew: two are enough where their number proves nothing.
PAIR = [one | {"count": 1} for one in EMULATED]
NAMES = "devices fast-0 slow-0"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(EMULATED), encoding="utf-8")
    (tmp_path / "pair.yaml").write_text(yaml.safe_dump(PAIR), encoding="utf-8")
    return tmp_path


def losses(out: str) -> list[float]:
    return [float(line.split()[1]) for line in out.splitlines() if line.startswith("loss ")]


@pytest.mark.extended
def test_an_unchanged_script_runs_on_unequal_devices(folder):
    """To the losses that it has alone, on the device that is found."""
    alone = run([sys.executable, "script.py"], folder, {}, 90)
    assert alone.code == 0, alone.err
    launched = gpumix("launch", "--cluster", "pair.yaml", "script.py", "--a", "1", folder=folder)
    assert launched.code == 0, launched.err
    assert NAMES not in alone.out and NAMES in launched.out
    assert "arguments --a 1\n" in launched.out
    assert len(losses(alone.out)) == 4
    assert losses(launched.out) == pytest.approx(losses(alone.out), rel=1e-5)


@pytest.mark.extended
def test_torchrun_with_one_variable_does_the_same(folder):
    (folder / "opens.py").write_text(
        "import sys, gpumix\n"
        "with gpumix.open_device() as device:\n"
        "    sys.stdout.write(f'{device.memory_limit_bytes}\\n')\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    named = {"GPUMIX_CLUSTER": "cluster.yaml", "OMP_NUM_THREADS": "1"}
    done = run([*torchrun, "--nproc-per-node", "3", "opens.py"], folder, named, 90)
    assert done.code == 0, done.err
    assert sorted(map(int, done.out.split())) == [32 * 2**20, 32 * 2**20, 64 * 2**20]


def test_a_module_and_the_environment_that_torchrun_gives(folder):
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR GLOO_SOCKET_IFNAME MINE"
    (folder / "tell.py").write_text(
        "import os, sys\n"  # a line in one piece, so that those of ranks do not mix
        f"words = [*map(os.environ.get, '{names}'.split()), *sys.argv[1:]]\n"
        "sys.stdout.write(' '.join(words) + '\\n')\n"
    )
    words = ("--processes", "2", "--env", "MINE=so", "-m", "tell", "--deep")
    done = gpumix("launch", *words, folder=folder)
    assert done.code == 0, done.err
    assert sorted(done.out.splitlines()) == [
        f"{rank} 2 {rank} 2 127.0.0.1 lo so --deep" for rank in range(2)
    ]
    done = gpumix("launch", "--json", *words, folder=folder)
    assert done.json()["hosts"] == [
        {"host": "localhost", "first_rank": 0, "processes": 2, "exit_code": 0}
    ]
    assert "so --deep" in done.err


def test_a_rank_that_fails_ends_the_others_and_its_code_is_ours(folder):
    (folder / "fails.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(9)\ntime.sleep(600)\n",
    )
    done = gpumix("launch", "--processes", "2", "fails.py", folder=folder)
    assert done.code == 9
    assert done.err == "gpumix: rank 1 left with exit code 9\n"


@pytest.mark.extended
def test_what_killed_a_rank_is_told(folder):
    (folder / "dies.py").write_text("import os; os.kill(os.getpid(), 9)")
    done = gpumix("launch", "dies.py", folder=folder)
    assert done.code == 5
    assert done.err == "gpumix: rank 0 was killed by signal 9 (SIGKILL)\n"


@pytest.mark.parametrize(
    ("number", "code"),
    left_out([(signal.SIGINT, 130), (signal.SIGKILL, -9)], [(signal.SIGINT, 130)]),
)
def test_whatever_ends_the_launcher_ends_the_ranks_and_what_they_started(folder, number, code):
    (folder / "waits.py").write_text(
        "import subprocess, sys, time\n"
        "subprocess.Popen(['sleep', '600'])\n"
        "print('waiting', flush=True)\n"
        "time.sleep(600)\n"
    )
    with running(folder, "--processes", "2", program=["waits.py"]) as started:
        started.wait_until(lambda: started.said.count("waiting") == 2)
        os.kill(started.process.pid, number)
        assert started.code(20) == code
        started.wait_until_nothing_is_left()


def test_a_job_on_one_host_is_trained(folder):
    devices = [one | {"count": 1} for one in CLUSTER]
    (folder / "cpus.yaml").write_text(yaml.safe_dump(devices), encoding="utf-8")
    job = write_job(folder, max_steps=2, cluster=devices)
    plan = plan_for(job, (4, 4), (0.5, 0.5))
    plan.save(folder / "plan.json")
    expected = train(job, f"output_dir={folder / 'first'}", plan=plan).losses
    words = ("--cluster", "cpus.yaml", "job.yaml", "--plan", "plan.json")
    done = gpumix("launch", "--json", *words, folder=folder)
    assert done.code == 0, done.err
    assert done.json()["losses"] == expected
    assert [one["loss"] for one in metrics(folder / "run")] == expected


@pytest.mark.extended
def test_a_terminal_that_closes_ends_it_but_not_under_nohup(folder):
    (folder / "waits.py").write_text("print('waiting', flush=True); import time; time.sleep(600)")
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever these tests were started by
    try:
        with running(folder, program=["waits.py"]) as started:
            started.wait_until(lambda: "waiting" in started.said)
            os.kill(started.process.pid, signal.SIGHUP)
            assert started.code(20) == 130
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup leaves it
        with running(folder, program=["waits.py"]) as started:
            started.wait_until(lambda: "waiting" in started.said)
            os.kill(started.process.pid, signal.SIGHUP)
            os.kill(started.process.pid, signal.SIGTERM)
            assert started.code(20) == 130
            assert started.said.count("stopping") == 1
    finally:
        signal.signal(signal.SIGHUP, before)


SENSELESS = [
    (["nowhere.py"], "nowhere.py: there is no such script file"),
    (["nowhere.yaml"], "nowhere.yaml: there is no such job file"),
    (["train"], "train: this is neither a job (.yaml) nor a script (.py)"),
    (["--cluster", "nowhere.yaml", "script.py"], "nowhere.yaml: there is no such cluster file"),
    (
        ["--cluster", "cluster.yaml", "--processes", "2", "script.py"],
        "the cluster has 3 devices, and --processes says 2",
    ),
    (["--address", "here", "script.py"], "--address has an effect on several hosts only"),
    (["--timeout", "5", "script.py"], "--timeout has an effect on several hosts only"),
    (["--ssh", "ssh -v", "script.py"], "--ssh has an effect on several hosts only"),
    (["--env", "NOT_SET_HERE", "script.py"], "NOT_SET_HERE is not set here"),
    (["--hosts", "a,a", "script.py"], "host 'a' is named twice"),
    (["--hosts", "-oProxyCommand=x", "script.py"], "'-oProxyCommand=x' names no host"),
    (["--template", "k8s", "--logs", "x", "script.py"], "--logs has no effect on a template"),
    (["--print-commands", "--hosts", "a", "script.py"], "a run is not said, and no host is"),
    (
        ["--print-commands", "--hosts", "a:1", "--logs", "x", "script.py"],
        "--logs has no effect where commands are printed",
    ),
    (
        ["--print-commands", "--hosts", "a:1", "--timeout", "5", "script.py"],
        "--timeout has no effect where commands are printed",
    ),
    (["job.yaml", "--print-commands"], "--print-commands is an option of gpumix launch, and"),
    (["job.yaml", "--hosts=a,b"], "fix: put it before: gpumix launch --hosts=a,b ... JOB.yaml"),
    (["--grace-period", "0", "job.yaml"], "--grace-period has no effect on a job on one host"),
    (["--hosts", "cluster.yaml", "script.py"], "the cluster file names no hosts"),
]


@pytest.mark.parametrize(
    ("words", "said"),
    left_out(SENSELESS, SENSELESS[1:3] + SENSELESS[6:8] + SENSELESS[13:16] + SENSELESS[17:]),
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_makes_no_sense_is_said(folder, words, said):
    write_job(folder)
    done = gpumix("launch", *words, folder=folder)
    assert done.code == 2, done.err
    assert said in done.err
    assert "Traceback" not in done.err
