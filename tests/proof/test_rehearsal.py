"""The whole proof, rehearsed with tiny shapes: what a GPU would meet first is met here."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Collection
from importlib import import_module
from pathlib import Path

import pytest

from cuda_device.build import BuildError, library
from helpers.processes.commands import environment, run
from helpers.processes.harness import run_ranks
from proof.lines import RESULTS, STAGE, Lines, Stamp, read
from proof.stages import STAGES

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_proof.py"
NAMES = [stage.name for stage in STAGES]
# Of the usual rehearsal: one that trains in a command, the checks, and one that trains by itself.
ON_CPU = ["env", "predict", "doctor_check", "adapters"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize("name", NAMES)
def test_a_stage_is_a_module_that_can_be_run(name):
    assert callable(import_module(f"proof.{name}").run)


def test_tests_that_are_left_for_the_end_are_there():
    leftover = import_module("proof.leftover")
    assert (leftover.ROOT / leftover.TESTS).is_file()


def test_the_engine_trains_as_a_plain_loop_does(tmp_path):
    """A part of stage `smoke`, without the command."""
    ways = ("fp32_layered", "sequential", "chunked_cross_entropy")
    (found,) = run_ranks(smoke_in, 1, tmp_path, ways, timeout_s=120)
    assert found == dict.fromkeys(("plain_fp32", "plain_bf16", *ways, STAGE), True)


def smoke_in(folder: Path, ways: Collection[str]) -> dict[str, bool]:
    """Whether each measurement is well."""
    from proof import smoke
    from proof.bench import Bench

    smoke.VARIANTS = tuple(one for one in smoke.VARIANTS if one.name in ways)
    lines = Lines(folder / RESULTS, Stamp("cpu", "2.11.0", "abc"))
    bench = Bench("smoke", "cpu", folder, time.monotonic() + 100.0, lines)
    outcome = smoke.run(bench)
    bench.tell(STAGE, outcome.figures, outcome.bars, error="; ".join(bench.failed))
    return {one["what"]: one["ok"] for one in read(folder / RESULTS)}


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(ON_CPU, id="some"),
        pytest.param(NAMES, marks=pytest.mark.extended, id="every"),
    ],
)
def test_stages_are_rehearsed_on_the_cpu(tmp_path, names):
    assert rehearsed(tmp_path, "--cpu", "--only", *names) == (names, 0, 0)


@pytest.mark.extended
def test_every_stage_is_rehearsed_on_the_cuda_device_for_tests(tmp_path):
    """No line of gpumix makes the host wait in a step; losses are those of plain loops."""
    try:
        library()
    except BuildError as error:
        pytest.skip(f"no CUDA device for tests: {error}")
    assert rehearsed(tmp_path, "--test-device") == (NAMES, 0, 0)
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
    for stage in ("doctor_check", "leftover") if "--cpu" in words else ():
        if stage in words:  # faults and tests that only a GPU shows
            assert re.search(rf"(?m)\b{stage}: \S+ s, not tested here$", done.err)
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
