"""The benchmarks on published data, and their importers; skipped where the data is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture(autouse=True)
def the_data_is_here():
    from published import DATA

    if not DATA.exists():
        pytest.skip(f"the published measurements are not here: {DATA}")
