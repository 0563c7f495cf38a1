"""`gpumix simulate`: from a profile, from what was measured of a job, and from an estimate."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from click.testing import Result

from gpumix.cli.planning.profile_source import PlanOptions, get_profile_path
from gpumix.planner.plan import plan as make_plan
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.step_trace import Trace
from gpumix.train.controller import JobController
from helpers.runs.jobs import FEW_PLANS, OWN_PROFILES, plan_for, train, write_job
from helpers.runs.verbs import gpumix, refused

CLUSTER = "2x rtx3090, 2x p40"
ESTIMATE = ("--cluster", CLUSTER, "--model", "3B")
PAIR = [{"class": "one", "accelerator": "cpu", "memory": "64 MiB", "count": 2}]
FEW = Space.model_validate(FEW_PLANS)


def ran(*arguments) -> Result:
    done = gpumix(*arguments)
    assert done.exit_code == 0, done.output
    return done


@pytest.fixture(scope="module")
def estimated(tmp_path_factory):
    """A plan for cards that nobody has."""
    path = tmp_path_factory.mktemp("estimated") / "plan.json"
    asked = PlanOptions(cluster=CLUSTER, model="3B", sequence_length=1024)
    profile = asked.source().profile
    make_plan(profile, 48, strategy="even", space=FEW).save(path)
    profile.save(get_profile_path(path))
    return path


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A folder with a job that was measured, its profile and its plan."""
    folder = tmp_path_factory.mktemp("measured")
    job = write_job(folder, cluster=PAIR, techniques=FEW_PLANS)
    profile = JobController.of_file(job, (), debug=False).profile()
    profile.save(folder / "profile.json")
    make_plan(profile, 8, space=FEW).save(folder / "plan.json")
    return folder


# -- what it says ----------------------------------------------------------------------------------


def test_an_estimate_says_that_it_is_one(estimated):
    done = ran("simulate", estimated, *ESTIMATE)
    assert "an estimate from datasheets" in done.stdout
    assert "sequence length 1024, global batch 48" in done.stdout
    for shown in ("simulated: ", "critical path", "backward", "busy, and idle by what", "p40"):
        assert shown in done.stdout
    assert done.stderr == ""


def test_the_step_is_drawn(measured, tmp_path):
    pytest.importorskip("matplotlib")
    drawn = tmp_path / "pictures" / "step.png"
    ran("simulate", measured / "plan.json", "--picture", drawn)
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_a_picture_needs_matplotlib(measured, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    told = refused("simulate", measured / "plan.json", "--picture", tmp_path / "s.png", code=3)
    assert "matplotlib" in told and '".[pictures]"' in told


def test_json_has_the_step_what_binds_it_and_how_each_device_spends_it(estimated):
    found = json.loads(ran("simulate", estimated, *ESTIMATE, "--json").stdout)
    step_s = found["step_s"]
    assert found["predicted_s"] == pytest.approx(step_s, rel=0.02)
    assert found["emulated"] is False
    assert set(found["estimated"]) == {"rtx3090", "p40"}
    assert sum(part["seconds"] for part in found["critical_path"]) == pytest.approx(step_s)
    assert found["critical_events"][-1]["end_s"] == step_s
    assert sorted(d for lane in found["lanes"] for d in lane["devices"]) == sorted(
        ["rtx3090-0", "rtx3090-1", "p40-0", "p40-1"]
    )
    assert sum(lane["samples"] * len(lane["devices"]) for lane in found["lanes"]) == 48
    for lane in found["lanes"]:
        assert lane["busy_s"] + sum(lane["idle_s"].values()) == pytest.approx(step_s)


def test_the_trace_is_written(estimated, tmp_path):
    path = tmp_path / "traces" / "simulated.json"
    found = json.loads(ran("simulate", estimated, *ESTIMATE, "--json", "--trace", path).stdout)
    events = Trace.load(path).traceEvents
    assert sum(e.name == "process_name" for e in events) == 4
    ends = max(e.ts + e.dur for e in events if e.ph == "X")
    assert ends == pytest.approx(1e6 * found["step_s"], abs=1)


def test_a_job_that_was_measured_says_what_its_profile_says(measured):
    plan = measured / "plan.json"
    by_job = ran("simulate", plan, "--job", measured / "job.yaml", "--json")
    by_profile = ran("simulate", plan, "--profile", measured / "profile.json", "--json")
    assert json.loads(by_job.stdout) == json.loads(by_profile.stdout)
    assert json.loads(by_job.stdout)["estimated"] == []


def test_a_run_can_be_laid_beside_its_simulation(tmp_path):
    """As the command line page says: the run's folder has all that it takes."""
    train(write_job(tmp_path, cluster=PAIR, max_steps=2, trace_step=2, techniques=FEW_PLANS))
    run_folder, beside = tmp_path / "run", tmp_path / "simulated.json"
    ran("simulate", run_folder / "plan.json", "--profile", run_folder / "profile.json",
        "--trace", beside)  # fmt: skip
    measured, simulated = (
        [(e.name, e.pid, e.tid) for e in Trace.load(path).traceEvents
         if e.ph == "M" or e.cat != "waiting"]
        for path in (run_folder / "trace.json", beside)
    )  # fmt: skip
    assert measured == simulated


# -- what it refuses -------------------------------------------------------------------------------


def test_a_plan_of_another_model_is_told(estimated):
    err = refused("simulate", estimated, "--cluster", CLUSTER, "--model", "1B")
    assert (
        "the plan's model is estimate:Llama-shaped 3B, the profile's is estimate:Llama-shaped 1B"
        in err
    )
    assert "plan again" in err


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ("2x rtx3090", "--cluster: the plan has devices of class p40, which are not there"),
        ("2x rtx3090, 1x p40", "the plan's device 'p40-1' (p40) is not in the profile's cluster"),
    ],
)
def test_a_plan_of_another_cluster_is_told(estimated, cluster, said):
    assert said in refused("simulate", estimated, "--cluster", cluster, "--model", "3B")


def test_a_plan_of_another_job_is_told(estimated, measured):
    err = refused("simulate", estimated, "--profile", measured / "profile.json")
    assert "the plan's model is estimate:Llama-shaped 3B, the profile's is " in err


def test_without_options_times_come_from_what_lies_beside_the_plan(estimated, measured):
    """`gpumix plan --output` writes it, and so does a run."""
    beside = json.loads(ran("simulate", estimated, "--json").stdout)
    assert beside == json.loads(ran("simulate", estimated, *ESTIMATE, "--json").stdout)
    of_run = json.loads(ran("simulate", measured / "plan.json", "--json").stdout)
    profile = ("--profile", measured / "profile.json")
    assert of_run == json.loads(ran("simulate", measured / "plan.json", *profile, "--json").stdout)


def test_times_must_come_from_somewhere(estimated, tmp_path):
    alone = shutil.copy(estimated, tmp_path)
    err = refused("simulate", alone)
    assert "a plan has no speeds of its devices" in err
    assert "--profile PROFILE.json, --job JOB.yaml, or --cluster and --model" in err


@pytest.mark.parametrize(
    "option",
    [("--job", "job.yaml"), ("--cluster", "p40"), ("--network", "25GbE"), ("--model", "1B"),
     ("--set", "max_steps=3")],
    ids=lambda option: option[0],
)  # fmt: skip
def test_times_must_not_come_from_two_places(measured, option):
    plan, profile = measured / "plan.json", measured / "profile.json"
    err = refused("simulate", plan, "--profile", profile, *option)
    assert f"{option[0]} has no effect together with --profile" in err


def test_a_job_that_was_not_measured_is_told_and_not_measured(tmp_path):
    job = write_job(tmp_path, cluster=PAIR, **OWN_PROFILES)
    plan_for(job, (4, 4), (0.5, 0.5)).save(tmp_path / "plan.json")
    err = refused("simulate", tmp_path / "plan.json", "--job", job)
    assert "this job was not measured" in err
    assert f"gpumix profile {job}" in err
    assert not (tmp_path / "profiles").exists()


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("nothing.json", "cannot read the plan"),
        ("job.yaml", "this is YAML, not a plan"),
        ("profile.json", "a plan of schema 1 is wanted, this is a profile of schema 1"),
    ],
)
def test_what_is_no_plan_is_told(measured, plan, said):
    err = refused("simulate", measured / plan, "--job", measured / "job.yaml")
    assert plan in err
    assert said in err


def test_what_is_no_profile_is_told(measured):
    err = refused("simulate", measured / "plan.json", "--profile", measured / "plan.json")
    assert "a profile of schema 1 is wanted, this is a plan of schema 1" in err


def test_a_trace_does_not_replace_other_files(measured):
    plan = measured / "plan.json"
    before = plan.read_text()
    err = refused("simulate", plan, "--job", measured / "job.yaml", "--trace", plan)
    assert "is not overwritten" in err
    assert plan.read_text() == before


def test_errors_are_json_for_who_asks_for_it(estimated, tmp_path):
    done = gpumix("simulate", shutil.copy(estimated, tmp_path), "--json")
    assert done.exit_code == 2
    assert json.loads(done.stdout)["error"] == "InputError"
