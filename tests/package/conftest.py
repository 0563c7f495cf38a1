"""The distributions, built once, by the back end that pip and build call, without a network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("distributions")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-t", "wheel"]
    done = subprocess.run(
        [*command, "-d", str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def wheel(distributions: Path) -> Path:
    (found,) = distributions.glob("*.whl")
    return found
