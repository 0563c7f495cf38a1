"""Verbs and options are completed in bash, once that is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.extended import every_second

INSTALL = "gpumix --install-completion >/dev/null; source ~/.bashrc; complete -p gpumix >&2"
TAB = """
COMP_WORDS=({line}) COMP_CWORD={place}
_gpumix_completion gpumix
echo "${{COMPREPLY[@]}}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    "lines", every_second([{"gpumix plan --str": 2}, {"gpumix pl": 1, "gpumix plan --str": 2}])
)
def test_bash_completes_verbs_and_options(tmp_path, lines):
    script = INSTALL + "".join(TAB.format(line=line, place=n) for line, n in lines.items())
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        env=os.environ | {"HOME": str(tmp_path), "PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == ["plan", "--strategy"][-len(lines) :], done.stderr
    assert "-F _gpumix_completion gpumix" in done.stderr
