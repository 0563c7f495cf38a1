"""Section `advanced` of a job: what seldom needs to be set."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from gpumix.schema.cluster.kernels import EfficiencySpec
from gpumix.schema.units import Seconds
from gpumix.schema.value import Value


class AdvancedSpec(Value):
    """Settings that a run chooses well by itself: how devices compute, how they are measured, and
    what happens when they are slow, wrong or gone."""

    efficiency: EfficiencySpec = Field(
        default=EfficiencySpec(), description="how devices compute, beside dtype and compiled code"
    )
    profile_budget: Seconds = Field(
        default=120.0,
        description="how long each device class may be measured; the smallest micro-batch is "
        "measured all the same",
    )
    profile_cache: Path | None = Field(
        default=None,
        description="folder of the measurements; default: ~/.cache/gpumix/profiles",
    )
    rebalance: bool = Field(
        default=True,
        description="whether samples are split anew while the run trains, when devices turn out to "
        "take longer or less long than the plan says; where stages should have other units, the "
        "run starts by another plan. Without, a run gives the same numbers to the bit each time, "
        "as long as its plan and devices are the same",
    )
    replay_steps: int = Field(
        default=0,
        ge=0,
        description="how often all devices compute the gradient of one sample, to find one that "
        "computes wrong without an error; 0: never",
    )
    trace_step: int | None = Field(
        default=None,
        ge=1,
        description="the step whose trace goes into the run's folder, for ui.perfetto.dev",
    )
    max_restarts: int = Field(
        default=3,
        ge=0,
        description="how often in a row, without a step between, a run starts again by itself "
        "after it lost a rank, or ran out of memory; under torchrun it is `--max-restarts` for the "
        "first",
    )
    timeout: Seconds = Field(
        default=300.0,
        description="how long a rank waits for another before it names it; one that died is known "
        "at once, one that was stopped or whose host is gone after 20 s",
    )
    grace_period: Seconds | None = Field(
        default=None,
        description="how long after SIGTERM or Ctrl-C a run may take to save: where the step under "
        "way would not end in time, the state before it is saved, or the run just ends if it is on "
        "disk; default: what `gpumix launch --grace-period` says, else 30 s, as torchrun has it",
    )
