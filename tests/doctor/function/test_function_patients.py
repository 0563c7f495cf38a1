"""What patients say of themselves, by what their last windows showed."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpumix.data.workers.autotune import Limit
from gpumix.doctor.function.function_patient import FunctionPatient
from gpumix.doctor.function.observations import (
    LoaderObservation,
    Observations,
    OperationCounts,
    RepeatedLine,
    Site,
)
from gpumix.doctor.job import JobPatient

# Ten steps of a tenth of a second, half of which the loop waits; on two cores, without a GPU.
LOADER = LoaderObservation("train.py:5", 2, 16, True, False, 0.5, 0.0, 0, 160)
STARVED = Observations(steps=10, seconds=1.0, losses=(1.0,), loaders=(LOADER,), cores=2.0)


def remarks(seen: Observations, **given: Any) -> list[str]:
    made = FunctionPatient("train:main", Path(), Path(), 10, 1, windows=[seen], **given)
    return [one.text for one in made.remarks()]


def test_a_cpu_that_reads_and_computes_with_all_of_its_cores():
    (remark,) = remarks(STARVED, cpu_s=1.95)
    assert "50% of a step, and all 2 cores are busy (98%)" in remark
    (remark,) = remarks(STARVED, cpu_s=1.0)  # of two cores half a one is free
    assert remark.startswith("training still waits for its data in 50% of a step: make reading")
    waits_for_nothing = replace(STARVED, loaders=())
    assert remarks(waits_for_nothing, cpu_s=1.95) == []


def test_what_holds_a_loader_back_that_knows():
    own = replace(LOADER, tunes=True, limit=Limit.CORES)
    little = replace(LOADER, waited_s=0.1, limit=Limit.DEVICE)
    (remark,) = remarks(replace(STARVED, loaders=(little, own)))
    assert remark.startswith("training still waits for its data in 60% of a step, held back by")


def test_time_that_is_no_loaders():
    """Its lines are those of the first look, whose steps may have taken longer."""
    log = Site("train.py:9", "log.write(line)", calls=80, seconds=0.8)
    other = Site("train.py:8", "rows.append(row)", calls=20, seconds=0.2)
    first = replace(STARVED, loaders=(), seconds=1.5, between_s=1.0, between=(log, other))
    (remark,) = remarks(replace(STARVED, loaders=(), between_s=0.5), first=first)
    assert "50% of a step passes between" in remark and "`log.write(line)` 40%" in remark


def test_what_was_seen_before_anything_was_changed():
    line = RepeatedLine("model.py:7", operations=700, repeats=64)
    first = replace(
        STARVED, attention=("model.py:3",), operations=OperationCounts(2000, 800, (line,))
    )
    attention, loop = remarks(replace(STARVED, loaders=()), first=first)
    assert "written out at model.py:3" in attention
    assert "2,000 operations of 50 us each" in loop and "model.py:7 (700 in 64 rounds)" in loop


def test_settings_that_were_measured_are_not_suspected_again():
    """Fewer threads were best beside workers."""
    seen = replace(STARVED, loaders=(), threads=1)
    made = FunctionPatient("train:main", Path(), Path(), 10, 1, windows=[seen])
    assert [one.name for one in made.suspects()] == ["threads"]
    made.changes = {"num_workers": {"train.py:5": 1}, "threads": 1}
    assert made.suspects() == []


def job(changes: dict[str, Any], losses: list[float]) -> JobPatient:
    trial: Any = SimpleNamespace(losses=losses)
    return JobPatient(Path("job.yaml"), (), 10, Path(), changes=changes, trials=[trial])


MASK = Site("model.py:7", "__bool__", calls=10, seconds=0.1)
LOSS = Site("model.py:9", "item", calls=10, seconds=0.1)  # that can come late, which is tried


def test_values_that_steer_the_code_cannot_come_late():
    told = {"syncs": [asdict(MASK), asdict(LOSS)], "writes": [], "attention": []}
    told |= {"operations": None, "kernels_s": None}
    trial: Any = SimpleNamespace(
        input_shares=[0.0], limits=[""], syncs=[], retries=[0], overruns=0, told=told, mean_s=0.1
    )
    (remark,) = JobPatient(Path("job.yaml"), (), 10, Path(), trials=[trial]).remarks()
    assert remark.name == "steering_reads"
    assert "values of the GPU that steer the code, at model.py:7 (__bool__)" in remark.text
    assert "model.py:9" not in remark.text
    assert remarks(replace(STARVED, loaders=(), syncs=(MASK, LOSS))) == [remark.text]


@pytest.mark.parametrize(
    ("changes", "losses", "told"),
    [
        ({"late_values": True}, [3.0, 2.0], ""),
        ({"late_values": True}, [3.0, 2.5], "losses differ"),
        ({"precision": {"cpu": "bf16"}}, [3.01, 2.01], ""),
        ({"precision": {"cpu": "bf16"}}, [3.0, 2.5], "losses differ"),
        ({"data.workers": "auto"}, [3.0, 2.5], ""),  # that is no affair of the doctor's
    ],
)
def test_a_job_that_computes_something_else_is_known_by_its_losses(changes, losses, told):
    before = job({}, [3.0, 2.0])
    assert job(changes, losses).unlike(before).startswith(told)
    assert bool(job(changes, losses).unlike(before)) == bool(told)
