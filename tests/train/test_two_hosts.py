"""Runs on two hosts whose link is cut, throttled or late: they go on, or stop and name who is
gone."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from jobs import environment, metrics, plan_for, train, write_job
from two_hosts import ADDRESSES, HOSTS, NotAllowed, Wire, end, wire

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

STEPS = 40
TIMEOUT_S = 15
PORT = "29511"


@pytest.fixture
def joined() -> Iterator[Wire]:
    try:
        with wire() as made:
            yield made
    except NotAllowed as error:
        pytest.skip(f"no hosts of one's own here: {error}")


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[float]:
    """Losses of the same on one host."""
    job = _job(tmp_path_factory.mktemp("one_host"), ("localhost",) * 2)
    return train(job, plan=plan_for(job, (4, 4), (0.5, 0.5))).losses


def _job(folder: Path, hosts: Sequence[str] = HOSTS) -> Path:
    cluster = [
        {"class": f"of-{name}", "accelerator": "cpu", "memory": "64 MiB", "host": host}
        for name, host in zip(HOSTS, hosts)
    ]
    model = {"factory": "toys:model", "arguments": {"sample_s": 0.02, "rank": 0}}
    return write_job(folder, cluster=cluster, steps=STEPS, timeout=TIMEOUT_S, model=model)


class Run:
    """A job under torchrun on both hosts."""

    def __init__(self, folder: Path, joined: Wire) -> None:
        self.folder = folder
        plan = plan_for(_job(folder), (4, 4), (0.5, 0.5))
        (folder / "plan.json").write_text(plan.model_dump_json(), encoding="utf-8")
        env = environment(folder / "cache") | {"OMP_NUM_THREADS": "1"}
        del env["GLOO_SOCKET_IFNAME"]
        self.processes = [
            joined.start(host, self._command(number), folder, env, self.said(host))
            for number, host in enumerate(HOSTS)
        ]

    def _command(self, number: int) -> list[str]:
        meeting = ["--master-addr", ADDRESSES[HOSTS[0]], "--master-port", PORT]
        return [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2",
            "--nproc-per-node", "1", "--node-rank", str(number), *meeting,
            "-m", "gpumix", "train", "job.yaml", "--plan", "plan.json",
        ]  # fmt: skip

    def said(self, host: str) -> Path:
        return self.folder / f"said-{host}"

    def steps(self) -> int:
        with suppress(OSError, ValueError):
            return len(metrics(self.folder / "run"))
        return 0

    def wait_for_steps(self, number: int) -> None:
        self.wait_until(lambda: self.steps() >= number)

    def wait_until(self, done: Callable[[], bool], seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, self.all_said()
            time.sleep(0.1)

    def codes(self, seconds: float) -> list[int]:
        deadline = time.monotonic() + seconds
        try:
            return [one.wait(deadline - time.monotonic()) for one in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it hung:\n{self.all_said()}") from None

    def all_said(self) -> str:
        return "\n".join(self.said(host).read_text() for host in HOSTS)


@pytest.fixture
def run(tmp_path, joined) -> Iterator[Run]:
    started = Run(tmp_path, joined)
    try:
        yield started
    finally:
        for process in started.processes:
            end(process)


def check_finished(run: Run, expected: list[float]) -> None:
    assert run.codes(120) == [0, 0], run.all_said()
    assert [one["loss"] for one in metrics(run.folder / "run")] == pytest.approx(expected, rel=1e-6)


def test_a_link_that_is_cut_for_five_seconds_is_waited_for(run, joined, expected):
    run.wait_for_steps(3)
    joined.cut()
    time.sleep(5)
    before = run.steps()
    joined.mend()
    assert before < STEPS
    check_finished(run, expected)


def test_a_link_that_is_cut_for_good_stops_both_and_each_names_the_other(run, joined):
    """What torchrun's own agents do then is theirs: one waits for minutes for the other."""
    run.wait_for_steps(3)
    joined.cut()
    run.wait_until(lambda: all("gpumix: " in run.said(host).read_text() for host in HOSTS))
    for number, host in enumerate(HOSTS):
        other = 1 - number
        told = run.said(host).read_text().split("gpumix: ", 1)[1].split("torch/distributed", 1)[0]
        assert told.startswith(f"rank {number} (device 'of-{host}-0' on {host}): ")
        assert f"rank {other} (device 'of-{HOSTS[other]}-0' on {HOSTS[other]})" in told, told
        assert "--resume" in told
        assert "Traceback" not in told


def test_a_slow_link_slows_it_down(run, joined, expected):
    run.wait_for_steps(3)
    joined.throttle(2e6)
    check_finished(run, expected)


def test_a_late_link_slows_it_down(run, joined, expected):
    run.wait_for_steps(3)
    joined.delay(0.02)
    check_finished(run, expected)
