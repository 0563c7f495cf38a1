"""Hosts that go and come while a run trains: the others go on, and who comes is used.

Agents of torchrun on this machine stand for hosts, each with a name of its own, and with one device
of a class of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile
from helpers.processes.commands import begin
from helpers.processes.hosts import Host
from helpers.processes.ports import free_port
from helpers.processes.warm_commands import Command
from helpers.runs.jobs import OWN_PROFILES, environment, metrics, toy, train, write_job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.extended,
    pytest.mark.timeout(700),
    pytest.mark.skipif(os.geteuid() != 0, reason="names of hosts are for root"),
]

HOSTS = ("one", "two", "three")
STEPS = 60
MANY_STEPS = 200
SAMPLE_S = 0.05  # so that steps are left when a host has come


def job_in(
    folder: Path,
    hosts: Sequence[str] = HOSTS,
    once: Path | None = None,
    sample_s: float = SAMPLE_S,
    steps: int = STEPS,
) -> Path:
    """
    Args:
        once: rank 0 is stopped in its tenth pass beside another rank, and leaves this path.

    Steps are slow until `all-came` is in the folder.
    """
    cluster = [
        {"class": f"of-{name}", "accelerator": "cpu", "memory": "64 MiB", "host": host}
        for name, host in zip(HOSTS, hosts)
    ]
    harm = {"fault": "stop", "at": 10, "among": 2, "once": str(once)} if once is not None else {}
    model = toy(sample_s=sample_s, rank=0, until=str(folder / "all-came"), **harm)
    # So slow that losses stay away from zero, where sums of another order show.
    changes = {"optimizer": {"lr": 1e-4}, "memory_save_steps": 1}
    return write_job(
        folder,
        cluster=cluster,
        model=model,
        max_steps=steps,
        timeout=600,
        **OWN_PROFILES,
        **changes,
    )


@pytest.fixture
def agents(tmp_path) -> Iterator[dict[str, Command]]:
    started: dict[str, Command] = {}
    yield started
    for agent in started.values():
        kill(agent)


def start(host: str, folder: Path, port: int) -> Command:
    is_host = str(host == HOSTS[0]).lower()
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2",
        "--nproc-per-node", "1", "--max-restarts", "10", "--rdzv-backend", "gpumix",
        "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "elastic", "--rdzv-conf",
        f"last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=10,is_host={is_host}",
        "--monitor-interval", "0.2",
        "-m", "gpumix", "train", "job.yaml",
    ]  # fmt: skip
    env = environment(folder) | {"OMP_NUM_THREADS": "1"}
    said = folder / f"said-{host}"
    return begin(command, folder=folder, env=env, said=said, enters=Host(host).enter)


def kill(agent: Command) -> None:
    """As a host goes: with all that it began, which have sessions of their own."""
    processes = [agent.pid]
    for process in processes:
        with suppress(OSError):
            begun = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="ascii")
            processes += map(int, begun.split())
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    agent.wait()


def test_a_host_goes_and_another_one_of_a_new_class_comes(tmp_path, agents):
    alone = job_in(tmp_path / "alone", ("localhost",) * len(HOSTS), sample_s=0.0, steps=MANY_STEPS)
    expected = train(alone).losses
    folder = job_in(tmp_path / "elastic", steps=MANY_STEPS).parent
    run = folder / "run"
    port = free_port()

    def steps() -> int:
        with suppress(OSError, ValueError):
            return len(metrics(run))
        return 0

    def wait_until(done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 200
        while not done():
            texts = {file.name: file.read_text()[-2000:] for file in folder.glob("said-*")}
            ended = {name: agent.poll() for name, agent in agents.items()}
            assert time.monotonic() < deadline and ended["one"] is None, f"{ended}\n{texts}"
            time.sleep(0.1)

    for host in HOSTS[:2]:
        agents[host] = start(host, folder, port)
    # The first may have begun before the second came.
    wait_until(lambda: steps() >= 5 and hosts_in(run) == ["one", "two"])
    together = steps()
    wait_until(lambda: steps() >= together + 3)
    begun = len(metrics(run, "restart"))
    assert classes_of(Profile.load(run / "profile.json")) == {"of-one", "of-two"}
    last = steps()
    kill(agents["two"])
    wait_until(lambda: hosts_in(run) == ["one"])
    before = steps()
    wait_until(lambda: steps() >= before + 5)
    agents["three"] = start("three", folder, port)
    wait_until(lambda: hosts_in(run) == ["one", "three"])
    assert steps() < MANY_STEPS
    (folder / "all-came").touch()
    assert agents["one"].wait(120) == 0, (folder / "said-one").read_text()
    plan = Plan.load(run / "plan.json")
    assert sorted(worker.device_class for worker in plan.workers) == ["of-one", "of-three"]
    assert classes_of(Profile.load(run / "profile.json")) == {"of-one", "of-three"}
    assert [one["step"] for one in metrics(run)] == list(range(1, MANY_STEPS + 1))
    losses = [one["loss"] for one in metrics(run)]
    assert losses == pytest.approx(expected, rel=1e-5)
    gone_on = [one for one in metrics(run, "restart")[begun:] if one["resumed_from"]]
    assert len(gone_on) >= 2
    assert gone_on[0]["kept_in"] == "memory"
    assert gone_on[0]["resumed_from"] >= last - 1
    assert "no longer there: of-two-0 on host two" in gone_on[0]["why"]
    assert "trains on with 1 device, by another plan" in gone_on[0]["decided"]
    assert "1 device joined: of-three-0 on host three" in gone_on[-1]["why"]
    assert "trains on with 2 devices, by another plan" in gone_on[-1]["decided"]


def test_the_rank_that_has_the_store_is_stopped(tmp_path, agents):
    """Alone on its host: nobody there can see it, and the store does not answer any more."""
    folder = job_in(tmp_path / "elastic", once=tmp_path / "stopped").parent
    port = free_port()
    for host in HOSTS[:2]:
        agents[host] = start(host, folder, port)
    assert agents["one"].wait(320) == 0, (folder / "said-one").read_text()
    assert (tmp_path / "stopped").exists()
    said = "".join((folder / f"said-{host}").read_text() for host in HOSTS[:2])
    assert "the process that holds the ranks together is gone" in said
    assert "it has not answered for 20 s" in said
    assert [one["step"] for one in metrics(folder / "run")] == list(range(1, STEPS + 1))


def hosts_in(run: Path) -> list[str]:
    """Those of the plan that a run goes by."""
    return sorted(worker.host for worker in Plan.load(run / "plan.json").workers)


def classes_of(profile: Profile) -> set[str]:
    return {one.device_class for one in profile.classes}
