"""`gpumix check` as a user calls it: lines, JSON, exit codes, and under torchrun."""

from __future__ import annotations

import json
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers.runs import jobs
from helpers.runs.jobs import EMULATED, write_job
from helpers.runs.verbs import gpumix, refused

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SEVERITIES = ["error", "warning", "note", "ok"]
KEYS = {"check", "severity", "what", "fix", "host", "device", "measured"}


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def fine(document: str) -> dict[str, dict]:
    """What is fine, by check; nothing else was found."""
    told = json.loads(document)
    assert all(set(one) == KEYS for one in told)
    assert {one["severity"] for one in told} == {"ok"}
    return {one["check"]: one for one in told}


def test_a_cluster_that_is_fit(tmp_path):
    done = gpumix("check", write_job(tmp_path, cluster=EMULATED), "--json")
    assert done.exit_code == 0, done.stderr
    found = fine(done.stdout)
    assert found["ranks"]["what"] == ("1 x fast, 2 x slow answer, emulated on this machine")
    named = found["links"]["measured"]
    pairs = {name.partition(" bytes")[0] for name in named if "bytes" in name}
    assert pairs == {"ranks 0 and 1", "ranks 0 and 2", "ranks 1 and 2"}
    assert not (tmp_path / "run").exists()


def test_errors_leave_with_3_and_each_has_a_line_with_its_fix(tmp_path):
    write_job(tmp_path, cluster=EMULATED, output_dir="file/run")
    (tmp_path / "file").touch()
    done = jobs.gpumix("check", "job.yaml", folder=tmp_path)
    assert done.code == 3
    lines = [line for line in done.out.splitlines() if line.startswith(tuple(SEVERITIES))]
    assert lines[0].startswith("error   disk: ")
    assert "Not a directory; fix: let this user write there" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == ["ok"] * (len(lines) - 1)


def test_without_a_job_it_tests_what_is_found():
    done = gpumix("check", "--json")
    assert done.exit_code == 0, done.stderr
    assert fine(done.stdout)["ranks"]["what"] == "1 x cpu on 1 host answer"


def test_bad_input_is_told_as_by_every_verb(tmp_path):
    job = tmp_path / "job.yaml"
    for verb in ("check", "train"):
        assert f"gpumix: {job}: there is no such job file" in refused(verb, job)
    assert "no job is given" in refused("check", "--set", "max_steps=3")
    elsewhere = [{"class": "one", "accelerator": "cpu", "memory": "1 GiB", "host": "elsewhere"}]
    assert "-m gpumix" in refused("check", write_job(tmp_path, cluster=elsewhere))


@pytest.mark.slow
def test_under_torchrun_the_first_rank_speaks_for_all(tmp_path):
    hosts = [{**EMULATED[0], "host": "a"}, {**EMULATED[1], "host": "b"}]
    write_job(tmp_path, cluster=hosts)
    check = ["-m", "gpumix", "check", "job.yaml", "--json"]
    words = [*TORCHRUN, "--standalone", "--nproc-per-node", "3", *check]
    done = jobs.run(words, tmp_path, {"OMP_NUM_THREADS": "1"}, 120)
    assert done.code == 0, done.err
    found = fine(done.out)
    assert found["ranks"]["what"] == (
        "1 x fast, 2 x slow answer, emulated on this machine, as if on 2 hosts"
    )
    assert "2 pairs inside this machine" in found["links"]["what"]


@pytest.mark.extended
@pytest.mark.slow
def test_all_hosts_of_torchrun_leave_at_once_where_one_is_unfit(tmp_path):
    """Where one leaves well and another does not, torchrun waits for five minutes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    meeting = ["--rdzv-backend", "gpumix", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    agent = [*TORCHRUN, "--nnodes", "2", *meeting, "--local-addr", "127.0.0.1"]

    def host(processes: int):
        words = [*agent, "--nproc-per-node", str(processes), "-m", "gpumix", "check", "--json"]
        return jobs.run(words, tmp_path, {"OMP_NUM_THREADS": "1"}, 120)

    with ThreadPoolExecutor(2) as hosts:
        found = list(hosts.map(host, (1, 1)))
    assert [done.code for done in found] == [1, 1]
    assert all("exitcode  : 3" in done.err for done in found)
    (spoken,) = [done for done in found if done.out]
    worst = spoken.json()[0]
    assert (worst["check"], worst["severity"]) == ("ranks", "error")
    assert "has the device of rank" in worst["what"]
