"""What an integration tells of its plan: who computes and who stores what."""

from __future__ import annotations

import pytest

from gpumix.integrations.common.plan_and_shard import describe_plan
from helpers.training.staging import rows, staged_plan


@pytest.mark.parametrize(
    ("samples", "zero_stage", "told"),
    [
        ([[3, 1]], 0, ["3 samples a step, all of the state", "1 samples a step, all of the state"]),
        ([[3, 1]], 2, ["3 samples a step, 50% of the state", "1 samples a step, 50% of the state"]),
        (
            [[4], [4]],
            0,
            [
                "stage 1 of 2, 1 block: 4 samples a step, all of the stage's state",
                "stage 2 of 2, 2 blocks: 4 samples a step, all of the stage's state",
            ],
        ),
    ],
)
def test_each_device_has_a_line(samples, zero_stage, told):
    plan = staged_plan("gpt2", rows(*samples), zero_stage=zero_stage)
    devices = [worker.device for worker in plan.workers]
    assert list(describe_plan(plan)) == [f"{d}: {line}" for d, line in zip(devices, told)]
