"""The script with Lightning: its strategy is changed, and the losses are not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers.scripts import changed_imports
from helpers.scripts.changed_imports import BATCH, STEPS, launched, losses_before

pytest.importorskip("lightning")
# As `integrations/test_lightning`, of a whole program.
pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(300)]

NAME = "lightning_clm"
CHANGED = re.compile(r"^(from gpumix\S+ import GpumixStrategy|        strategy=.*)\n", re.M)


def test_two_lines_are_changed_and_the_losses_are_the_same(tmp_path, monkeypatch):
    def stock(script: Path) -> str:
        text, changed = CHANGED.subn("", script.read_text(encoding="utf-8"))
        assert changed == 2
        return text

    monkeypatch.setattr(changed_imports, "stock", stock)
    expected = losses_before(NAME, tmp_path)
    found = launched(NAME, tmp_path)
    assert len(expected) == STEPS and expected[-1] < expected[0]
    assert found.losses == pytest.approx(expected, rel=1e-5)
    assert found.samples[0] > found.samples[1] and sum(found.samples) == BATCH
