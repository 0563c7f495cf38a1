"""Scripts with Trainer, SFTTrainer and Accelerator: with one line changed they train to the same
losses on unlike devices, started as their readers start them."""

from __future__ import annotations

import pytest

from changed_imports import BATCH, SCRIPTS, STEPS, Launched, launched, losses_before
from gpumix.spec.plan import Plan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def check(found: Launched, expected: list[float]) -> None:
    assert len(expected) == STEPS
    assert found.losses == pytest.approx(expected, rel=1e-4)
    first, second = found.samples
    assert first > second and first + second == BATCH


@pytest.mark.parametrize("name", SCRIPTS)
def test_one_line_is_changed_and_the_losses_are_the_same(name, tmp_path):
    expected = losses_before(name, tmp_path)
    found = launched(name, tmp_path)
    check(found, expected)
    if name != "clm_no_trainer":  # a loop of one's own has no folder
        plan = Plan.load(found.output / "gpumix" / "plan.json")
        assert [worker.samples for worker in plan.workers] == found.samples
    if name == "run_clm":
        again = tmp_path / "torchrun"
        again.mkdir()
        check(launched(name, again, torchrun=True), expected)
