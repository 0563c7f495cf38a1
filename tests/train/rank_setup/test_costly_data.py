"""Data that takes more cores than hosts have: the profile knows, and the plan goes by it."""

from __future__ import annotations

from math import inf

import pytest

from gpumix.data.order.global_order import GlobalOrder
from gpumix.hardware.host.cpu import count_cores
from gpumix.planner.common.strategy import get_prediction
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile
from gpumix.train.controller import JobController
from helpers.runs.jobs import BATCH, metrics, plan_for, train, write_job

# Compute of a sample: 0.6 ms on the fast device, 2.5 ms on the slow one.
TWO_HOSTS = [
    {"class": "fast", "emulate": "0.2 GFLOP/s", "memory": "64 MiB", "host": "one"},
    {"class": "slow", "emulate": "0.05 GFLOP/s", "memory": "64 MiB", "host": "two"},
]


def samples(plan: Plan) -> dict[str, int]:
    return {worker.host: worker.samples for worker in plan.workers}


def read_s(profile: Profile, first: int) -> float:
    """Of the slower host, if the first one reads so many samples of a batch."""
    counts = zip(profile.inputs, (first, BATCH - first))
    return max(
        # A machine that does something else beside is found to give no more, too.
        n * max(one.cpu_s_per_sample / one.cores, 1.0 / (one.most_samples_per_s or inf))
        for one, n in counts
    )


@pytest.mark.extended
@pytest.mark.slow
def test_a_plan_gives_a_host_no_more_than_it_can_read(tmp_path):
    cpu_s = 5e-3 * count_cores()  # 10 ms of a host, which has half of the cores
    data = {"factory": "toys:costly_tokens", "arguments": {"cpu_s": cpu_s}, "validation_split": 0.1}
    job = write_job(tmp_path, data=data, cluster=TWO_HOSTS)
    pipeline = JobController.of_file(job, ["advanced.profile_budget=1"], debug=False)
    profile = pipeline.profile()
    assert [one.host for one in profile.inputs] == ["one", "two"]
    assert {one.cores for one in profile.inputs} == {count_cores() / 2}
    assert all(one.cpu_s_per_sample >= cpu_s for one in profile.inputs)
    assert pipeline.profile() == profile  # as it was kept

    plan = pipeline.plan(profile)
    assert get_prediction(plan).input_s == pytest.approx(read_s(profile, samples(plan)["one"]))
    assert get_prediction(plan).step_s >= get_prediction(plan).input_s * (
        1 - 1e-9
    )  # sums of floats

    # A hundred times as long, so that reading is all that counts, however busy this machine is.
    inputs = [
        one.model_copy(update={"cpu_s_per_sample": 100 * one.cpu_s_per_sample})
        for one in profile.inputs
    ]
    slower = profile.model_copy(update={"inputs": tuple(inputs)})
    first = samples(pipeline.plan(slower))["one"]
    best_s = min(read_s(slower, n) for n in range(BATCH + 1))
    assert read_s(slower, first) == pytest.approx(best_s)


def test_a_data_worker_that_is_killed_is_in_the_records_and_changes_no_loss(tmp_path):
    cpu_s = 5e-3  # one thread would hold up who trains, so processes read
    at = int(GlobalOrder(64, 0).span(10 * BATCH, 10 * BATCH + 1)[0])  # of the eleventh step
    alone = [{"class": "device", "accelerator": "cpu", "memory": "64 MiB"}]
    losses = {}
    for kind in ("whole", "killed"):
        once = tmp_path / f"{kind}.once"
        if kind == "whole":
            once.touch()
        arguments = {"cpu_s": cpu_s, "at": at, "once": str(once)}
        data = {"factory": "toys:killing_tokens", "arguments": arguments, "num_workers": 2}
        job = write_job(tmp_path / kind, data=data, cluster=alone, max_steps=14, logging_steps=1)
        losses[kind] = train(job, plan=plan_for(job, (BATCH,), (1.0,))).losses
        assert once.exists()
        records = metrics(job.parent / "run", "ranks")
        assert records[-1]["ranks"][0]["lost_workers"] == (kind == "killed")
    assert losses["whole"] == losses["killed"]
