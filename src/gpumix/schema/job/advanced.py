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
        default=EfficiencySpec(), description="compute settings other than dtype and compiled code"
    )
    profile_budget: Seconds = Field(
        default=120.0,
        description="time limit for measuring each GPU type; the smallest micro-batch is "
        "always measured",
    )
    profile_cache: Path | None = Field(
        default=None,
        description="folder of the measurements; default: ~/.cache/gpumix/profiles",
    )
    rebalance: bool = Field(
        default=True,
        description="whether samples move between devices during the run when devices are "
        "slower or faster than planned; if stages should have other blocks, the run "
        "restarts by another plan. Without it, equal plans and devices give bitwise equal "
        "numbers",
    )
    replay_steps: int = Field(
        default=0,
        ge=0,
        description="steps between replays, where all devices compute the gradient of one "
        "sample to find one that computes wrong results; 0: never",
    )
    trace_step: int | None = Field(
        default=None,
        ge=1,
        description="the step to trace into the run's folder, for ui.perfetto.dev",
    )
    max_restarts: int = Field(
        default=3,
        ge=0,
        description="restarts in a row, without a step between, after a lost rank or out of "
        "memory; under torchrun `--max-restarts` counts lost ranks",
    )
    timeout: Seconds = Field(
        default=300.0,
        description="how long a rank waits for another before it names it; a dead one is "
        "known at once, a stopped one or a lost host after 20 s",
    )
    grace_period: Seconds | None = Field(
        default=None,
        description="time to save after SIGTERM or Ctrl-C: if the current step would not end "
        "in time, the state before it is saved, or the run ends at once if that is on "
        "disk; default: that of `gpumix launch --grace-period`, else 30 s, like torchrun",
    )
