"""`gpumix check` as a user calls it: lines, JSON, exit codes, and under torchrun."""

from __future__ import annotations

import json
import sys

import pytest
from jobs import EMULATED, gpumix, run, write_job

SEVERITIES = ["error", "warning", "note", "ok"]
KEYS = {"check", "severity", "what", "fix", "host", "device", "measured"}


def findings(done) -> dict[str, list[dict]]:
    """By severity; each is worse than those after it."""
    told = done.json()
    assert all(set(one) == KEYS for one in told)
    order = [SEVERITIES.index(one["severity"]) for one in told]
    assert order == sorted(order)
    assert all(one["fix"] for one in told if one["severity"] != "ok")
    return {s: [one for one in told if one["severity"] == s] for s in SEVERITIES}


def test_a_cluster_that_is_fit(tmp_path):
    write_job(tmp_path, cluster=EMULATED)
    done = gpumix("check", "job.yaml", "--json", folder=tmp_path)
    assert done.code == 0, done.err
    fine = {one["check"]: one for one in findings(done)["ok"]}
    assert fine["ranks"]["what"] == "1 x fast, 2 x slow on 1 host answer"
    pairs = {name.partition(" bytes")[0] for name in fine["links"]["measured"] if "bytes" in name}
    assert pairs == {"ranks 0 and 1", "ranks 0 and 2", "ranks 1 and 2"}
    assert not (tmp_path / "run").exists()


def test_errors_leave_with_3_and_each_has_a_line_with_its_fix(tmp_path):
    write_job(tmp_path, cluster=EMULATED, output="file/run")
    (tmp_path / "file").touch()
    done = gpumix("check", "job.yaml", folder=tmp_path)
    assert done.code == 3
    assert done.out == ""
    lines = [line for line in done.err.splitlines() if line.startswith(tuple(SEVERITIES))]
    assert lines[0].startswith("error   disk: ")
    assert "Not a directory; fix: let this user write there" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == ["ok"] * (len(lines) - 1)
    told = gpumix("check", "job.yaml", "--json", folder=tmp_path)
    assert told.code == 3 and [one["check"] for one in findings(told)["error"]] == ["disk"]


def test_without_a_job_it_tests_what_is_found(tmp_path):
    done = gpumix("check", "--json", folder=tmp_path)
    assert done.code == 0, done.err
    assert [one["what"] for one in findings(done)["ok"] if one["check"] == "ranks"] == [
        "1 x cpu on 1 host answer"
    ]


def test_bad_input_is_told_as_by_every_verb(tmp_path):
    done = gpumix("check", "job.yaml", "--json", folder=tmp_path)
    assert done.code == 2 and done.json()["error"] == "InputError"
    assert gpumix("check", "--set", "steps=3", folder=tmp_path).code == 2


@pytest.mark.slow
def test_under_torchrun_the_first_rank_speaks_for_all(tmp_path):
    hosts = [{**EMULATED[0], "host": "a"}, {**EMULATED[1], "host": "b"}]
    write_job(tmp_path, cluster=hosts)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    check = ["-m", "gpumix", "check", "job.yaml", "--json"]
    done = run([*torchrun, "3", *check], tmp_path, {"OMP_NUM_THREADS": "1"}, 120)
    assert done.code == 0, done.err
    fine = {one["check"]: one["what"] for one in findings(done)["ok"]}
    assert fine["ranks"] == "1 x fast, 2 x slow on 2 hosts answer"
    assert fine["links"].count("1 pair ") == 2  # one between hosts, one inside
    # A process too many: the first one says so, and torchrun's own report follows.
    done = run([*torchrun, "2", "-m", "gpumix", "check", "--json"], tmp_path, {}, 120)
    (error,) = json.loads(done.out)[:1]
    assert error["check"] == "ranks" and "no device of its own" in error["what"]
    assert done.code == 1 and "exitcode  : 3" in done.err
