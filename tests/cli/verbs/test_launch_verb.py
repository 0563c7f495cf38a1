"""`gpumix launch`: what stands before the script is for gpumix, what stands after it is not."""

from __future__ import annotations

import pytest

from helpers.runs.verbs import gpumix


@pytest.mark.parametrize("words", [("--cluster", "x.yaml"), ("--cluster=x.yaml", "--cluster=y")])
def test_own_options_after_a_script_are_told_once(tmp_path, words):
    script = tmp_path / "mine.py"
    script.write_text("")
    done = gpumix("launch", "--processes", "1", "--dry-run", script, "--size", "3", *words)
    assert done.exit_code == 0
    assert done.stderr.startswith("--cluster goes to the program; options of gpumix launch")
    assert len(done.stderr.splitlines()) == 1
    assert max(map(len, done.stderr.splitlines())) <= 80
