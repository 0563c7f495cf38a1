"""Scripts with Trainer, SFTTrainer and Accelerator: with one line changed they train to the same
losses on unlike devices."""

from __future__ import annotations

import pytest

from changed_imports import SCRIPTS, STEPS, losses_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("name", SCRIPTS)
def test_one_line_is_changed_and_the_losses_are_the_same(name, tmp_path):
    expected = losses_of(name, tmp_path, changed=False)
    found = losses_of(name, tmp_path, changed=True)
    assert len(expected) == STEPS
    assert found == pytest.approx(expected, rel=1e-4)
