"""What tests of whole runs share; see `jobs.py`."""

from __future__ import annotations

import os

import pytest
import torch

from gpumix.train.processes import local_launcher
from helpers.runs.jobs import SHARED_PROFILES

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    """A rank that never answers is waited for in its own tests only."""
    monkeypatch.setattr(local_launcher, "GRACE_S", 5.0)


@pytest.fixture(scope="module", autouse=True)
def shared_profiles(tmp_path_factory):
    """A folder for what jobs measure, of all processes that run tests."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SHARED_PROFILES, str(folder / "profiles"))
        yield
