"""Runs on two hosts whose link is cut, throttled or late: they go on, or stop and name who is
gone."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from gpumix.schema.plan.plan import Plan
from helpers.processes.two_hosts import ADDRESSES, HOSTS, NotAllowed, Wire, end, wire
from helpers.processes.waiting import wait_until
from helpers.runs.jobs import environment, metrics, plan_for, train, write_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

STEPS = 40
WIDTH = 128  # so that what they send each other is much of a link's traffic
TIMEOUT_S = 15
SHORT_S = 10  # of the test in which it is waited for
CUT_OFF_S = 600  # of the test of who is found long before
PORT = "29511"


@contextmanager
def skipped_without(what: str) -> Iterator[None]:
    try:
        yield
    except NotAllowed as error:
        pytest.skip(f"no {what} here: {error}")


@pytest.fixture
def joined() -> Iterator[Wire]:
    with skipped_without("hosts of one's own"), wire() as made:
        yield made


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[float]:
    """Losses of the same on one host."""
    job = _job(tmp_path_factory.mktemp("one_host"), ("localhost",) * 2)
    return train(job, plan=plan_for(job, (4, 4), (0.5, 0.5))).losses


def _job(folder: Path, hosts: Sequence[str] = HOSTS, timeout_s: float = TIMEOUT_S) -> Path:
    cluster = [
        {"class": f"of-{name}", "accelerator": "cpu", "memory": "64 MiB", "host": host}
        for name, host in zip(HOSTS, hosts)
    ]
    model = {"factory": "toys:model", "arguments": {"sample_s": 0.02, "rank": 0, "width": WIDTH}}
    # So slow that losses stay away from zero, where sums of another order show.
    usual = {"optimizer": {"lr": 1e-4}, "max_steps": STEPS}
    return write_job(folder, cluster=cluster, timeout=timeout_s, model=model, **usual)


class Run:
    """A job under torchrun on both hosts.

    Args:
        meeting: how its agents meet; default: by torchrun's own way for two hosts that both stay.
    """

    def __init__(
        self,
        folder: Path,
        joined: Wire,
        meeting: Sequence[str] = (),
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.folder = folder
        self._meeting = meeting
        job = _job(folder, timeout_s=timeout_s)
        plan = plan_for(job, (4, 4), (0.5, 0.5))
        (folder / "plan.json").write_text(plan.model_dump_json(), encoding="utf-8")
        env = environment(folder / "cache") | {"OMP_NUM_THREADS": "1"}
        del env["GLOO_SOCKET_IFNAME"]
        self.processes = [
            joined.start(host, self._command(number), folder, env, self.said(host))
            for number, host in enumerate(HOSTS)
        ]

    def _command(self, number: int) -> list[str]:
        where = ["--master-addr", ADDRESSES[HOSTS[0]], "--master-port", PORT]
        meeting = self._meeting or ["--nnodes", "2", "--node-rank", str(number), *where]
        return [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", *meeting,
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

    def wait_until(self, done: Callable[[], bool]) -> None:
        wait_until(done, 90, told=self.all_said)

    def codes(self, seconds: float) -> list[int]:
        deadline = time.monotonic() + seconds
        try:
            return [one.wait(deadline - time.monotonic()) for one in self.processes]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it hung:\n{self.all_said()}") from None

    def all_said(self) -> str:
        return "\n".join(self.said(host).read_text() for host in HOSTS)


@pytest.fixture
def timeout_s() -> float:
    return TIMEOUT_S


@pytest.fixture
def run(tmp_path, joined, timeout_s) -> Iterator[Run]:
    started = Run(tmp_path, joined, timeout_s=timeout_s)
    try:
        yield started
    finally:
        for process in started.processes:
            end(process)


def check_finished(run: Run, expected: list[float]) -> None:
    assert run.codes(120) == [0, 0], run.all_said()
    assert [one["loss"] for one in metrics(run.folder / "run")] == pytest.approx(expected, rel=1e-6)


@pytest.mark.extended
def test_a_link_that_is_cut_for_five_seconds_is_waited_for(run, joined, expected):
    run.wait_for_steps(3)
    joined.cut()
    time.sleep(5)
    before = run.steps()
    joined.mend()
    assert before < STEPS
    check_finished(run, expected)


@pytest.mark.parametrize("timeout_s", [SHORT_S])
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


ELASTIC = [
    "--nnodes", "1:2", "--max-restarts", "10", "--rdzv-backend", "gpumix", "--rdzv-id", "two-hosts",
    "--rdzv-endpoint", f"{ADDRESSES[HOSTS[0]]}:{PORT}",
    "--rdzv-conf", "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=6",
    "--monitor-interval", "0.2",
]  # fmt: skip


@pytest.mark.extended
def test_after_a_link_is_cut_for_good_the_host_of_the_endpoint_goes_on(tmp_path, joined, expected):
    """Long before its collectives' timeout; the other host names it, and leaves."""
    run = Run(tmp_path, joined, ELASTIC, timeout_s=CUT_OFF_S)
    try:
        run.wait_for_steps(3)
        joined.cut()
        assert run.processes[0].wait(150) == 0, run.all_said()
        run.wait_until(lambda: "gpumix: " in run.said(HOSTS[1]).read_text())
    finally:
        for process in run.processes:
            end(process)
    told, left = (run.said(host).read_text() for host in HOSTS)
    assert f"rank 1 (device 'of-{HOSTS[1]}-0' on {HOSTS[1]}) stopped answering" in told
    assert f"host {HOSTS[1]} ({ADDRESSES[HOSTS[1]]}) does not answer" in told
    assert HOSTS[0] in left or "the process that holds the ranks together is gone" in left
    done = metrics(tmp_path / "run")
    assert [one["step"] for one in done] == list(range(1, STEPS + 1))
    assert [one["loss"] for one in done] == pytest.approx(expected, rel=1e-6)
    plan = Plan.load(tmp_path / "run" / "plan.json")
    assert [worker.host for worker in plan.workers] == [HOSTS[0]]


@pytest.mark.extended
def test_a_link_that_is_throttled_to_a_tenth_of_what_it_carries_is_waited_for(
    run, joined, expected
):
    run.wait_for_steps(3)
    before = joined.bits_per_s(1.0)
    assert run.steps() < STEPS
    with skipped_without("links that are throttled"):
        joined.throttle(before / 10)
    slow = run.steps()
    assert joined.bits_per_s(3.0) < before / 5
    run.wait_for_steps(slow + 2)  # one may have been nearly done
    assert run.steps() < STEPS
    joined.free()
    check_finished(run, expected)


@pytest.mark.extended
def test_a_late_link_is_waited_for(run, joined, expected):
    run.wait_for_steps(3)
    with skipped_without("links that are late"):
        joined.delay(0.02)
    assert joined.round_trip_s() >= 2 * 0.02
    assert run.steps() < STEPS
    check_finished(run, expected)
