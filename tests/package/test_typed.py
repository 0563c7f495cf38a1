"""Who installs gpumix gets its types: mypy sees them in an installed wheel."""

from __future__ import annotations

import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import gpumix

PROGRAM = """\
import gpumix

for name in ({names},):
    pass
reveal_type(gpumix.plan)
reveal_type(gpumix.Plan.load)
reveal_type(gpumix.Loader.replan)
gpumix.plan("profile.json", 64)
"""


@pytest.mark.extended
def test_mypy_sees_the_types_of_an_installed_package(wheel, tmp_path):
    python = installed(wheel, tmp_path)
    names = ", ".join(f"gpumix.{name}" for name in gpumix.__all__)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(names=names), encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--python-executable", str(python)]
    options = [
        "--ignore-missing-imports",
        "--cache-dir",
        str(tmp_path / "cache"),
        "--no-error-summary",
    ]
    done = subprocess.run(
        [*command, *options, str(program)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    told = done.stdout
    assert "py.typed" not in told  # "... or missing py.typed marker"
    revealed = re.findall(r'Revealed type is "(.*)"', told)
    assert len(revealed) == 3
    assert all(one.startswith("def (") and "gpumix." in one for one in revealed)
    assert 'Argument 1 to "plan" has incompatible type "str"; expected "Profile"' in told
    assert "has no attribute" not in told


def installed(wheel: Path, folder: Path) -> Path:
    """The interpreter of an environment that has nothing but the wheel."""
    made = folder / "environment"
    venv.create(made, with_pip=False, symlinks=True)
    (site,) = made.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return made / "bin" / "python"
