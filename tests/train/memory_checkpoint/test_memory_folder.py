"""Which copies in the memory of hosts belong together, and who may have them."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path

import pytest

from gpumix.schema.errors import MachineError
from gpumix.train.memory_checkpoint import memory_folder as folder
from gpumix.train.memory_checkpoint.memory_folder import (
    MemoryFolder,
    NewestState,
    StateCopy,
    find_newest_state,
    from_text,
    to_text,
)
from gpumix.train.run_log.run_id import assign_run_id
from helpers.errors import raises

RUN = "1a2b"


def held(rank: int, step: int, slot: int = 0, generation: int = 1, world: int = 2) -> StateCopy:
    return StateCopy(generation, world, rank, slot, step)


def seal(home: MemoryFolder, one: StateCopy) -> None:
    place = home.make(one.generation)
    (place / folder.data_file(one.rank, one.slot)).touch()
    told = {"world": one.world, "manifest": {"step": one.step}}
    file = place / folder.seal_file(one.rank, one.slot)
    file.write_text(json.dumps(told))


def test_the_newest_step_that_all_ranks_have():
    ahead = [held(0, 7, 0), held(0, 8, 1)]
    behind = [held(1, 7, 1), held(1, 6, 0)]
    assert find_newest_state([ahead, behind]) == NewestState(1, 7, slots=(0, 1), senders=(0, 1))


def test_copies_of_an_earlier_start_count_until_the_next_one_has_them():
    first = [held(0, 7), held(1, 7)]
    second = [held(0, 5, generation=2)]
    assert find_newest_state([first + second]) == NewestState(1, 7, slots=(0, 0), senders=(0, 0))
    second += [held(1, 5, generation=2)]
    assert find_newest_state([first + second]) == NewestState(2, 5, slots=(0, 0), senders=(0, 0))


def test_a_start_with_another_number_of_ranks_is_another_state():
    assert find_newest_state([[held(0, 7, world=3), held(1, 7, world=3)]]) is None
    assert find_newest_state([[held(0, 7), held(1, 7, world=3)]]) is None


def test_nothing_is_nothing():
    assert find_newest_state([]) is None
    assert find_newest_state([[], []]) is None


def test_what_is_sealed_is_found(tmp_path):
    home = MemoryFolder(tmp_path, tmp_path / "run", "localhost", RUN)
    assert home.held() == []
    copies = [held(0, 7, 0), held(0, 8, 1), held(1, 7, 0)]
    for one in copies:
        seal(home, one)
    assert sorted(home.held(), key=str) == sorted(copies, key=str)
    assert from_text(to_text(copies)) == copies


@pytest.mark.parametrize("content", ["", "{", "[]", '{"world": 2}', '{"world": "x"}'])
def test_what_is_no_seal_is_passed_over(tmp_path, content):
    home = MemoryFolder(tmp_path, tmp_path / "run", "localhost", RUN)
    seal(home, held(0, 7))
    (home.generation(1) / folder.seal_file(0, 0)).write_text(content)
    assert home.held() == []


def test_earlier_starts_are_forgotten(tmp_path):
    home = MemoryFolder(tmp_path, tmp_path / "run", "localhost", RUN)
    for generation in (1, 2, 3):
        seal(home, held(0, 7, generation=generation))
    home.forget_before(3)
    assert [one.generation for one in home.held()] == [3]


def test_a_host_that_comes_with_copies_of_an_earlier_run_has_none_of_this_one(tmp_path):
    """Whole ones, of a start with a higher number."""
    of = {
        (host, run): MemoryFolder(tmp_path / host, tmp_path / "run", host, run)
        for host in ("stays", "comes")
        for run in ("earlier", RUN)
    }
    for host in ("stays", "comes"):
        (tmp_path / host).mkdir()
    for rank in (0, 1):
        seal(of["comes", "earlier"], held(rank, 9, generation=5))
        seal(of["stays", RUN], held(rank, 3, generation=2))
    told = [of[host, RUN].held() for host in ("comes", "stays")]
    assert find_newest_state(told) == NewestState(2, 3, slots=(0, 0), senders=(1, 1))
    assert folder.latest_generation(told) == 2


def test_a_run_forgets_those_before_it(tmp_path):
    earlier, now = (
        MemoryFolder(tmp_path, tmp_path / "run", "localhost", run) for run in ("earlier", RUN)
    )
    now.forget_other_runs()  # there are none
    for home in (earlier, now):
        seal(home, held(0, 7))
    now.forget_other_runs()
    assert (earlier.held(), now.held()) == ([], [held(0, 7)])


def test_a_run_removes_its_own_and_those_whose_output_is_gone(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "run").mkdir()
    homes = {
        name: MemoryFolder(tmp_path / "memory", tmp_path / name, "localhost", RUN)
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
    home = MemoryFolder(tmp_path, tmp_path / "run", "localhost", RUN)
    seal(home, held(0, 7))
    assert stat.S_IMODE(home.folder.stat().st_mode) == 0o700
    home.folder.chmod(0o755)
    assert home.held() == []
    with raises(MachineError, code="memory-folder-foreign"):
        home.make(2)


def test_a_link_is_not_followed(tmp_path):
    home = MemoryFolder(tmp_path, tmp_path / "run", "localhost", RUN)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    home.folder.symlink_to(tmp_path / "elsewhere")
    assert home.held() == []
    with pytest.raises(MachineError):
        home.make(1)


def squat(root: Path, target: Path, output: Path, host: str, how: str) -> None:
    """As another user leaves it there before a run begins, by all names that can be told."""
    digest = hashlib.sha256(str(output).encode()).hexdigest()[:16]
    for name in (f"gpumix-{os.getuid()}", "gpumix-", f"gpumix-{digest}"):
        place = root / name
        if how == "link":
            place.symlink_to(target)
            continue
        place.mkdir(mode=0o777)
        (place / digest).mkdir()
        (place / digest / host).symlink_to(target)
        (place / host).symlink_to(target)
        for mark in ("output", "whose.json"):
            if how == "pipe":
                os.mkfifo(place / mark)
            else:
                (place / mark).write_text(json.dumps({"output": str(output), "host": host}))
        os.chown(place, 65534, 65534)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be a second user")
@pytest.mark.parametrize("how", ["link", "folder", "pipe"])
def test_nothing_is_removed_through_what_another_user_left(tmp_path, how):
    """A link named as a run's folder led to what was removed; a pipe there was waited for."""
    memory, treasure, output = (tmp_path / name for name in ("memory", "home", "run"))
    memory.mkdir()
    output.mkdir()
    (treasure / "run-1").mkdir(parents=True)
    (treasure / "thesis").write_text("years")
    squat(memory, treasure, output, "localhost", how)
    before = sorted(path.name for path in memory.iterdir())
    home = MemoryFolder(memory, output, "localhost", RUN)
    seal(home, held(0, 7))
    home.forget_other_runs()
    assert home.held() == [held(0, 7)]
    home.remove()
    assert (treasure / "thesis").read_text() == "years"
    assert (treasure / "run-1").is_dir()
    assert sorted(path.name for path in memory.iterdir()) == before


def test_no_link_in_a_folder_of_copies_is_followed(tmp_path):
    home = MemoryFolder(tmp_path, tmp_path / "run", "localhost", RUN)
    seal(home, held(0, 7))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis").touch()
    (home.folder / "generation-00000000").symlink_to(tmp_path / "home")
    home.forget_before(5)
    home.remove()
    assert (tmp_path / "home" / "thesis").exists()


def test_nobody_can_tell_the_name_of_the_folder_without_the_run_s_id(tmp_path):
    assign_run_id(tmp_path, fresh=True)
    assert stat.S_IMODE((tmp_path / ".id").stat().st_mode) == 0o600
    names = {MemoryFolder(tmp_path, tmp_path, "localhost", run).folder.name for run in ("a", "b")}
    assert len(names) == 2
