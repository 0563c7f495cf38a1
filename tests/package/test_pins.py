"""What continuous integration installs is within what the package asks for, extra by extra."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"] | {"": PROJECT["dependencies"]}


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


@pytest.mark.parametrize("extra", sorted(EXTRAS))
def test_each_requirement_is_pinned_within_its_range(extra):
    for wanted in map(Requirement, EXTRAS[extra]):
        if canonicalize_name(wanted.name) == PROJECT["name"]:
            assert wanted.extras <= set(EXTRAS)
        else:
            assert wanted.specifier.contains(pins()[canonicalize_name(wanted.name)]), str(wanted)
