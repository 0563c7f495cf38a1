"""A run with little memory whose device becomes slow: state moves between its devices, live."""

from __future__ import annotations

from collections import Counter

import pytest

from gpumix.cost.predict import predict
from gpumix.hardware.estimates.what_if import scale_memory
from gpumix.schema.plan.plan import Collectives, Plan
from gpumix.schema.profile.profile import Profile
from gpumix.train.checkpoint.checkpointer import open_checkpoint
from gpumix.train.controller import JobController, UserPlan
from helpers.runs.jobs import metrics, plan_for, toy, train, write_job

STEPS = 20
SAMPLES = (40, 40, 40)
MICRO_BATCH = 10
SHARES = (1 / 3, 1 / 3, 1 / 3)
# Memory of devices, in parts of the plan's largest peak: there is room for a few samples more.
SLACK = 1.03
ALIKE = [{"class": "card", "accelerator": "cpu", "memory": "64 MiB", "count": 3}]
USUAL = {
    "max_steps": STEPS,
    "global_batch_size": sum(SAMPLES),
    "data": {"factory": "toys:tokens", "arguments": {"samples": 1000}, "validation_split": 0},
    "optimizer": {"lr": 1e-4},
    "lr_scheduler": {"type": "constant"},
}


def prepared(folder, waves: int) -> tuple[Profile, Plan, float]:
    """Of sound devices; and the part of their memory that the plan leaves just room in."""
    job = write_job(folder, model=model(), cluster=ALIKE, **USUAL)
    profile = JobController.of_file(job, (), debug=False).profile()
    wires = Collectives(gather="broadcast", reduce="all_to_all")
    changes = {"zero_stage": 3, "sharding": "all", "collectives": wires, "waves": waves}
    plan = plan_for(job, SAMPLES, SHARES).model_copy(update=changes)
    (stage,) = plan.stages
    smaller = [w.model_copy(update={"micro_batch": MICRO_BATCH}) for w in stage.workers]
    stage = stage.model_copy(update={"workers": tuple(smaller)})
    plan = Plan.model_validate(plan.model_copy(update={"stages": (stage,)}).model_dump())
    plan = plan.model_copy(update={"prediction": predict(profile, plan)})
    assert plan.prediction is not None
    part = max(one.peak_bytes / one.memory_limit_bytes for one in plan.prediction.workers)
    return profile, plan, part * SLACK


def model(**harm):
    return toy(width=64, blocks=6, **harm)


def trained(folder, profile: Profile, plan: Plan, part: float, **changes) -> None:
    """Devices that are taken to have that part of their memory; what they have in excess is for
    what a model so small takes besides."""
    tight = scale_memory(profile, {"card": part})
    plan = plan.model_copy(update={"prediction": predict(tight, plan)})
    job = write_job(folder, cluster=ALIKE, **USUAL | changes)
    JobController.of_file(job, (), debug=False).train(UserPlan(plan, tight), resume=False)


def on_one_device(folder) -> list[float]:
    """The losses of the same steps where nothing moves."""
    job = write_job(folder, model=model(), cluster=[ALIKE[0] | {"count": 1}], **USUAL)
    return train(job, plan=plan_for(job, (sum(SAMPLES),), (1.0,))).losses


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("waves", [1, 2])
def test_state_moves_while_the_run_trains_and_losses_stay(tmp_path, waves):
    profile, plan, part = prepared(tmp_path / "sound", waves)
    slow = model(rank=1, at=8, sample_s=0.02)
    trained(tmp_path / "moved", profile, plan, part, model=slow, rebalance=True)
    expected = on_one_device(tmp_path / "alone")
    run = tmp_path / "moved" / "run"
    moves = [one for one in metrics(run, "plan") if one["shares"] != one["shares_before"]]
    assert moves
    last = moves[-1]
    assert last["moving_s"] > 0
    assert sum(last["shares"].values()) == pytest.approx(1)
    assert last["shares"]["card-1"] > last["shares_before"]["card-1"]
    assert last["samples"]["card-1"] < min(last["samples"]["card-0"], last["samples"]["card-2"])
    told = metrics(run)
    assert [one["step"] for one in told] == list(range(1, STEPS + 1))
    assert [one["loss"] for one in told] == pytest.approx(expected, rel=1e-5)
    # Each rank has saved what it has of the state in the end.
    _, index = open_checkpoint(run / "checkpoints" / f"step-{STEPS:08d}")
    saved = Counter[str]()
    for tensor in index.tensors.values():
        for box in tensor.boxes:
            saved[box.file] += box.elements
    for rank in range(3):
        share = saved[f"__{rank}_0.distcp"] / saved.total()
        assert share == pytest.approx(last["shares"][f"card-{rank}"], abs=0.01)
