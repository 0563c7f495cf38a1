"""SIGTERM ends a verb as Ctrl-C does, whatever it is at: one line, and one document."""

from __future__ import annotations

import json
import os
import signal

import pytest

from gpumix.train.controller import JobController
from helpers.runs.jobs import write_job
from helpers.runs.verbs import here, measured


@pytest.fixture(autouse=True)
def unheard():
    """What nobody takes fails the test, and does not end its process."""

    def fail(number, frame):
        raise AssertionError("SIGTERM was not taken")

    before = signal.signal(signal.SIGTERM, fail)
    # Who started the tests in the background has them ignore Ctrl-C.
    interrupts = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, interrupts)
    assert signal.signal(signal.SIGTERM, before) is fail


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("verb", "at"), [("train", "profile"), ("train", "plan"), ("profile", "profile")]
)
def test_it_is_one_line_and_one_document(tmp_path, monkeypatch, verb, at, number):
    def ended(*arguments, **options):
        os.kill(os.getpid(), number)
        raise AssertionError("it goes on")

    write_job(tmp_path)
    if at == "plan":
        monkeypatch.setattr(JobController, "profile", lambda self, **asked: measured())
    monkeypatch.setattr(JobController, at, ended)
    done = here(verb, "job.yaml", "--json", folder=tmp_path)
    assert done.code == 130
    assert [one for one in done.err.splitlines() if one.startswith("gpumix: ")] == [
        "gpumix: ended at once, without saving anything more"
    ]
    assert json.loads(done.out)["exit_code"] == 130
    assert "Traceback" not in done.err
