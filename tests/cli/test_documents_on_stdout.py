"""With `--json` a verb prints one document on stdout and talks on stderr; without it, only talks.

One job goes the whole way: plan (which measures), profile, train, and again from the cache.
"""

from __future__ import annotations

import pytest
import yaml

from gpumix.schema.cluster.cluster import Cluster
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile
from helpers.processes.commands import Done
from helpers.runs.jobs import EMULATED, FEW_PLANS, gpumix, metrics, write_job


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    soon = {"profile_cache": "profiles", "profile_budget": 2}
    write_job(folder, cluster=EMULATED, max_steps=2, techniques=FEW_PLANS, **soon)
    return folder


def ran(*arguments, folder) -> Done:
    done = gpumix(*arguments, folder=folder)
    assert done.code == 0, done.err
    assert "Traceback" not in done.err
    return done


@pytest.fixture(scope="module")
def first(folder):
    """`plan` of a job that was never measured."""
    return ran("plan", "job.yaml", "--json", folder=folder)


@pytest.mark.slow
def test_plan_measures_what_is_not_in_the_cache(first):
    plan = Plan.model_validate(first.json())
    assert plan.prediction is not None
    assert plan.emulated
    assert "fast: micro-batch 1" in first.err
    assert "Plan (optimal)." not in first.err


@pytest.mark.slow
def test_what_is_measured_is_not_measured_again(first, folder):
    done = ran("profile", "job.yaml", "--json", "--output", "profile.json", folder=folder)
    assert "micro-batch" not in done.err
    profile = Profile.model_validate(done.json())
    assert profile == Profile.load(folder / "profile.json")
    again = ran("plan", "job.yaml", "--json", "--output", "plan.json", folder=folder)
    assert again.json() == first.json()
    assert Plan.load(folder / "plan.json") == Plan.model_validate(first.json())


@pytest.mark.slow
def test_train_prints_its_summary(first, folder):
    done = ran("train", "job.yaml", "--json", folder=folder)
    summary = done.json()
    assert summary["steps"] == 2
    assert summary["losses"] == [r["loss"] for r in metrics(folder / "run")]
    assert summary["checkpoint"].endswith("step-00000002")
    for shown in ("devices", "profile", "Plan (optimal).", "step 1/2", "2 steps"):
        assert shown in done.err
    assert "micro-batch 1:" not in done.err


def test_devices_prints_the_cluster(folder):
    done = ran("devices", "job.yaml", "--json", folder=folder)
    cluster = Cluster.model_validate(done.json())
    assert [d.id for d in cluster.devices] == ["fast-0", "slow-0", "slow-1"]
    assert done.err == ""


def test_devices_reads_a_cluster_file(tmp_path):
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(EMULATED))
    done = ran("devices", "--cluster", "cluster.yaml", folder=tmp_path)
    assert done.err == ""
    assert "emulated, 50 GFLOP/s" in done.out
    assert "times are of the emulation" in done.out


def test_devices_finds_what_is_here(tmp_path):
    done = ran("devices", "--json", folder=tmp_path)
    assert Cluster.model_validate(done.json()).devices


@pytest.mark.extended
@pytest.mark.slow
def test_plan_hands_on_the_error_of_its_measurement(tmp_path):
    write_job(tmp_path, model={"factory": "toys:modle"}, cluster=EMULATED[:1])
    done = gpumix("plan", "job.yaml", "--json", folder=tmp_path)
    assert done.code == 2
    assert done.json()["what"] == "module 'toys' has no function 'modle'"
    assert done.err.count("gpumix: ") == 1


@pytest.mark.extended
def test_without_a_compiler_memory_is_said_to_be_unknown(tmp_path):
    write_job(tmp_path, cluster=EMULATED[:1], max_steps=2)
    nothing = {"CXX": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path / "empty")}
    done = gpumix("train", "job.yaml", "--json", folder=tmp_path, env=nothing)
    assert done.code == 0, done.err
    assert "memory is neither counted nor limited here: no-such-compiler" in done.err
    assert len(done.json()["losses"]) == 2
