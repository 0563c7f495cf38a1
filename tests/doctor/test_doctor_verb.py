"""`gpumix doctor`, as a user calls it."""

from __future__ import annotations

import os
import signal
import tempfile
from typing import Any

import pytest
import typer

from gpumix.cli.common import make_command
from gpumix.cli.verbs.doctor import doctor
from gpumix.doctor.examine import Patient
from gpumix.doctor.report import Report, Slowdown, Suspect
from gpumix.doctor.verdict import Gain
from gpumix.schema.reading.read import read_job
from helpers.runs.jobs import gpumix, write_job


@pytest.mark.slow
def test_a_fault_is_found_measured_and_mended(tmp_path):
    """Samples over a network, and one thread that waits for one after the other."""
    data = {"factory": "toys:remote_tokens", "validation_split": 0.1, "num_workers": 0}
    one = [{"class": "big", "accelerator": "cpu", "memory": "64 MiB"}]
    job = write_job(tmp_path, data=data, cluster=one, precision="fp32")
    options = ("--json", "--apply", "--pairs", "3", "--steps", "6", "--only", "workers")
    done = gpumix("doctor", job.name, *options, folder=tmp_path, timeout_s=200)
    assert done.code == 0, done.err
    found = done.json()
    (finding,) = found["findings"]
    assert finding["name"] == "workers" and finding["changes"] == {"data.num_workers": "auto"}
    assert 1.1 < finding["gain_low"] <= finding["gain"] <= finding["gain_high"]
    assert finding["gain"] > 1.5
    assert found["gain"] == finding["gain"] and 0.1 < found["input_share"] < 1.0
    tuned = read_job(tmp_path / "job.tuned.yaml")
    assert tuned.data.num_workers == "auto" and tuned.max_steps == read_job(job).max_steps
    assert not (tmp_path / "run").exists()  # nothing was written where the job would write


def report_of(findings: tuple[Slowdown, ...], **given: Any) -> Report:
    measured = {"step_s": 1.0, "input_share": 0.0, "seconds": 1.0, "trained_s": 1.0} | given
    return Report(findings, (), (), (), remarks=(), operations=None, **measured)


def test_what_is_left_to_the_user_is_told_and_not_written(tmp_path, monkeypatch, capsys):
    """One finding that changes what is trained, and one that gives something up."""
    gain = Gain(1.5, 1.4, 1.6, pairs=5)
    order = Suspect("padding", "", "", {"data.bucketing": True}, "", "another order", True)
    rarer = Suspect("checkpoints", "", "", {"save_steps": 50}, "", "older ones")
    findings = (Slowdown(order, gain), Slowdown(rarer, gain))
    report = report_of(findings, input_share=0.125)
    monkeypatch.setattr("gpumix.doctor.examine.examine", lambda *args, **kwargs: report)
    job = write_job(tmp_path)
    doctor(str(job), apply=True)
    tuned = tmp_path / "job.tuned.yaml"
    assert read_job(tuned) == read_job(job, ["save_steps=50"])
    assert "# `save_steps: 50` (older ones)\n" in tuned.read_text()
    told = " ".join(capsys.readouterr().out.split())
    assert "12% of a step was spent waiting for data" in told
    assert "left to you: `data.bucketing: true`" in told


def test_a_tuned_file_says_what_it_was_measured_with(tmp_path, monkeypatch, capsys):
    rarer = Suspect("checkpoints", "", "", {"save_steps": 50}, "", "older ones")
    findings = (Slowdown(rarer, Gain(1.5, 1.4, 1.6, pairs=5)),)
    report = report_of(findings, input_share=0.0)
    monkeypatch.setattr("gpumix.doctor.examine.examine", lambda *args, **kwargs: report)
    job = write_job(tmp_path)
    mended = "save_steps=1"  # by what was found
    doctor(str(job), apply=True, overrides=["max_steps=3", mended, "model.config={tie: [1, 2]}"])
    tuned = tmp_path / "job.tuned.yaml"
    assert read_job(tuned) == read_job(job, ["save_steps=50"])
    given = "--set max_steps=3 --set 'model.config={tie: [1, 2]}'"
    assert f"# measured with {given}, which is not written here\n" in tuned.read_text()
    told = " ".join(capsys.readouterr().out.split())
    assert f"what --set gave is not in it: gpumix train {tuned} {given}" in told


def test_a_job_that_does_not_run_says_why(tmp_path):
    job = write_job(tmp_path, data={"factory": "toys:nowhere"})
    done = gpumix("doctor", job.name, folder=tmp_path)
    assert done.code == 2 and "nowhere" in done.err and "Traceback" not in done.err


def test_of_a_script_a_function_is_wanted(tmp_path):
    done = gpumix("doctor", "train.py", folder=tmp_path)
    assert done.code == 2 and "gpumix doctor train:main" in done.err


@pytest.mark.parametrize("target", ["job.yaml", "toys:model"])
def test_an_unknown_suspect_is_an_error_that_lists_them(tmp_path, target):
    write_job(tmp_path)
    done = gpumix("doctor", target, "--only", "nonsense", folder=tmp_path)
    assert done.code == 2 and "--only: there is no suspect 'nonsense'" in done.err
    assert "workers, " in done.err


def test_what_ends_it_leaves_nothing_behind(tmp_path, monkeypatch):
    """As a scheduler does, in the middle of an examination."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    before = signal.getsignal(signal.SIGTERM)

    def ended(patient: Patient, **given: Any) -> Report:
        assert list((tmp_path / "temporary").iterdir())
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("it goes on")

    monkeypatch.setattr("gpumix.doctor.examine.examine", ended)
    with pytest.raises(typer.Exit) as caught:
        make_command(doctor)(str(write_job(tmp_path)), overrides=[], allowed=[], only=[])
    assert caught.value.exit_code == 130
    assert not list((tmp_path / "temporary").iterdir())
    assert signal.getsignal(signal.SIGTERM) == before
