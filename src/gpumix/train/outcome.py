"""What a run, or a few steps of one, came to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpumix.train.interlude import Interlude


@dataclass(frozen=True)
class Summary:
    """What a run came to. `prediction_error` is predicted over measured step time, less 1; there is
    no loss where no step was left to do. `devices` are as in the last steps, in rank order; of a
    long run `losses` are the newest."""

    steps: int
    loss: float | None
    tokens_per_s: float
    step_s: float
    predicted_step_s: float | None
    prediction_error: float | None
    overruns: int
    classes: list[dict[str, Any]]
    devices: list[dict[str, Any]]
    losses: list[float]
    checkpoint: str


@dataclass(frozen=True)
class Trial:
    """What a few steps by a plan came to; times without the first steps.

    Attributes:
        step_s: the median; `mean_s`: the mean, in which rare waits count.
        busy_shares: of each rank: the part of its time in which it waited for no other.
        input_shares: of each rank: the part of its time in which it waited for its data.
        padding_share: of the tokens that all ranks computed; None where samples are alike.
        save, evaluation: of one checkpoint, of one evaluation; nothing if the job has none, or they
            were not asked for.
        limits: of each rank: what holds its data back.
        retries: of each rank: how often its allocator had to give memory back to get some.
        syncs: lines of the model's that made the host wait for the device, with how often in a step
            of the first rank; empty if that was not asked for, or the device is no GPU.
        told: what the watcher of the first rank saw; None: there was none.
    """

    step_s: float
    mean_s: float
    tokens_per_s: float
    losses: list[float]
    peak_bytes: list[int | None]
    busy_shares: list[float]
    input_shares: list[float]
    padding_share: float | None
    save: Interlude
    evaluation: Interlude
    overruns: int
    limits: list[str]
    retries: list[int]
    syncs: list[tuple[str, float]]
    told: Any
