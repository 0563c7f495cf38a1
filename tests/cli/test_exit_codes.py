"""Every error is one clear message on stderr and an exit code, and JSON for who asks for it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile
from helpers.processes.commands import Done
from helpers.runs.jobs import CLUSTER, FEW_PLANS, gpumix, plan_for, toy, train, write_job
from helpers.runs.verbs import here

# A process without torch is quick to end; with it, it takes seconds.
QUICK_S = 30


def refused(folder: Path, code: int, *arguments: str | Path, run=here, **options) -> Done:
    """Asked in this process; of each code one test starts one, as users do."""
    done = run(*arguments, folder=folder, **options)
    assert done.code == code, done.err
    assert "Traceback" not in done.err
    assert re.search(r"^gpumix: .+", done.err, re.MULTILINE), done.err
    return done


@pytest.fixture
def job(tmp_path):
    return write_job(tmp_path)


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A folder with a job, its profile and its plan."""
    folder = tmp_path_factory.mktemp("planned")
    train(write_job(folder, techniques=FEW_PLANS), "max_steps=1")
    Profile.load(folder / "run" / "profile.json").save(folder / "profile.json")
    Plan.load(folder / "run" / "plan.json").save(folder / "plan.json")
    return folder


# -- 2: bad input ----------------------------------------------------------------------------------


def test_an_unknown_key_is_told_with_its_line(tmp_path):
    job = write_job(tmp_path, global_batsh=8)
    line = next(k for k, text in enumerate(job.read_text().splitlines(), 1) if "batsh" in text)
    done = refused(tmp_path, 2, "train", "job.yaml", run=gpumix)
    assert f"job.yaml:{line}" in done.err
    assert "global_batch" in done.err.replace("global_batsh", "")


def test_an_unknown_key_of_an_argument_is_told_with_the_argument(job):
    done = refused(job.parent, 2, "train", "job.yaml", "--set", "optimizer.lrr=1")
    assert "--set optimizer.lrr=1" in done.err
    assert "lrr" in done.err


def test_a_device_named_twice_is_told(tmp_path):
    twice = [{**CLUSTER[0], "id": "one"}, {**CLUSTER[0], "id": "one"}]
    write_job(tmp_path, cluster=twice)
    done = refused(tmp_path, 2, "train", "job.yaml")
    assert "device id 'one' is given twice" in done.err


@pytest.mark.parametrize("verb", ["train", "profile", "plan", "devices"])
def test_a_job_that_is_not_there_is_told(tmp_path, verb):
    done = refused(tmp_path, 2, verb, "nothing.yaml", "--json")
    assert "nothing.yaml" in done.err
    assert done.json()["exit_code"] == 2
    assert (done.json()["error"], done.json()["code"]) == ("InputError", "file-missing")


def test_a_profile_is_no_plan(planned):
    done = refused(planned, 2, "train", "job.yaml", "--plan", "profile.json")
    assert "a plan of schema 1 is wanted, this is a profile of schema 1" in done.err
    assert "gpumix plan" in done.err


def test_a_plan_for_other_devices_is_told_before_torch_is_needed(planned, tmp_path):
    write_job(tmp_path, cluster=[{**CLUSTER[0], "count": 3}])
    plan = planned / "plan.json"
    done = refused(tmp_path, 2, "train", "job.yaml", "--plan", plan, run=gpumix, timeout_s=QUICK_S)
    assert "the plan was made for other devices" in done.err


def test_a_plan_for_another_batch_is_told(planned):
    done = refused(
        planned, 2, "train", "job.yaml", "--plan", "plan.json", "--set", "global_batch_size=9",
        "--set", "output_dir=other",
    )  # fmt: skip
    assert "the plan is for global_batch_size 8, the job has 9" in done.err


def test_there_must_be_something_to_resume(job):
    done = refused(job.parent, 2, "train", "job.yaml", "--resume", "--json")
    assert "there is no checkpoint to go on from" in done.err
    assert done.json()["fix"] == "start the run without --resume"


def test_a_run_is_not_overwritten(planned):
    done = refused(planned, 2, "train", "job.yaml")
    assert "checkpoints of an earlier run" in done.err


@pytest.mark.parametrize("change", ["sequence_length=4", "precision=bf16"])
def test_a_profile_of_other_work_is_told(planned, change):
    done = refused(planned, 2, "plan", "job.yaml", "--profile", "profile.json", "--set", change)
    assert f"the profile is of {change.split('=')[0]}" in done.err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("cluster=[{class: big, accelerator: cpu, memory: 64 MiB}]", "of another cluster"),
        ("model.arguments={wide: 1}", "of another model than the job's"),
        ("optimizer={name: sgd}", "of bytes of optimizer state an element 8, the job has 0"),
    ],
)
def test_a_profile_of_other_devices_or_optimizer_is_told(planned, change, said):
    done = refused(planned, 2, "plan", "job.yaml", "--profile", "profile.json", "--set", change)
    assert said in done.err


def test_a_strategy_must_be_known_before_anything_is_measured(job):
    done = refused(job.parent, 2, "plan", "job.yaml", "--strategy", "best")
    assert "there is no strategy 'best'" in done.err


def test_an_even_split_needs_a_sample_for_every_device(planned):
    done = refused(
        planned, 2, "plan", "job.yaml", "--profile", "profile.json", "--strategy", "even",
        "--set", "global_batch_size=2",
    )  # fmt: skip
    assert "cannot be split evenly over 3 devices" in done.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--set", "max_steps=3"), "--set replaces keys of a job"),
        (("job.yaml", "--cluster", "cluster.yaml"), "both name devices"),
    ],
)
def test_what_would_have_no_effect_is_told(job, arguments, said):
    done = refused(job.parent, 2, "devices", *arguments)
    assert said in done.err


def test_a_demo_clears_nothing_but_a_former_demo(tmp_path):
    (tmp_path / "mine").mkdir()
    for name in ("demo.yaml", "precious"):
        (tmp_path / "mine" / name).write_text("kept")
    done = refused(tmp_path, 2, "demo", "--output-dir", "mine")
    assert "'precious' is there, which no demo wrote" in done.err
    (tmp_path / "mine" / "precious").rename(tmp_path / "mine" / "plan.json")
    refused(tmp_path, 2, "demo", "--output-dir", "mine", "--set", "nonsense=1")
    assert (tmp_path / "mine" / "plan.json").read_text() == "kept"


@pytest.mark.parametrize(
    ("run", "to", "said"),
    [
        ("no-run", "model", "no checkpoint"),
        ("profiles", "model", "no checkpoint"),
        ("run", "job.yaml", "not overwritten"),
        ("run", "run", "not overwritten"),
    ],
    ids=["no such run", "a run without checkpoint", "to a file", "to the run itself"],
)
def test_an_export_that_cannot_be_is_told(planned, run, to, said):
    done = refused(planned, 2, "export", run, "--to", to, "--json")
    assert said in done.err
    assert done.json()["exit_code"] == 2
    assert done.json()["where"].endswith(run if to == "model" else to)
    assert not (planned / "model").exists()


@pytest.mark.parametrize("resume", [(), ("--resume",)], ids=["afresh", "resumed"])
@pytest.mark.parametrize("name", ["plan", "profile", "run", "trace"])
def test_a_run_of_a_newer_gpumix_is_not_written_over(job, name, resume):
    run = job.parent / "run"
    run.mkdir()
    newer = json.dumps({"kind": name, "schema_version": 99})
    (run / f"{name}.json").write_text(newer)
    done = refused(job.parent, 2, "train", "job.yaml", "--trace-step", "1", *resume)
    assert f"{run / name}.json: a {name} of schema 1 is wanted" in done.err
    assert "why: a newer gpumix wrote it" in done.err
    assert "fix: install that version; or write elsewhere" in done.err
    assert [file.name for file in run.iterdir()] == [f"{name}.json"]
    assert (run / f"{name}.json").read_text() == newer


@pytest.mark.parametrize("arguments", [("train",), ("train", "job.yaml", "--fast"), ("trane",)])
def test_a_wrong_call_is_told(job, arguments):
    done = here(*arguments, folder=job.parent)
    assert done.code == 2
    assert "Traceback" not in done.err
    assert done.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("train", "--json"), "JOB"),
        (("train", "job.yaml", "--fast", "--json"), "--fast"),
        (("plan", "--json", "--global-batch-size", "none"), "--global-batch-size"),
        (("trane", "job.yaml", "--json"), "trane"),
    ],
)
def test_a_wrong_call_is_one_document_for_who_asks_for_it(job, arguments, said):
    done = here(*arguments, folder=job.parent)
    assert done.code == done.json()["exit_code"] == 2
    assert done.json()["error"] == "InputError"
    assert said in done.json()["what"]


@pytest.mark.parametrize(
    "arguments", [("train", "--fast"), ("launch", "--fast", "script.py", "--", "--json")]
)
def test_a_wrong_call_says_nothing_on_stdout_where_nobody_asks(job, arguments):
    assert here(*arguments, folder=job.parent).out == ""


# -- 3: the machine --------------------------------------------------------------------------------


def test_a_place_that_cannot_be_written_is_told(planned):
    done = refused(
        planned, 3, "plan", "job.yaml", "--profile", "profile.json", "--output", "/proc/plan.json"
    )
    assert "/proc" in done.err


@pytest.mark.extended
@pytest.mark.slow
def test_a_missing_package_is_told(tmp_path):
    """One that cannot be imported, although it is there."""
    (tmp_path / "absent" / "transformers").mkdir(parents=True)
    (tmp_path / "absent" / "transformers" / "__init__.py").write_text("raise ImportError('gone')")
    write_job(
        tmp_path,
        model={"config": {"model_type": "gpt2", "n_positions": 8}},
        cluster=CLUSTER[:1],
    )
    env = {"PYTHONPATH": str(tmp_path / "absent")}
    done = refused(tmp_path, 3, "train", "job.yaml", run=gpumix, env=env, fresh=True)
    assert "needs the package transformers" in done.err
    assert 'pip install ".[transformers]"' in done.err


# -- 4: no plan ------------------------------------------------------------------------------------


def test_a_model_that_fits_nowhere_is_told_in_bytes(planned, tmp_path):
    profile = json.loads((planned / "profile.json").read_text())
    for device_class in profile["cluster"]["classes"]:
        device_class["memory_bytes"] = 20_000
    (tmp_path / "small.json").write_text(json.dumps(profile))
    small = [{**row, "memory": 20_000} for row in CLUSTER]
    done = refused(
        planned, 4, "plan", "job.yaml", "--profile", tmp_path / "small.json", "--json",
        "--set", f"cluster={json.dumps(small)}", run=gpumix,
    )  # fmt: skip
    assert re.search(r"short of \d+ bytes", done.err)
    assert done.json()["exit_code"] == 4


# -- 5: training -----------------------------------------------------------------------------------


@pytest.fixture
def broken(tmp_path):
    job = write_job(tmp_path, model=toy(fault="raise", rank=1, at=1), cluster=CLUSTER[1:])
    plan_for(job, samples=(4, 4), shares=(0.5, 0.5)).save(tmp_path / "plan.json")
    return job


@pytest.mark.slow
def test_a_failed_run_is_told_in_few_lines(broken):
    done = refused(
        broken.parent, 5, "train", "job.yaml", "--plan", "plan.json", "--json", run=gpumix
    )
    last = done.err[done.err.index("gpumix: ") :]
    assert "the job's own code failed: ValueError: no such token" in last
    assert "rank 1 (device 'small-1' on localhost)" in last
    assert len(last.splitlines()) < 5
    assert done.json()["error"] == "TrainingError"


@pytest.mark.extended
@pytest.mark.slow
def test_debug_shows_the_way_to_the_error(broken):
    done = here("train", "job.yaml", "--plan", "plan.json", "--debug", folder=broken.parent)
    assert done.code == 5
    assert "Traceback" in done.err
    assert "in _raise" in done.err


def test_the_strategy_of_a_run_must_be_known_before_anything_is_measured(job):
    done = refused(job.parent, 2, "train", "job.yaml", "--strategy", "best")
    assert "strategy" in done.err and "'best'" in done.err


def test_a_plan_and_a_strategy_are_not_both_given(planned):
    done = refused(planned, 2, "train", "job.yaml", "--plan", "plan.json", "--strategy", "even")
    assert "--plan and --strategy" in done.err
