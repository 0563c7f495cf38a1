"""`gpumix train` on the GPUs that are found. `pytest -m gpu tests/train`."""

from __future__ import annotations

import pytest
import torch
from jobs import metrics, toy, train, write_job

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_job_trains_as_on_the_cpu(tmp_path):
    """Detects, measures, plans and trains; memory stays within what was planned."""
    changes = {"model": toy(width=256, blocks=4), "steps": 8, "global_batch": 16}
    found = train(write_job(tmp_path / "gpu", cluster=None, **changes))
    expected = train(write_job(tmp_path / "cpu", **changes))
    assert found.losses == pytest.approx(expected.losses, rel=1e-3)
    for record in metrics(tmp_path / "gpu" / "run", "classes")[-1]["classes"]:
        assert record["peak_bytes"] <= record["planned_peak_bytes"] / 0.97
