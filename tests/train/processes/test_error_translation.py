"""Errors of the job's own code are told from bugs of gpumix, by the files on their way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import gpumix
from gpumix.schema.errors import MachineError, TrainingError
from gpumix.schema.plan.stage import Mode
from gpumix.train.processes.error_translation import JOB_CALLERS, WRAPPERS, translate_error
from helpers.paths import TESTS
from helpers.training.models import Block, Regression, vectors
from helpers.training.reference import engine_alone


def test_all_files_are_there():
    package = Path(gpumix.__file__).parent
    assert [name for name in (*JOB_CALLERS, *WRAPPERS) if not (package / name).exists()] == []


class Broken(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ torch.ones(3, 3)


class BrokenLoss(Regression):
    def error(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return super().error(x, target[:, :3])


@pytest.mark.parametrize("order", ["layered", "sequential"])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("whole", [lambda: Regression([Broken()]), lambda: BrokenLoss([Block()])])
def test_what_a_model_raises_is_its_own(order, recompute, whole):
    mode = Mode(order=order, recompute=recompute)
    engine = engine_alone(whole, 2, 2, mode=mode, zero_stage=1)
    with pytest.raises(RuntimeError) as caught:
        engine.step(vectors(2, torch.Generator().manual_seed(0)))
    error = translate_error(caught.value, "rank 0")
    assert isinstance(error, TrainingError)
    assert error.what.startswith("the job's own code failed: RuntimeError: ")
    assert str(TESTS) in error.where


def test_a_file_that_cannot_be_used_is_the_place_of_its_error(tmp_path):
    with pytest.raises(OSError) as caught:
        (tmp_path / "a" / "b").read_bytes()
    error = translate_error(caught.value, "rank 1")
    assert isinstance(error, MachineError)
    assert error.where == f"rank 1, {tmp_path / 'a' / 'b'}"
    assert error.what == "No such file or directory"
    assert "pathlib" in error.why
