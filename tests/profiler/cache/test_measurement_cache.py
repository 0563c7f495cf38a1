"""What was measured is kept, and measured again when anything that it depends on has changed."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import gpumix
from gpumix.engine.rank_group import RankGroup
from gpumix.hardware.device import open_device
from gpumix.profiler.cache.measurement_cache import MeasurementCache
from gpumix.profiler.cache.measurement_files import DOUBTFUL_KEPT_S, MEASURED_CODE, own_files
from gpumix.profiler.cluster import ClusterProfiler
from gpumix.schema.profile.measurements import ClassMeasurement, InputMeasurement
from gpumix.schema.profile.profile import HostInput, Profile
from gpumix.train.console.plan_page import advise_measuring, describe_doubt
from gpumix.train.controller import JobController, UserPlan
from helpers.devices.sweeps import costly_model, subject, virtual_time
from helpers.extended import every_second
from helpers.runs.jobs import CLUSTER, write_job
from helpers.virtual_clock import VirtualClock

ALONE = [{"class": "one", "accelerator": "cpu", "memory": "64 MiB"}]
EMULATED = [{"class": "one", "emulate": "1 MFLOP/s", "memory": "64 MiB"}]
NEW = {"class": "new", "accelerator": "cpu", "memory": "48 MiB"}


@pytest.fixture(scope="module")
def measured_once(tmp_path_factory):
    """A folder with a job and its measurements, and the profile."""
    folder = tmp_path_factory.mktemp("measured")
    write_job(folder)
    assert missing(folder) == ["big", "small"]
    return folder, JobController.of_file(folder / "job.yaml", [], debug=False).profile()


@pytest.fixture
def measured(measured_once, tmp_path):
    """The profile of the job in `tmp_path`, from the measurements that lie there."""
    folder, profile = measured_once
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return profile


def cache(folder, *overrides: str) -> MeasurementCache:
    pipeline = JobController.of_file(folder / "job.yaml", overrides, debug=False)
    return MeasurementCache(pipeline.job, pipeline.cluster, pipeline.folder)


def missing(folder, *overrides: str) -> list[str]:
    return cache(folder, *overrides).missing()


def times(profile: Profile) -> dict[str, float]:
    """When each class was measured, so to speak: no two measurements take just as long."""
    return {c.device_class: c.optimizer_s_per_element for c in profile.classes}


@pytest.mark.slow
def test_a_profile_is_found_again_as_it_was(measured, tmp_path):
    assert missing(tmp_path) == []
    found = cache(tmp_path)
    assert found.load() == measured
    links, classes = found.links(), found.measured()
    assert links is not None and len(classes) == 2
    # Classes are measured side by side.
    longest = max(one.seconds_spent for one in classes.values())
    assert measured.seconds_spent == longest + links.seconds_spent


def plant_input(measured: Profile, folder) -> tuple[HostInput, ...]:
    """What reading samples took, so to speak: far more than it does."""
    (found,) = measured.inputs
    planted = (found.model_copy(update={"cpu_s_per_sample": 123.0}),)
    cache(folder).save_inputs(InputMeasurement(inputs=planted))
    return planted


@pytest.mark.extended
def test_fresh_measures_again(measured, tmp_path):
    plant_input(measured, tmp_path)
    again = JobController.of_file(tmp_path / "job.yaml", [], debug=False).profile(fresh=True)
    assert times(again) != times(measured)
    (found,) = again.inputs
    assert found.cpu_s_per_sample < 1.0
    assert cache(tmp_path).load() == again
    assert cache(tmp_path).inputs() == InputMeasurement(inputs=again.inputs)


def test_the_same_device_in_another_class_name_is_known(measured, tmp_path):
    write_job(tmp_path, cluster=[{**CLUSTER[0], "class": "large"}, CLUSTER[1]])
    found = cache(tmp_path).load()
    assert found is not None
    assert times(found) == {"large": times(measured)["big"], "small": times(measured)["small"]}


@pytest.mark.extended
def test_a_new_class_is_measured_alone(measured, tmp_path):
    planted = plant_input(measured, tmp_path)
    write_job(tmp_path, cluster=[*CLUSTER, NEW])
    assert missing(tmp_path) == ["new"]
    again = JobController.of_file(tmp_path / "job.yaml", [], debug=False).profile()
    assert times(again).keys() == {"big", "small", "new"}
    assert times(again).items() >= times(measured).items()
    assert again.inputs == planted


@pytest.mark.extended
def test_more_devices_are_measured_on_their_links_only(measured, tmp_path):
    write_job(tmp_path, cluster=[CLUSTER[0], {**CLUSTER[1], "count": 3}])
    assert missing(tmp_path) == []
    assert cache(tmp_path).load() is None
    again = JobController.of_file(tmp_path / "job.yaml", [], debug=False).profile()
    assert times(again) == times(measured)
    assert again.network != measured.network


@pytest.mark.parametrize(
    "change",
    [
        "sequence_length=4",
        "global_batch_size=16",
        "precision=bf16",
        "optimizer.name=sgd",
        "model.arguments={width: 24}",
        "model.factory=toys:broken",
        "data.arguments={length: 4}",
    ],
)
def test_other_work_was_not_measured(measured, tmp_path, change):
    assert missing(tmp_path, change) == ["big", "small"]


@pytest.mark.parametrize(
    "change",
    ["max_steps=99", "optimizer.lr=1", "output_dir=other", "advanced.timeout=9", "strategy=even"],
)
def test_what_does_not_matter_is_not_measured_again(measured, tmp_path, change):
    assert missing(tmp_path, change) == []


@pytest.mark.extended
def test_without_what_reading_takes_that_alone_is_measured(measured, tmp_path):
    """A plan that was made without it would not know."""
    cache(tmp_path).input_file().unlink()
    assert missing(tmp_path) == [] and cache(tmp_path).load() is None
    again = JobController.of_file(tmp_path / "job.yaml", [], debug=False).profile()
    assert times(again) == times(measured) and again.links == measured.links
    assert [one.host for one in again.inputs] == [one.host for one in measured.inputs] != []
    assert cache(tmp_path).load() == again


@pytest.mark.extended
def test_a_given_plan_waits_for_no_measurement_and_its_reader_is_told(measured, tmp_path, capfd):
    pipeline = JobController.of_file(tmp_path / "job.yaml", ["max_steps=1"], debug=False)
    plan = pipeline.plan(measured)
    cache(tmp_path).input_file().unlink()
    pipeline.train(UserPlan(plan), resume=False)
    assert "what reading this data takes was not measured" in capfd.readouterr().err
    assert not cache(tmp_path).input_file().exists()


@pytest.mark.parametrize(
    "change",
    every_second(
        ["data.prefetch=4", "data.bad_samples=skip", "data.validation_split=0.25", "seed=7"]
    ),
)
def test_how_samples_are_asked_for_changes_nothing_of_what_reading_takes(
    measured, tmp_path, change
):
    planted = plant_input(measured, tmp_path)
    found = JobController.of_file(tmp_path / "job.yaml", [change], debug=False).profile()
    assert found == measured.model_copy(update={"inputs": planted})


@pytest.mark.parametrize(
    ("workers", "readers"), every_second([(0, 1), (1, 1), (3, 3), ("auto", None)])
)
def test_a_profile_has_the_readers_that_its_job_wants(measured, tmp_path, workers, readers):
    planted = plant_input(measured, tmp_path)
    found = cache(tmp_path, f"data.num_workers={workers}").load()
    assert found is not None
    assert found.inputs == (planted[0].model_copy(update={"readers": readers}),)
    alone = InputMeasurement(inputs=(planted[0].model_copy(update={"parallel": False}),))
    cache(tmp_path).save_inputs(alone)
    found = cache(tmp_path, f"data.num_workers={workers}").load()
    assert found is not None and found.inputs[0].readers == 1


@pytest.mark.parametrize(
    "change",
    [
        "data={text: [b.txt]}",
        "data={text: [a.txt], document: line}",
        "data={text: [a.txt], packing: none}",
        "data={dataset: a.txt}",
        "tokenizer=gpt2.json",
        "sequence_length=4",
    ],
)
def test_what_reading_takes_is_known_of_the_same_samples_only(tmp_path, monkeypatch, change):
    monkeypatch.chdir(tmp_path)  # where paths of overrides start
    write_job(tmp_path, data={"text": ["a.txt"]}, cluster=ALONE)
    for name in ("a.txt", "b.txt", "gpt2.json"):
        (tmp_path / name).touch()
    assert cache(tmp_path).input_file() == cache(tmp_path, "data.prefetch=2").input_file()
    assert cache(tmp_path).input_file() != cache(tmp_path, change).input_file()


def test_files_of_the_same_name_in_other_folders_are_other_samples(tmp_path):
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        write_job(folder, data={"text": ["a.txt"]}, cluster=ALONE)
        (folder / "a.txt").touch()
    one, two = (cache(folder).input_file().name for folder in folders)
    assert one != two


def test_another_device_was_not_measured(measured, tmp_path):
    write_job(tmp_path, cluster=[{**CLUSTER[0], "memory": "63 MiB"}, CLUSTER[1]])
    assert missing(tmp_path) == ["big"]


def test_another_torch_was_not_measured(measured, tmp_path, monkeypatch):
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "9.9" if name == "torch" else version(name)
    )
    assert missing(tmp_path) == ["big", "small"]


@pytest.mark.parametrize("content", ["", '{"kind": "class-meas', '{"kind": "plan"}', "[]"])
def test_a_broken_file_is_measured_again(measured, tmp_path, content):
    found = cache(tmp_path)
    for file in (tmp_path / "profiles").glob("class-*"):
        file.write_text(content)
    assert found.missing() == ["big", "small"]
    assert found.load() is None


@pytest.mark.parametrize("name", ["saved", "saved_forward", "saved_backward"])
def test_what_does_not_tell_all_of_a_kept_graph_is_measured_again(measured, tmp_path, name):
    for file in (tmp_path / "profiles").glob("class-*"):
        content = json.loads(file.read_text())
        del content["model"]["kinds"][0][name]
        file.write_text(json.dumps(content))
    assert missing(tmp_path) == ["big", "small"]


def test_a_changed_factory_is_measured_again(tmp_path):
    """Its name is the same, its code is not, or that of what it imports."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").write_text("from . import inner\n")
    (tmp_path / "parts" / "inner.py").write_text("from toys import model\n")
    (tmp_path / "own_model.py").write_text("import os, torch\nfrom parts.inner import model\n")
    (tmp_path / "own_data.py").write_text("from toys import tokens\n")
    (tmp_path / "unused.py").write_text("")
    job = write_job(
        tmp_path,
        cluster=ALONE,
        model={"factory": "own_model:model"},
        data={"factory": "own_data:tokens"},
    )
    (one,) = JobController.of_file(job, [], debug=False).cluster.classes

    def file() -> Path:
        """Where its measurement is looked for."""
        return cache(tmp_path).class_file(one)

    first = file()
    (tmp_path / "unused.py").write_text("x = 1\n")
    assert file() == first
    for name in ("own_model.py", "own_data.py", "parts/inner.py", "parts/__init__.py"):
        before = (tmp_path / name).read_text()
        (tmp_path / name).write_text(before + "# changed\n")
        assert file() != first
        (tmp_path / name).write_text(before)
        assert file() == first


def measure_here(
    folder: Path,
    cost: Callable[[VirtualClock], None],
    *overrides: str,
    fresh: bool = False,
    budget_s: float = 1e9,
    largest: int = 1,
) -> list[str]:
    """Return the messages while this process measures the only device of the folder's job and
    stores the result. `cost` is called whenever a block runs."""
    cluster = JobController.of_file(folder / "job.yaml", [], debug=False).cluster
    told: list[str] = []
    with virtual_time() as clock, open_device(cluster.classes[0], 0) as runtime:
        model = partial(costly_model, lambda x: cost(clock))
        ClusterProfiler(
            subject(model, largest=largest, budget_s=budget_s),
            cluster,
            ranks=RankGroup(None, rank=0, world=1, device=runtime.torch_device, timeout_s=10),
            devices=cluster.devices,
            runtime=runtime,
            cache=cache(folder, *overrides),
            fresh=fresh,
        ).run(told.append)
    return told


def test_only_fresh_measures_what_is_known(tmp_path):
    write_job(tmp_path, cluster=EMULATED)
    ran: list[VirtualClock] = []
    for fresh, runs in ((False, True), (False, False), (True, True)):
        ran.clear()
        measure_here(tmp_path, ran.append, fresh=fresh)
        assert bool(ran) == runs


def test_a_larger_budget_measures_what_a_smaller_one_left(tmp_path):
    write_job(tmp_path, cluster=ALONE)
    budget = "advanced.profile_budget=0.001"
    measure_here(tmp_path, lambda clock: clock.spend(1.0), budget, budget_s=0.001, largest=8)
    assert missing(tmp_path, "advanced.profile_budget=0.001") == []
    assert missing(tmp_path, "advanced.profile_budget=0.0005") == []
    assert missing(tmp_path) == ["one"]


def test_a_measurement_says_nothing_of_its_class_name(measured, tmp_path):
    """Two jobs may call the same device differently, and each finds its own name."""
    [file] = [cache(tmp_path).class_file(c) for c in measured.cluster.classes if c.name == "big"]
    assert ClassMeasurement.load(file).device_class.device_class == "big"
    renamed = measured.cluster.class_named("big").model_copy(update={"name": "other"})
    other = cache(tmp_path)
    other.settings.dtypes["other"] = other.settings.dtypes["big"]
    other.settings.chosen["other"] = other.settings.chosen["big"]
    assert other.class_file(renamed) == file


@pytest.mark.parametrize("stall_s", [0.0, 1.0])
def test_times_of_a_machine_that_was_busy_are_kept_with_their_doubt_for_an_hour(tmp_path, stall_s):
    write_job(tmp_path, cluster=EMULATED)
    told = measure_here(tmp_path, lambda clock: clock.spend(stall_s))
    assert any("busy while it measured one" in line for line in told) == bool(stall_s)
    again = measure_here(tmp_path, lambda clock: None)
    assert any("were kept" in line for line in again) == bool(stall_s)
    found = cache(tmp_path)
    assert found.missing() == []
    profile = found.without_inputs()
    assert ("busy" in describe_doubt(profile)) == bool(stall_s)
    advice = advise_measuring(profile, "job.yaml")
    assert advice.endswith("gpumix profile job.yaml --fresh" if stall_s else "")
    assert bool(advice) == bool(stall_s)
    (one,) = profile.cluster.classes
    an_hour_ago = time.time() - DOUBTFUL_KEPT_S - 1
    os.utime(found.class_file(one), (an_hour_ago, an_hour_ago))
    assert found.missing() == (["one"] if stall_s else [])


@pytest.mark.parametrize("package", MEASURED_CODE)
def test_a_measurement_depends_on_the_code_that_measures_and_is_measured(package):
    folders = [file.parts[len(Path(gpumix.__file__).parent.parts)] for file in own_files()]
    assert folders.count(package) > 5
