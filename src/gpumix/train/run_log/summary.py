"""Results of runs and of trials."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpumix.train.run_log.interruption_cost import InterruptionCost


@dataclass(frozen=True)
class Summary:
    """Result of a run. Its figures and `classes` are those of `run_figures.figures`; `loss` is None
    if no step was left. `devices` are as in the last window of steps, in rank order; `losses` are
    the newest of a long run."""

    steps: int
    loss: float | None
    tokens_per_s: float
    step_s: float
    predicted_step_s: float | None
    slower_than_planned: float | None
    overruns: int
    classes: list[dict[str, Any]]
    devices: list[dict[str, Any]]
    losses: list[float]
    checkpoint: str


@dataclass(frozen=True)
class TrialResult:
    """Result of a few steps by a plan; times exclude the first steps.

    Attributes:
        step_s: the median; `mean_s`: the mean, in which rare waits count.
        busy_shares: by rank: part of the time not spent waiting for other ranks.
        input_shares: by rank: part of the time spent waiting for data.
        padding_share: of the tokens computed by all ranks; None if samples are alike.
        save, evaluation: cost of a checkpoint and an evaluation; zero if the job has none, or not
            requested.
        limits: by rank: the bottleneck of its data loading.
        retries: by rank: how often the allocator had to return memory to get more.
        syncs: lines of the model where the host waits for the device, with the count per step of
            the first rank; empty if not requested, or without a GPU.
        told: report of the first rank's watcher; None without a watcher.
    """

    step_s: float
    mean_s: float
    tokens_per_s: float
    losses: list[float]
    peak_bytes: list[int | None]
    busy_shares: list[float]
    input_shares: list[float]
    padding_share: float | None
    save: InterruptionCost
    evaluation: InterruptionCost
    overruns: int
    limits: list[str]
    retries: list[int]
    syncs: list[tuple[str, float]]
    told: Any
