"""What of a host the data of one rank may take."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpumix.data import host
from gpumix.data.host import MEMORY_PART, MOST_BYTES, batch_memory_bytes, cores_for, cores_here
from staging import rows, staged_plan

GIB = 2**30


@pytest.fixture
def alone(monkeypatch):
    """Not one of torchrun's ranks."""
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_ranks_of_one_host_share_what_batches_ahead_may_take(monkeypatch, alone):
    monkeypatch.setattr(host, "available_host_bytes", lambda: 20 * GIB)
    assert batch_memory_bytes([4, 4], 0) == int(20 * GIB * MEMORY_PART)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert batch_memory_bytes([1] * 8, 0) == int(20 * GIB * MEMORY_PART / 4)
    monkeypatch.setattr(host, "available_host_bytes", lambda: 10**6 * GIB)
    assert batch_memory_bytes([1] * 8, 0) == MOST_BYTES


def test_a_plan_says_who_shares_a_host(monkeypatch, alone):
    monkeypatch.setattr(host, "available_host_bytes", lambda: 20 * GIB)
    plan = staged_plan("gpt2", rows([6, 2]), zero_stage=1)
    assert len({worker.host for worker in plan.workers}) == 1
    assert [batch_memory_bytes(plan, rank) for rank in (0, 1)] == [GIB, GIB]
    assert cores_for(plan, 0) == 3 * cores_for(plan, 1)


def files(folder: Path, **contents: str) -> dict[str, Path]:
    for name, content in contents.items():
        (folder / name).write_text(content)
    return {name: folder / name for name in contents}


@pytest.mark.parametrize(
    ("contents", "cores"),
    [
        ({"max": "50000 100000\n"}, 0.5),
        ({"max": "max 100000\n"}, None),
        ({"quota": "50000\n", "period": "100000\n"}, 0.5),
        ({"quota": "-1\n", "period": "100000\n"}, None),
        ({}, None),
    ],
)
def test_the_quota_of_a_container_counts(monkeypatch, tmp_path, contents, cores):
    """By either version of control groups; -1 and "max" are none."""
    for name in ("max", "quota", "period"):
        monkeypatch.setattr(host, f"_{name}".upper(), tmp_path / name)
    all_of_them = cores_here()
    files(tmp_path, **contents)
    assert cores_here() == (cores or all_of_them)
