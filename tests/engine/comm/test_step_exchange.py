"""What a rank tells the others in a step, beside its losses."""

from __future__ import annotations

import torch

from gpumix.engine.comm.step_exchange import StepTable

CPU = torch.device("cpu")


def test_a_row_holds_what_the_rank_tells():
    row = StepTable.row(CPU, 1.0, 2.5, torch.tensor(3.0))
    assert row.tolist()[:5] == [0.0, 0.0, 1.0, 2.5, 3.0]


def test_a_number_that_is_none_is_told_too():
    row = StepTable.row(CPU, 0.0, float("nan"), 0.0)
    assert row.nan_to_num(nan=7.0).tolist()[:5] == [0.0, 0.0, 0.0, 7.0, 0.0]
