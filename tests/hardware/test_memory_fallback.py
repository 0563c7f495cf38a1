"""The allocator is built once by any number of ranks; without a compiler nothing is limited."""

from __future__ import annotations

import subprocess
import sys

import pytest

NOT_LIMITED = """
    import torch
    from gpumix.hardware.memory import limit_memory

    memory = limit_memory(2**20)
    print(memory.exact, memory.current_bytes, memory.peak_bytes)
    print(memory.why_inexact)
    print(torch.empty(2**21, dtype=torch.uint8).numel())
"""


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"PATH": "/nowhere"}, "no C++ compiler on PATH"),
        ({"CXX": "/nowhere/c++"}, "/nowhere/c++: "),
        ({"CXX": "false"}, "false: exit code 1"),
    ],
    ids=["no compiler", "no such compiler", "a failing compiler"],
)
def test_without_a_compiler_nothing_is_limited_and_it_says_why(
    run_python, tmp_path, environment, why
):
    done = run_python(NOT_LIMITED, XDG_CACHE_HOME=str(tmp_path), **environment)
    counts, reason, allowed = done.stdout.splitlines()
    assert counts == "False None None"
    assert reason.startswith(why)
    assert allowed == str(2**21)
    assert not list(tmp_path.rglob("*.so"))


def test_a_cache_that_cannot_be_written_falls_back(run_python, tmp_path):
    (tmp_path / "gpumix").write_text("a file where the folder should be")
    done = run_python(NOT_LIMITED, XDG_CACHE_HOME=str(tmp_path))
    assert done.stdout.startswith("False None None\ncannot write to ")


def test_a_library_that_cannot_be_loaded_falls_back(run_python, tmp_path):
    code = """
        from gpumix.hardware.memory import build, limit_memory
        library = build.cache_folder() / f"capped_alloc-{build._key()}.so"
        library.parent.mkdir()
        library.write_bytes(b"not a library")
        memory = limit_memory(None)
        print(memory.exact, memory.why_inexact)
    """
    assert "False cannot load " in run_python(code, XDG_CACHE_HOME=str(tmp_path)).stdout


def test_ranks_that_build_at_the_same_time_share_one_library(tmp_path):
    code = "from gpumix.hardware.memory import limit_memory; print(limit_memory(None).exact)"
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/local/bin:/usr/bin:/bin"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(2)
    ]
    assert [rank.communicate(timeout=120)[0].strip() for rank in ranks] == ["True"] * 2
    assert len(list((tmp_path / "gpumix").iterdir())) == 1
