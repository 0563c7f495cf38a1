"""What a launcher tells a process of its place is read from the environment, or refused."""

from __future__ import annotations

import pytest

from gpumix.hardware.host.environment import torchrun_place
from gpumix.schema.errors import InputError
from gpumix.train.processes.runner import LocalRunner
from gpumix.train.processes.torchrun_runner import make_runner
from helpers.errors import raises

PLACE = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.fixture
def told(monkeypatch):
    def tell(**others):
        for name, value in (PLACE | others).items():
            monkeypatch.setenv(name, value)
        return torchrun_place()

    return tell


def test_a_place_is_what_the_launcher_says(told):
    place = told()
    assert (place.rank, place.world, place.local_rank, place.master_port) == (1, 2, 1, 29500)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "x"),
        ("RANK", ""),
        ("RANK", "-1"),
        ("WORLD_SIZE", "two"),
        ("LOCAL_RANK", "$SLURM_LOCALID"),
        ("MASTER_PORT", "auto"),
    ],
)
def test_what_is_no_number_is_told_by_its_variable(told, name, value):
    with raises(InputError, code="environment-number-invalid", what=(name, value)):
        told(**{name: value})


@pytest.mark.parametrize("missing", [["MASTER_ADDR", "MASTER_PORT"], ["LOCAL_RANK"]])
def test_one_of_several_that_cannot_meet_is_refused(told, monkeypatch, missing):
    told()
    for name in missing:
        monkeypatch.delenv(name)
    assert torchrun_place() is None
    with raises(InputError, code="rendezvous-unknown", what=2) as caught:
        make_runner()
    assert f"{' and '.join(missing)} not" in caught.value.why
    assert "gpumix launch" in caught.value.fix


@pytest.mark.parametrize(
    ("size", "missing"),
    [("1", "MASTER_ADDR"), ("1", "LOCAL_RANK"), ("4", "RANK"), ("2", "WORLD_SIZE")],
)
def test_one_process_alone_may_be_told_a_part(told, monkeypatch, size, missing):
    told(RANK="0", WORLD_SIZE=size)
    monkeypatch.delenv(missing)
    assert isinstance(make_runner(), LocalRunner)


def test_a_rank_must_be_one_of_its_world(told):
    with raises(InputError, code="rank-out-of-range", what=(5, "WORLD_SIZE", 2)):
        told(RANK="5")
