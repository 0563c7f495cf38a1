"""Training from a notebook: the example's cells run, and what goes wrong in a process is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpumix.hardware import runtime
from gpumix.launch.notebook import notebook_launcher
from gpumix.schema.errors import InputError, MachineError
from helpers.errors import raises

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
CLUSTER = "- {class: fast, emulate: 8 GFLOP/s, memory: 512 MiB, count: 2}\n"


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What a kernel does with cells: their code in one process, not in an importable file."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def cells() -> str:
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(c["source"]) for c in found if c["cell_type"] == "code")


@pytest.mark.slow
def test_the_notebook_trains_the_same_on_one_device_and_on_two(tmp_path):
    done = run(cells(), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(losses) == 12
    assert float(losses[5]) < float(losses[0])


FAILING = """
import os
from gpumix import notebook_launcher

def train(words):
    if os.environ["RANK"] == "1":
        raise ValueError(f"not like this: {words}")

notebook_launcher(train, ("these",), cluster="cluster.yaml")
"""


def test_a_process_that_fails_is_named_with_its_error(tmp_path):
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    done = run(FAILING, tmp_path)
    assert done.returncode == 1
    assert "ValueError: not like this: these" in done.stderr
    assert "TrainingError: training from the notebook failed: rank 1 left with exit code 5" in (
        done.stderr
    )


def test_arguments_reach_every_process_and_values_of_the_notebook_too(tmp_path):
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    code = """
import os
from gpumix import notebook_launcher
known = "of the notebook"
def train(a, b):
    open(f"rank-{os.environ['RANK']}", "w").write(f"{a} {b} {known} {os.environ['WORLD_SIZE']}")
notebook_launcher(train, (1, 2), cluster="cluster.yaml", num_processes=2)
"""
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"rank-{n}").read_text() for n in (0, 1)] == ["1 2 of the notebook 2"] * 2


def test_a_gpu_in_use_and_a_wrong_number_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    with raises(InputError, code="process-count-mismatch", what=(2, "num_processes", 3)):
        notebook_launcher(print, cluster=path, num_processes=3)
    monkeypatch.setattr(runtime, "is_initialized", lambda: True)
    with raises(MachineError, code="notebook-uses-gpu") as caught:
        notebook_launcher(print, cluster=path)
    assert "restart the kernel" in caught.value.fix
