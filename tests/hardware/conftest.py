"""A fresh Python, for what can be done only once in a process; and a process at rest."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def no_garbage():
    """Tensors that cycles of earlier tests hold are freed now, not in the middle of this one."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def run_python():
    """Runs code in a process of its own and returns its result; the code must succeed."""

    def run(code, **env):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, **env},
        )
        assert done.returncode == 0, done.stderr
        return done

    return run
