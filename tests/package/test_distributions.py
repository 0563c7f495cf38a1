"""Wheel and source distribution hold what they should, and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest

import gpumix

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DATA = [
    "py.typed",
    "report/style.css",
    "hardware/estimates/catalogue.toml",
    "hardware/memory_limit/capped_alloc.cpp",
]
INFO = f"gpumix-{gpumix.__version__}.dist-info"


@pytest.fixture(scope="module")
def in_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def metadata(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        return Parser().parsestr(archive.read(f"{INFO}/METADATA").decode())


def sources() -> set[str]:
    """All files of the package."""
    found = (ROOT / "src").rglob("gpumix/**/*")
    files = (f for f in found if f.is_file() and "__pycache__" not in f.parts)
    return {f.relative_to(ROOT / "src").as_posix() for f in files}


def test_the_wheel_is_the_package(in_wheel):
    packaged = {name for name in in_wheel if not name.startswith(INFO)}
    assert packaged == sources()
    assert {f"gpumix/{name}" for name in DATA} <= packaged


def test_the_licence_goes_along(in_wheel):
    assert f"{INFO}/licenses/LICENSE" in in_wheel


def test_the_command_is_installed(wheel):
    with zipfile.ZipFile(wheel) as archive:
        points = archive.read(f"{INFO}/entry_points.txt").decode()
    assert "gpumix = gpumix.cli:main" in points


def test_the_metadata_says_what_the_project_does(metadata):
    assert metadata["Version"] == gpumix.__version__ == PROJECT["version"]
    assert set(metadata.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "# gpumix" in metadata.get_payload()


def test_the_source_distribution_holds_the_package_and_no_tests(distributions):
    (found,) = distributions.glob("*.tar.gz")
    with tarfile.open(found) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in sources()} <= names
    assert {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "PKG-INFO"} <= names
    assert {name.split("/")[0] for name in names if "/" in name} == {"src"}


@pytest.mark.extended
def test_the_source_distribution_builds_the_same_wheel(distributions, wheel, tmp_path):
    (found,) = distributions.glob("*.tar.gz")
    with tarfile.open(found) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    built = wheel_of(unpacked, tmp_path / "built")
    with zipfile.ZipFile(built) as ours, zipfile.ZipFile(wheel) as expected:
        assert {one.filename: one.CRC for one in ours.infolist()} == {
            one.filename: one.CRC for one in expected.infolist()
        }


def wheel_of(source: Path, folder: Path) -> Path:
    """That of a project's folder."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_the_changelog_has_this_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{PROJECT['version']}]" in text


def test_what_dev_needs_is_pinned():
    """Continuous integration installs by constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {name(line) for line in lines if "==" in line}
    assert {name(one) for one in needed("dev")} | {"torch", "pydantic"} <= pinned


def needed(extra: str) -> Iterator[str]:
    """What an extra brings, and the extras of this project that it names."""
    yield from PROJECT["dependencies"]
    for requirement in PROJECT["optional-dependencies"][extra]:
        own = re.fullmatch(r"gpumix\[(.*)\]", requirement)
        if own is None:
            yield requirement
        else:
            for other in own[1].split(","):
                yield from needed(other)


def name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower()
