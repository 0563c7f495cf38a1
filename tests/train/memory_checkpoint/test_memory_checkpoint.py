"""State in the memory of hosts, taken up by other ranks on other hosts, to the bit."""

from __future__ import annotations

import math
import random
import shutil
import time
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gpumix.engine.rank_group import RankGroup
from gpumix.schema.errors import InputError, RankLost
from gpumix.train.checkpoint.host_copy import HostCopy
from gpumix.train.memory_checkpoint import memory_folder, reader
from gpumix.train.memory_checkpoint.checkpointer import MemoryCheckpointer
from gpumix.train.memory_checkpoint.memory_folder import MemoryFolder
from gpumix.train.memory_checkpoint.rank_on_host import RankOnHost
from gpumix.train.memory_checkpoint.replication import BuddyReplicator, assign_buddies
from helpers.errors import raises
from helpers.extended import every_second, left_out
from helpers.processes.harness import run_ranks
from helpers.training.checkpoints import (
    ALONE,
    UNEVEN,
    assert_same,
    blank,
    model_values,
    optimizer_values,
    train,
    trained,
    whole,
)
from helpers.training.reference import random_shares


def home_of(folder: Path, hosts: str, rank: int) -> MemoryFolder:
    """That of a rank; `hosts` are their names by rank. Each host has memory of its own."""
    memory = folder / hosts[rank]
    memory.mkdir(exist_ok=True)
    return MemoryFolder(memory, folder / "run", hosts[rank], "only")


def all_ranks() -> RankGroup:
    if not dist.is_initialized():
        return RankGroup(None, rank=0, world=1, device=torch.device("cpu"), timeout_s=20)
    store = dist.PrefixStore("words", dist.distributed_c10d._get_default_store())
    return RankGroup(
        store,
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        device=torch.device("cpu"),
        timeout_s=20,
    )


def copier(
    folder: Path, hosts: str, ranks: RankGroup, generation: int = 1, **settings: Any
) -> MemoryCheckpointer:
    home, second = home_of(folder, hosts, ranks.rank), None
    if len(set(hosts)) > 1:
        second = BuddyReplicator(home.make(generation), hosts, dist.new_group(backend="gloo"))
    return MemoryCheckpointer(
        home,
        generation,
        place=RankOnHost(ranks.rank, hosts),
        extra=lambda: {"note": [0.1, None]},
        buddies=second,
        **settings,
    )


def _copy(folder: Path, shares: Any, hosts: str, copies: int = 1, settings: Any = None) -> Any:
    """The state after two steps, and then after each further one."""
    with all_ranks() as ranks:
        engine, optimizer = trained(shares, **settings or {})
        memory = copier(folder, hosts, ranks)
        for copy in range(copies):
            if copy:
                train(engine, optimizer, shares, range(1 + copy, 2 + copy))
            memory.begin(2 + copy, engine, optimizer, {"position": 12 + copy})
            memory.finish()
        assert not memory.refused
        return model_values(engine), optimizer_values(engine, optimizer)


def _take_up(folder: Path, shares: Any, hosts: str, settings: Any = None) -> Any:
    with all_ranks() as ranks:
        engine, optimizer = blank(shares, **settings or {})
        home = home_of(folder, hosts, ranks.rank)
        held = home.held()
        told = ranks.gather("held", memory_folder.to_text(held))
        found = memory_folder.find_newest_state([memory_folder.from_text(text) for text in told])
        assert found is not None
        group = dist.group.WORLD if ranks.world > 1 else None
        state = reader.load_state(home, held, found, ranks, group, engine, optimizer)
        return state, model_values(engine), optimizer_values(engine, optimizer), engine.steps


AGAIN = list(product(("cab", "ba", "aabb"), range(2)))


@pytest.mark.parametrize(("hosts", "seed"), left_out(AGAIN, AGAIN[1:]))
def test_any_plan_takes_up_any_other_from_any_host(tmp_path, hosts, seed):
    """Four ranks on two hosts; then some on these, or also on a third that has nothing."""
    rng = random.Random(seed)
    saved = run_ranks(_copy, 4, tmp_path, random_shares(4, rng), "aabb")
    model, optimizer = saved[0][0], whole([rank[1] for rank in saved])
    world = len(hosts)
    taken = run_ranks(_take_up, world, tmp_path, random_shares(world, rng), hosts)
    for state, values, _, steps in taken:
        assert_same(values, model)
        assert (state.step, steps) == (2, 2)
        assert state.cursor == {"position": 12}
        assert state.extra == {"note": [0.1, None]}
    assert_same(whole([rank[2] for rank in taken]), optimizer)


def _copy_that_hangs(folder: Path) -> None:
    with all_ranks() as ranks:
        engine, optimizer = trained(ALONE)
        memory = copier(folder, "a", ranks, patience_s=0.2)
        with mock.patch.object(HostCopy, "fill", lambda *given, **more: time.sleep(60)):
            memory.begin(2, engine, optimizer, {})
            with raises(RankLost, code="checkpoint-io-timeout", what=0) as caught:
                memory.settle()
        assert "has not come back" in caught.value.why and "--resume" in caught.value.fix


def test_a_copy_that_hangs_is_a_lost_rank(tmp_path):
    """All start again then: a disk, which nobody would mend by that, has no part in it."""
    run_ranks(_copy_that_hangs, 1, tmp_path)


@pytest.mark.parametrize("lost", every_second("ab"))
def test_a_host_may_be_lost(tmp_path, lost):
    """With all of its memory: each rank's second copy is on another one."""
    saved = run_ranks(_copy, 4, tmp_path, UNEVEN, "aaab", 3)
    shutil.rmtree(tmp_path / lost)
    left = "b" if lost == "a" else "a"
    ((state, values, optimizer, _),) = run_ranks(_take_up, 1, tmp_path, ALONE, left)
    assert state.step == 4
    assert_same(values, saved[0][0])
    assert_same(whole([optimizer]), whole([rank[1] for rank in saved]))


@pytest.mark.parametrize("hosts", ["ab", "aab", "abc", "aabbb", "abcabca"])
def test_second_copies_are_on_other_hosts_and_spread(hosts):
    found = assign_buddies(hosts)
    assert all(hosts[rank] != hosts[buddy] for rank, buddy in enumerate(found))
    most = max(found.count(rank) for rank in range(len(hosts)))
    assert most <= math.ceil(max(map(hosts.count, hosts)) / min(map(hosts.count, hosts)))


@pytest.mark.extended
@pytest.mark.parametrize("stage", [0, 1])
def test_where_ranks_have_the_same_parameters(tmp_path, stage):
    settings = {"zero_stage": stage}
    saved = run_ranks(_copy, 4, tmp_path, UNEVEN, "aabb", 1, settings)
    taken = run_ranks(_take_up, 4, tmp_path, UNEVEN, "bbaa", settings)
    for rank in taken:
        assert_same(rank[1], saved[0][0])


@pytest.mark.extended
def test_the_last_of_several_copies_counts(tmp_path):
    saved = run_ranks(_copy, 1, tmp_path, ALONE, "a", 4)
    ((state, values, optimizer, _),) = run_ranks(_take_up, 1, tmp_path, ALONE, "a")
    assert state.step == 5
    assert_same(values, saved[0][0])
    assert_same(whole([optimizer]), whole([saved[0][1]]))


def _without_room(folder: Path) -> tuple[str, str]:
    from gpumix.train.memory_checkpoint import checkpointer

    checkpointer.has_room_for = lambda size, ranks: False
    with all_ranks() as ranks:
        engine, optimizer = trained(ALONE)
        memory = copier(folder, "a", ranks)
        memory.begin(2, engine, optimizer, {})
        memory.finish()
        first = memory.refused
        memory.begin(3, engine, optimizer, {})  # training goes on
        memory.finish()
        return first, memory.refused


def test_a_host_without_room_goes_without(tmp_path):
    ((first, second),) = run_ranks(_without_room, 1, tmp_path)
    assert first == second
    assert first.startswith("the host has no memory for 2 copies of ")
    assert home_of(tmp_path, "a", 0).held() == []


def _of_another_model(folder: Path) -> None:
    _copy(folder, ALONE, "a")
    place = home_of(folder, "a", 0).generation(1)
    file = place / memory_folder.seal_file(0, 0)
    file.write_text(file.read_text().replace('"model": "', '"model": "x'))
    _take_up(folder, ALONE, "a")


def test_of_another_model_it_is_refused(tmp_path):
    with raises(InputError, code="checkpoint-of-another-model"):
        run_ranks(_of_another_model, 1, tmp_path)
