"""What NCCL's ranks did last is kept with the run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpumix.hardware.host.environment import record_collectives
from gpumix.train.run_log import run_files
from helpers.extended import left_out
from helpers.runs.jobs import gpumix, plan_for, toy, write_job


def test_files_go_into_the_run_and_what_is_set_stays(monkeypatch):
    monkeypatch.setattr(os, "environ", {"TORCH_FR_BUFFER_SIZE": "7"})
    record_collectives(Path("run/flight-recorder/rank_"))
    assert os.environ == {
        "TORCH_FR_BUFFER_SIZE": "7",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": "run/flight-recorder/rank_",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "run/flight-recorder/rank_",
    }


@pytest.mark.parametrize("has_dumps", left_out([True, False], [False]))
def test_a_run_that_fails_says_where_they_are(tmp_path, has_dumps):
    job = write_job(tmp_path, model=toy(fault="raise", at=4), max_steps=4)
    plan_for(job).save(tmp_path / "plan.json")
    dumps = tmp_path / "run" / run_files.COLLECTIVES
    if has_dumps:
        dumps.mkdir(parents=True)
        (dumps / "rank_0").touch()
    done = gpumix("train", job, "--plan", "plan.json", folder=tmp_path)
    assert done.code == 5
    assert ("torchfrtrace -p rank_" in done.err) is has_dumps
