"""A job's own code runs if the command allows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpumix.schema.errors import InputError
from gpumix.schema.reading.allowed_code import check_allowed
from gpumix.schema.reading.read import read_job
from helpers.errors import raises
from helpers.extended import every_second, left_out
from helpers.processes.commands import Done
from helpers.runs.jobs import gpumix, write_job
from helpers.runs.verbs import here

MODULE = "import pathlib\npathlib.Path('it-ran').touch()\ndef model(**a):\n    return None\n"
FORBIDDEN = {"GPUMIX_ALLOW": ""}
ALLOWED = [
    (["--allow", "mine", "--allow", "toys"], FORBIDDEN),
    ([], {"GPUMIX_ALLOW": "toys mine"}),
    (["--allow", "toys", "--set", "model.factory=mine:model"], FORBIDDEN),
]


@pytest.fixture
def job(tmp_path) -> Path:
    (tmp_path / "mine.py").write_text(MODULE)
    return write_job(tmp_path, model={"factory": "mine:model"})


@pytest.mark.parametrize("verb", ["train", "profile", "doctor", "check"])
def test_code_that_is_not_allowed_does_not_run(job, verb, monkeypatch):
    monkeypatch.setenv("GPUMIX_ALLOW", "")
    refuses(here(verb, "job.yaml", folder=job.parent), job)


@pytest.mark.parametrize("verb", every_second(["plan", "compare"]))
def test_nor_does_it_where_another_process_measures(job, verb):
    refuses(gpumix(verb, "job.yaml", folder=job.parent, env=FORBIDDEN), job)


def refuses(done: Done, job: Path) -> None:
    assert done.code == 2
    assert "job.yaml: 'model.factory' is code that would be run, 'mine:model'" in done.err
    assert "add --allow mine" in done.err
    assert not (job.parent / "it-ran").exists()


@pytest.mark.parametrize(
    ("arguments", "env"),
    # That by the variable other tests have, too.
    left_out(ALLOWED, [ALLOWED[1]]),
)
def test_who_allows_it_has_it_run(job, arguments, env):
    done = gpumix("profile", "job.yaml", *arguments, folder=job.parent, env=env)
    assert "not a torch.nn.Module" in done.err
    assert (job.parent / "it-ran").exists()


@pytest.mark.parametrize(
    ("allowed", "fits"),
    [
        (["pack.mine"], True),
        (["pack"], True),
        (["pack.mine:model"], True),
        (["other", "pack.mine"], True),
        (["pack.mine:other"], False),
        (["pack.min"], False),
        (["mine"], False),
        ([""], False),
        ([], False),
    ],
)
def test_which_names_allow_a_factory(tmp_path, allowed, fits):
    path = write_job(tmp_path, model={"factory": "pack.mine:model"}, data={"text": [str(tmp_path)]})
    job = read_job(path)
    if fits:
        check_allowed(job, path, allowed, [])
        return
    with raises(InputError, code="code-not-allowed", what="pack.mine:model"):
        check_allowed(job, path, allowed, [])


def test_an_override_of_another_key_allows_nothing(tmp_path):
    path = write_job(tmp_path)
    job = read_job(path)
    with raises(InputError, code="code-not-allowed", what="data.factory"):
        check_allowed(job, path, [], ["model.factory=toys:model", "data.validation_split=0.1"])
