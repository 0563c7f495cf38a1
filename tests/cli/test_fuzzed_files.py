"""A few of the mutants of `benchmarks/fuzz.py`: each is read, or refused with one error that names
it; and what it has found before."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from gpumix.schema.job.job import Job
from gpumix.schema.profile.profile import Profile
from helpers.attacks.mutant_files import JOB, OWN, SMALL, Good, write_all
from helpers.attacks.mutant_runs import Ended, clean, faults, is_placed, run
from helpers.attacks.mutants import Mutant, mutants, of_text, with_value, without, written

EACH = 4  # of a kind of file


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzzed") / "a" / "files"
    return folder, write_all(folder)


@pytest.fixture
def folder(files, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return files[0]


def untracked(use: tuple[str, ...]) -> tuple[str, ...]:
    """Processes of trackers take seconds to start."""
    return (*use, "--set", "report_to={}") if use[0] == "train" else use


def quick(good: Good) -> tuple[str, ...]:
    """A use that searches for no plan, or for one of few."""
    searches = ("plan", "compare", "whatif")
    found = [use for use in good.uses if use[0] not in searches]
    return (found or [use for use in good.uses if "--profile" in use])[0]


def spoilt(folder: Path, name: str, content: bytes, *command: str) -> Ended:
    """How a command ends while a file is spoilt."""
    path, kept = folder / name, [path.name for path in folder.iterdir()]
    good = path.read_bytes()
    path.write_bytes(content)
    try:
        return run(command, folder)
    finally:
        clean(folder, kept)
        path.write_bytes(good)


@pytest.mark.parametrize("kind", ["job", "cluster", "profile", "plan"])
def test_whatever_a_file_holds_it_is_read_or_refused_in_one_error(files, folder, kind):
    rng, of_kind = random.Random(3), [good for good in files[1] if good.kind == kind]
    ended = []
    for _ in range(EACH):
        good = rng.choice(of_kind)
        mutant = next(mutants(good.text, good.form, rng, content=0.7))
        # Verbs that search take longer, and are tried by the benchmark.
        uses = [u for u in good.uses if u[0] in ("devices", "simulate")] or good.uses[:1]
        use = rng.choice(uses)
        done = spoilt(folder, good.name, mutant.content, *untracked(use))
        assert not faults(done, good.named_by(use)), (good.name, mutant.change, done.err)
        ended.append(done.code)
    assert any(ended)


def test_every_good_file_is_accepted(files, folder):
    for use in dict.fromkeys(map(quick, files[1])):
        done = run(untracked(use), folder)
        assert done.code == 0, (use, done.err)


def test_every_key_of_a_job_is_spoilt():
    """But for those that go with others alone."""
    alone = {"report_to.trackio.server", "report_to.prometheus.textfile"}
    alone |= {f"optimizer.{name}" for name in ("beta2_decay", "clip_threshold", "least_scale")}
    written = {key for text in (JOB, SMALL, OWN) for key in keys_of(yaml.safe_load(text))}
    assert {key for key in fields_of(Job) if not key.startswith("cluster.")} - written == alone


def keys_of(value: Any, above: str = "") -> Iterator[str]:
    """Of all mappings, with those above them; where they stand in a list does not count."""
    if isinstance(value, list):
        for item in value:
            yield from keys_of(item, above)
    for key, item in value.items() if isinstance(value, dict) else ():
        yield f"{above}{key}"
        yield from keys_of(item, f"{above}{key}.")


def fields_of(kind: type[BaseModel], above: str = "") -> Iterator[str]:
    for name, field in kind.model_fields.items():
        yield f"{above}{name}"
        for one in (field.annotation, *get_args(field.annotation)):
            if isinstance(one, type) and issubclass(one, BaseModel):
                yield from fields_of(one, f"{above}{name}.")


def test_faults_are_seen():
    good = Ended(2, "", "gpumix: job.yaml:3: wrong", launched=False, seconds=0.1)
    assert faults(good, ["job.yaml"]) == []
    assert faults(None, []) == ["hang"]
    bug = Ended(1, "", "gpumix: x: a bug in gpumix: KeyError: 1", launched=False, seconds=0.1)
    assert faults(bug, []) == ["traceback", "other exit"]
    assert faults(good, ["plan.json"]) == ["unplaced"]
    assert not is_placed("table of job.yaml\ngpumix: wrong", ["job.yaml"])


def test_a_seed_gives_the_same_mutants_again():
    def some() -> list[Mutant]:
        rng = random.Random(7)
        return [next(mutants(JOB, "yaml", rng, 0.5)) for _ in range(8)]

    assert some() == some()
    rng = random.Random(7)
    assert all(of_text(JOB.encode(), rng).content != JOB.encode() for _ in range(3))


# -- what was found --------------------------------------------------------------------------------


def test_what_a_plan_cannot_be_for_the_model_is_told_with_its_file(folder):
    plan = json.loads((folder / "stages.json").read_text())
    plan["stages"][0]["units"][0] += "s"
    done = spoilt(folder, "stages.json", written(plan, "json"), "simulate", "stages.json")
    both = "stages.json with profile.json"  # either may be the one that is wrong
    assert done.err.startswith(f"gpumix: {both}: stage 1: the plan is not one for this model")
    done = spoilt(
        folder, "stages.json", written(plan, "json"), "train", "job.yaml", "--plan", "stages.json"
    )
    assert done.err.startswith(f"gpumix: {both}: stage 1: the plan is not one for this model")


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        (("seed",), 10**30, "'seed' must be 9.0072e+15 or less"),
        (("sequence_length",), 10**12, "'sequence_length' must be 1.07374e+09 or less"),
        (("max_steps",), 10**30, "'max_steps' must be 1.09951e+12 or less"),
        (("advanced", "timeout"), 1e300, "'advanced.timeout' must be 1e+09 or less"),
        (("data", "num_workers"), 10**12, "'data.num_workers' must be "),
        (("model", "config", "num_hidden_layers"), 10**30, "models have 1024 layers at most"),
        (("model", "config", "hidden_size"), 2**40, "transformers cannot build"),
        (("model", "config", "num_attention_heads"), -1, "job.yaml: model.config of type 'llama'"),
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_meant_are_refused(folder, keys, value, said):
    job = with_value(keys, value, yaml.safe_load(JOB))
    done = spoilt(folder, "job.yaml", written(job, "yaml"), "profile", "job.yaml")
    assert done.code == 2
    assert "gpumix: job.yaml" in done.err
    assert said in done.err


def test_a_batch_that_can_be_cut_in_too_many_ways_is_refused(folder):
    done = run(
        ["plan", "small.yaml", "--profile", "cards.json", "--set", "global_batch_size=1000000"],
        folder,
    )
    assert done.code == 2
    assert done.err.startswith(
        "gpumix: small.yaml, cards.json: 'global_batch_size' is 1000000: so many"
    )


@pytest.mark.parametrize(
    ("change", "place", "said"),
    [
        (lambda p: p["stages"][0].update(joined="1"), "stages.0.joined", "a whole number"),
        (lambda p: p["stages"][0].update(sequence=0), "stages.0.sequence", "true or false"),
        (lambda p: p["stages"][0]["root"].append(p["stages"][0]["root"][0]), "stages.0", "twice"),
        (lambda p: p["prediction"]["workers"].append(p["prediction"]["workers"][0]), "", "is pred"),
        (lambda p: p["prediction"]["workers"][0].update(device="nobody"), "", "is in no stage"),
        (lambda p: p["prediction"].update(step_s=-1), "prediction.step_s", "0 or more"),
        (lambda p: p.update(global_batch=2**40), "global_batch", "1.04858e+06 or less"),
        (
            lambda p: p["stages"][1]["takes"][0].update(differentiable=False),
            "stage 2",
            "has 'differentiable' false, in this model it is true",
        ),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(folder, change, place, said):
    plan = json.loads((folder / "stages.json").read_text())
    change(plan)
    done = spoilt(folder, "stages.json", written(plan, "json"), "simulate", "stages.json")
    assert done.code == 2
    assert f"stages.json: {place}" in done.err or f"with profile.json: {place}" in done.err
    assert said in done.err


def test_a_key_that_is_given_twice_is_told(folder):
    text = (folder / "one.json").read_text().replace('"samples": ', '"samples": 1, "samples": ', 1)
    done = spoilt(folder, "one.json", text.encode(), "simulate", "one.json")
    assert "one.json: this is not a valid plan: key 'samples' of 'fast-0' is given" in done.err


def test_what_the_root_lacks_is_told(folder):
    profile = json.loads((folder / "cards.json").read_text())
    del profile["model"]["root"]["parameters"][-1]
    done = spoilt(
        folder, "cards.json", written(profile, "json"),
        "plan", "small.yaml", "--profile", "cards.json",
    )  # fmt: skip
    assert "cards.json: model: " in done.err
    assert "which 'root.parameters' does not name" in done.err


@pytest.mark.parametrize("keys", [("model", "kinds", 0, "flops"), ("model", "root", "flops")])
def test_work_that_no_card_ends_is_told(folder, keys):
    """A card that is added is estimated from what the model's blocks compute."""
    profile = with_value(keys, 1e30, json.loads((folder / "cards.json").read_text()))
    command = ("whatif", "small.yaml", "--profile", "cards.json", "--add", "t4")
    done = spoilt(folder, "cards.json", written(profile, "json"), *command)
    assert done.code == 2
    assert "cards.json: " in done.err and "flops' must be 5e+23 or less" in done.err


def test_devices_of_all_rows_are_counted(folder):
    rows = [{"class": "fast", "memory": 2**20, "count": 65_536}] * 1000
    done = spoilt(folder, "short.yaml", written(rows, "yaml"), "devices", "--cluster", "short.yaml")
    assert "the rows have 65536000 devices in all" in done.err
    assert done.seconds < 30


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            ("tp_profiles", 0, "told", "slow"),
            "'told' has no entry for device class 'slow'",
        ),
        (
            ("tp_profiles", 0, "classes", 1, "units", "block"),
            "'block' was not measured on device class",
        ),
        (
            ("tp_profiles", 0, "classes", 0, "units", "(root)"),
            "'(root)' was not measured on device cl",
        ),
        (("model", "needs", 2, "outputs"), "nothing needs what call 1 returns"),
        (("model", "root", "parameters"), "which 'root.parameters' does not name"),
        (
            ("tp_profiles", 0, "model", "root", "parameters"),
            "which 'root.parameters' does not name",
        ),
    ],
)
def test_a_profile_with_a_hole_is_no_profile(folder, keys, said):
    known = json.loads((folder / "profile.json").read_text(encoding="utf-8"))
    content = written(without(keys, known), "json")
    command = ("plan", "job.yaml", "--profile", "profile.json")
    done = spoilt(folder, "profile.json", content, *command)
    assert (done.code, done.err.startswith("gpumix: profile.json: ")) == (2, True)
    assert said in done.err


def of_no_stages(folder: Path) -> Any:
    """The profile, of whose tensor-parallel groups no stages are known."""
    known = json.loads((folder / "profile.json").read_text(encoding="utf-8"))
    for number in range(len(known["tp_profiles"])):
        known = without(("tp_profiles", number, "model", "needs"), known)
    return known


def test_tp_groups_of_which_no_stages_are_known_are_a_profile(folder):
    assert Profile.model_validate(of_no_stages(folder)).tp_profiles


@pytest.mark.extended
@pytest.mark.slow
def test_tp_groups_of_which_no_stages_are_known_are_left_out(folder):
    known = of_no_stages(folder)
    command = ("plan", "job.yaml", "--profile", "profile.json")
    assert spoilt(folder, "profile.json", written(known, "json"), *command).code == 0


def test_a_plan_and_a_profile_that_differ_are_both_named(folder):
    known = json.loads((folder / "profile.json").read_text(encoding="utf-8"))
    content = written(with_value(("cluster", "devices", 3, "id"), "other", known), "json")
    command = ("simulate", "stages.json", "--profile", "profile.json")
    done = spoilt(folder, "profile.json", content, *command)
    assert done.err.startswith("gpumix: stages.json with profile.json: the plan's device 'fast-3'")


def test_training_by_a_plan_names_the_profile_beside_it_too(folder):
    """Either may be the one that was spoilt."""
    known = json.loads((folder / "profile.json").read_text(encoding="utf-8"))
    content = written(with_value(("model", "calls", 0), "other", known), "json")
    done = spoilt(folder, "profile.json", content, "train", "job.yaml", "--plan", "one.json")
    assert done.code == 2
    assert done.err.startswith("gpumix: one.json with profile.json: ")


def test_heads_that_cannot_be_shared_are_no_estimate(folder):
    done = run(
        ["plan", "small.yaml", "--cluster", "2x rtx3090", "--set",
         "model.config.num_key_value_heads=3"], folder,
    )  # fmt: skip
    assert done.err.startswith("gpumix: small.yaml: 8 attention heads cannot share 3")


@pytest.mark.parametrize(
    ("factory", "told"),
    [
        ("mine:sample_s", "module 'mine' has no function 'sample_s'"),
        ("mine.e:samples", "there is no module 'mine.e'"),
        ("mime:samples", "there is no module 'mime'"),
    ],
)
def test_a_factory_that_is_none_is_told_with_its_key(folder, factory, told):
    job = with_value(("data", "factory"), factory, yaml.safe_load(OWN))
    allowed = ("--allow", "mine", "--allow", factory.partition(":")[0])
    done = spoilt(folder, "own.yaml", written(job, "yaml"), "profile", "own.yaml", *allowed)
    assert done.err.startswith(f"gpumix: own.yaml: data.factory: {told}")
