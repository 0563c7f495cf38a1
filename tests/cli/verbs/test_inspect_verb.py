"""`gpumix inspect`: what a checkpoint holds, and whether it is whole."""

from __future__ import annotations

import pytest

from gpumix.train.checkpoint.manifest import read_manifest
from helpers.runs.jobs import gpumix, plan_for, train, write_job
from helpers.runs.verbs import here


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Beside a run with three checkpoints."""
    folder = tmp_path_factory.mktemp("inspected")
    job = write_job(folder, max_steps=6, save_steps=2, save_total_limit=3)
    train(job, plan=plan_for(job))
    return folder


def test_what_a_checkpoint_holds_is_told(folder):
    done = here("inspect", "run/checkpoints/step-00000006", "--json", folder=folder)
    assert done.code == 0, done.err
    (found,) = done.json()
    assert (found["step"], found["of_steps"], found["damage"]) == (6, 6, None)
    assert (found["optimizer"], found["position"]) == ("AdamW", 6 * 8)
    assert set(found["states"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert len(found["plan"]["stages"][0]["workers"]) == 3
    # Two moments in fp32, and one number for each parameter.
    assert 2 * found["model_bytes"] <= found["optimizer_bytes"] < 2.5 * found["model_bytes"]
    on_disk = (folder / "run/checkpoints/step-00000006").iterdir()
    assert found["bytes"] == sum(
        file.stat().st_size for file in on_disk if file.name != "checkpoint.json"
    )


def test_of_a_run_all_are_told_the_newest_first(folder):
    done = gpumix("inspect", "run", folder=folder)
    assert done.code == 0 and done.err == ""
    places = [done.out.index(f"step-0000000{step}") for step in (6, 4, 2)]
    assert places == sorted(places)
    assert "saved by 3 ranks in 1 stage" in done.out


def test_damage_is_told(folder):
    file = folder / "run/checkpoints/step-00000004/__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    done = here("inspect", "run", "--json", folder=folder)
    assert done.code == 2
    found = done.json()
    assert [one["damage"] is None for one in found] == [True, False, True]
    assert "__1_0.distcp" in found[1]["damage"]
    assert "damaged: " in here("inspect", "run", folder=folder).out


def test_what_a_checkpoint_says_is_no_markup_nor_an_order_to_the_terminal(folder):
    path = folder / "run/checkpoints/step-00000006"
    hostile = {"gpumix": "[/red]\x1b[2J", "torch": "2\x1b]0;title\x07\x9b"}
    manifest = read_manifest(path).model_copy(update=hostile)
    (path / "checkpoint.json").write_text(manifest.sealed())
    done = here("inspect", str(path), folder=folder)
    assert done.code == 0, done.err
    assert r"[/red]\x1b[2J" in done.out
    assert r"saved with torch 2\x1b]0;title\x9b" in done.out
    assert not {"\x1b", "\x07", "\x9b"} & set(done.out)


def test_no_checkpoint(folder):
    done = here("inspect", ".", folder=folder)
    assert done.code == 2
    assert "there is no checkpoint here" in done.err
