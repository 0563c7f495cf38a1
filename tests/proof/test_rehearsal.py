"""The whole proof, rehearsed with tiny shapes: what a GPU would meet first is met here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from commands import environment, run
from cuda_device.build import BuildError, library
from proof.lines import RESULTS, STAGE, read
from proof.stages import STAGES

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_proof.py"
NAMES = [stage.name for stage in STAGES]
# Of the usual rehearsals, each of which has what the other lacks.
ON_CPU = ["env", "oom", "resume", "doctor_check", "leftover"]
ON_DEVICE = ["env", "smoke", "speed", "predict", "unequal", "cli", "adapters"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

every_stage = pytest.param(NAMES, marks=pytest.mark.extended, id="every")


def test_each_stage_is_in_a_usual_rehearsal():
    assert {*ON_CPU, *ON_DEVICE} == {*NAMES}


@pytest.mark.parametrize("names", [pytest.param(ON_CPU, id="some"), every_stage])
def test_stages_are_rehearsed_on_the_cpu(tmp_path, names):
    assert rehearsed(tmp_path, "--cpu", "--only", *names) == (names, 0, 0)


@pytest.mark.parametrize("names", [pytest.param(ON_DEVICE, id="some"), every_stage])
def test_stages_are_rehearsed_on_the_cuda_device_for_tests(tmp_path, names):
    """No line of gpumix makes the host wait in a step; losses are those of plain loops."""
    try:
        library()
    except BuildError as error:
        pytest.skip(f"no CUDA device for tests: {error}")
    assert rehearsed(tmp_path, "--test-device", "--only", *names) == (names, 0, 0)
    waits = {
        one["what"]: one["figures"]["waits_in_step"]
        for one in read(tmp_path / "out" / RESULTS)
        if one["stage"] == "smoke" and "loss_off" in one["figures"] and one["what"] != STAGE
    }
    assert len(waits) == 8
    assert {name for name, times in waits.items() if times} <= {"state_on_host"}


def rehearsed(folder: Path, *words: str) -> tuple[list[str], int, int]:
    """The stages that ended, and how many lines failed or were skipped."""
    out = folder / "out"
    command = [sys.executable, str(SCRIPT), "--json", "--out", str(out), *words]
    env = environment(folder / "cache")
    done = run(command, folder=folder, env=env, timeout_s=380, fresh=True)
    assert done.code == 0, _errors(out) or done.err[-3000:]
    told = json.loads(done.out.splitlines()[-1])
    ended = [one["stage"] for one in read(out / RESULTS) if one["what"] == STAGE]
    assert told["stages"] == len(ended)
    return ended, told["failed"], told["skipped"]


def _errors(out: Path) -> str:
    return "\n".join(
        f"{one['stage']}, {one['what']}: {one['bar']} {one['error']}"
        for one in read(out / RESULTS)
        if one["ok"] is False
    )
