"""Which copies in the memory of hosts belong together, and who may have them."""

from __future__ import annotations

import json
import os
import stat

import pytest

from gpumix.spec.errors import MachineError
from gpumix.train import memory_folder as folder
from gpumix.train.memory_folder import Found, Held, Home, from_text, newest, to_text

RUN = "1a2b"


def held(rank: int, step: int, slot: int = 0, generation: int = 1, world: int = 2) -> Held:
    return Held(generation, world, rank, slot, step)


def seal(home: Home, one: Held) -> None:
    place = home.make(one.generation)
    (place / folder.data_file(one.rank, one.slot)).touch()
    told = {"world": one.world, "manifest": {"step": one.step}}
    file = place / folder.seal_file(one.rank, one.slot)
    file.write_text(json.dumps(told))


def test_the_newest_step_that_all_ranks_have():
    ahead = [held(0, 7, 0), held(0, 8, 1)]
    behind = [held(1, 7, 1), held(1, 6, 0)]
    assert newest([ahead, behind]) == Found(1, 7, slots=(0, 1), givers=(0, 1))


def test_copies_of_an_earlier_start_count_until_the_next_one_has_them():
    first = [held(0, 7), held(1, 7)]
    second = [held(0, 5, generation=2)]
    assert newest([first + second]) == Found(1, 7, slots=(0, 0), givers=(0, 0))
    second += [held(1, 5, generation=2)]
    assert newest([first + second]) == Found(2, 5, slots=(0, 0), givers=(0, 0))


def test_a_start_with_another_number_of_ranks_is_another_state():
    assert newest([[held(0, 7, world=3), held(1, 7, world=3)]]) is None
    assert newest([[held(0, 7), held(1, 7, world=3)]]) is None


def test_nothing_is_nothing():
    assert newest([]) is None
    assert newest([[], []]) is None


def test_what_is_sealed_is_found(tmp_path):
    home = Home(tmp_path, tmp_path / "run", "localhost", RUN)
    assert home.held() == []
    copies = [held(0, 7, 0), held(0, 8, 1), held(1, 7, 0)]
    for one in copies:
        seal(home, one)
    assert sorted(home.held(), key=str) == sorted(copies, key=str)
    assert from_text(to_text(copies)) == copies


@pytest.mark.parametrize("content", ["", "{", "[]", '{"world": 2}', '{"world": "x"}'])
def test_what_is_no_seal_is_passed_over(tmp_path, content):
    home = Home(tmp_path, tmp_path / "run", "localhost", RUN)
    seal(home, held(0, 7))
    (home.generation(1) / folder.seal_file(0, 0)).write_text(content)
    assert home.held() == []


def test_earlier_starts_are_forgotten(tmp_path):
    home = Home(tmp_path, tmp_path / "run", "localhost", RUN)
    for generation in (1, 2, 3):
        seal(home, held(0, 7, generation=generation))
    home.forget_before(3)
    assert [one.generation for one in home.held()] == [3]


def test_a_host_that_comes_with_copies_of_an_earlier_run_has_none_of_this_one(tmp_path):
    """Whole ones, of a start with a higher number."""
    of = {
        (host, run): Home(tmp_path / host, tmp_path / "run", host, run)
        for host in ("stays", "comes")
        for run in ("earlier", RUN)
    }
    for host in ("stays", "comes"):
        (tmp_path / host).mkdir()
    for rank in (0, 1):
        seal(of["comes", "earlier"], held(rank, 9, generation=5))
        seal(of["stays", RUN], held(rank, 3, generation=2))
    told = [of[host, RUN].held() for host in ("comes", "stays")]
    assert newest(told) == Found(2, 3, slots=(0, 0), givers=(1, 1))
    assert folder.latest_generation(told) == 2


def test_a_run_forgets_those_before_it(tmp_path):
    earlier, now = (Home(tmp_path, tmp_path / "run", "localhost", run) for run in ("earlier", RUN))
    now.forget_other_runs()  # there are none
    for home in (earlier, now):
        seal(home, held(0, 7))
    now.forget_other_runs()
    assert (earlier.held(), now.held()) == ([], [held(0, 7)])


def test_a_run_removes_its_own_and_those_whose_output_is_gone(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "run").mkdir()
    homes = {
        name: Home(tmp_path / "memory", tmp_path / name, "localhost", RUN)
        for name in ("run", "other", "gone")
    }
    (tmp_path / "memory").mkdir()
    for home in homes.values():
        seal(home, held(0, 7))
    homes["run"].remove()
    assert {name: bool(home.held()) for name, home in homes.items()} == {
        "run": False,
        "other": True,
        "gone": False,
    }


def test_only_its_user_can_reach_it(tmp_path):
    home = Home(tmp_path, tmp_path / "run", "localhost", RUN)
    seal(home, held(0, 7))
    root = tmp_path / f"gpumix-{os.getuid()}"
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    root.chmod(0o755)
    for use in (home.held, lambda: home.make(2)):
        with pytest.raises(MachineError, match="not this user's alone"):
            use()


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / f"gpumix-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MachineError):
        Home(tmp_path, tmp_path / "run", "localhost", RUN).make(1)
