"""Folders of this repository, for tests in any of its rooms."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
BENCHMARKS, DOCS, EXAMPLES = ROOT / "benchmarks", ROOT / "docs", ROOT / "examples"
USER_CODE = TESTS / "helpers" / "user_code"
