"""The whole proof, rehearsed with tiny shapes: what a GPU would meet first is met here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from commands import environment, run
from proof.lines import RESULTS, STAGE, read
from proof.stages import STAGES

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_proof.py"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_stage_is_rehearsed_on_the_cpu(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, str(SCRIPT), "--cpu", "--json", "--out", str(out)]
    env = environment(tmp_path / "cache")
    done = run(command, folder=tmp_path, env=env, timeout_s=380)
    assert done.code == 0, _errors(out) or done.err[-3000:]
    told = json.loads(done.out.splitlines()[-1])
    assert (told["stages"], told["failed"], told["skipped"]) == (len(STAGES), 0, 0)
    assert {one["stage"] for one in read(out / RESULTS) if one["what"] == STAGE} == {
        stage.name for stage in STAGES
    }


def _errors(out: Path) -> str:
    return "\n".join(
        f"{one['stage']}, {one['what']}: {one['bar']} {one['error']}"
        for one in read(out / RESULTS)
        if one["ok"] is False
    )
