"""A run of a script can be done again by what its report says: `tests/examples` does it."""

from __future__ import annotations

import shlex
from pathlib import Path

from gpumix.report.facts import RunFacts
from gpumix.report.parts.reproduce import _make_launcher_command
from gpumix.report.run import read_run
from gpumix.train.run_manifest import RunRecord, Script
from helpers.runs.folders import planned, read, run_of


def script(*words: str, **fields: object) -> Script:
    known = {"processes": 3, "launcher": "gpumix launch", "cluster": None, "plans": "Trainer"}
    return Script.model_validate({"words": list(words), **known, **fields})


def shown_of(folder: Path, recorded: Script) -> str:
    """The page of a run of a script."""
    run = run_of(folder, state="finished")
    RunRecord._now(folder, script=recorded).save(run.folder / "run.json")
    return read(read_run(run.folder)).text


def started(folder: Path, **fields: object) -> str:
    return shlex.join(_make_launcher_command(RunFacts(run_of(folder)), script("a.py", **fields)))


def test_who_started_it_starts_it_again(tmp_path):
    assert started(tmp_path) == "gpumix launch --processes 3"
    assert started(tmp_path, cluster="/c.yaml") == "gpumix launch --cluster /c.yaml"
    assert started(tmp_path, launcher="torchrun") == "torchrun --nproc-per-node 3"
    with_cluster = started(tmp_path, launcher="torchrun", cluster="/c.yaml")
    assert with_cluster == "env GPUMIX_CLUSTER=/c.yaml torchrun --nproc-per-node 3"
    assert started(tmp_path, launcher=None, processes=1) == "python"


def test_several_hosts_are_named(tmp_path):
    plan = planned()
    (stage,) = plan.stages
    workers = [
        one.model_copy(update={"host": f"h{number // 2}"})
        for number, one in enumerate(stage.workers)
    ]
    stages = [stage.model_copy(update={"workers": tuple(workers)})]
    facts = RunFacts(run_of(tmp_path, plan=plan.model_copy(update={"stages": tuple(stages)})))
    assert _make_launcher_command(facts, script("a.py")) == [
        "gpumix",
        "launch",
        "--hosts",
        "h0:2,h1:1",
    ]


def test_the_page_says_how_and_where(tmp_path):
    shown = shown_of(tmp_path, script("my script.py", "--hub_token", "..."))
    assert "gpumix launch --processes 3 'my script.py' --hub_token ..." in shown
    assert f"Start it in {tmp_path}." in shown
    assert "values that look secret are not stored" in shown
    assert f"Trainer(..., plan='{tmp_path / 'plan.json'}')" in shown
    assert "job.yaml" not in shown


def test_what_was_no_script_is_called_again(tmp_path):
    shown = shown_of(tmp_path, script(launcher="Ray"))
    assert (
        "called by Ray" in shown
        and "gpumix launch" not in shown.partition("Plan, model and versions")[0]
    )
