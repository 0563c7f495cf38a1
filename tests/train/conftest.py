"""What tests of whole runs share; see `jobs.py`."""

from __future__ import annotations

import pytest
import torch

from gpumix.train import launch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    """A rank that never answers is waited for in its own tests only."""
    monkeypatch.setattr(launch, "GRACE_S", 5.0)
