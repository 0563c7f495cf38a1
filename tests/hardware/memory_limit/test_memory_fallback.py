"""The allocator is built once by any number of ranks; without a compiler nothing is limited."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from gpumix.hardware.memory_limit import build_allocator, limit_memory
from gpumix.schema import files
from helpers.processes.harness import run_ranks


def limited(environment: dict[str, str]) -> tuple[bool, int | None, int | None, str]:
    """On a rank: how memory is counted, where twice the limit was asked for without an error."""
    os.environ.update(environment)
    memory = limit_memory(2**20)
    found = (memory.exact, memory.current_bytes, memory.peak_bytes, memory.why_inexact)
    assert torch.empty(2**21, dtype=torch.uint8).numel() == 2**21
    return found


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"PATH": "/nowhere"}, "no C++ compiler on PATH"),
        ({"CXX": "/nowhere/c++"}, "/nowhere/c++: "),
        ({"CXX": "false"}, "false: exit code 1"),
    ],
    ids=["no compiler", "no such compiler", "a failing compiler"],
)
def test_without_a_compiler_nothing_is_limited_and_it_says_why(tmp_path, environment, why):
    environment = {"XDG_CACHE_HOME": str(tmp_path), **environment}
    ((*counts, reason),) = run_ranks(limited, 1, environment)
    assert counts == [False, None, None]
    assert reason.startswith(why)
    assert not list(tmp_path.rglob("*.so"))


def test_a_cache_that_cannot_be_written_falls_back(tmp_path):
    (tmp_path / "gpumix").write_text("a file where the folder should be")
    ((*counts, reason),) = run_ranks(limited, 1, {"XDG_CACHE_HOME": str(tmp_path)})
    assert counts == [False, None, None]
    assert reason.startswith("cannot write to ")


def limited_by_no_library(folder: Path) -> tuple[bool, str]:
    os.environ["XDG_CACHE_HOME"] = str(folder)
    library = (
        files.make_private_folder(build_allocator.cache_folder() / build_allocator.LIBRARY_FOLDER)
        / f"capped_alloc-{build_allocator._hash_build()}.so"
    )
    library.write_bytes(b"not a library")
    memory = limit_memory(None)
    return memory.exact, memory.why_inexact


def test_a_library_that_cannot_be_loaded_falls_back(tmp_path):
    ((exact, reason),) = run_ranks(limited_by_no_library, 1, tmp_path)
    assert not exact
    assert reason.startswith("cannot load ")


def built(folder: Path) -> bool:
    os.environ.clear()
    os.environ |= {"XDG_CACHE_HOME": str(folder), "PATH": "/usr/local/bin:/usr/bin:/bin"}
    return limit_memory(None).exact


@pytest.mark.extended
def test_ranks_that_build_at_the_same_time_share_one_library(tmp_path):
    assert run_ranks(built, 2, tmp_path) == [True] * 2
    assert len(list((tmp_path / "gpumix").iterdir())) == 1
