"""Measurements as cached by their dependencies; profiles are assembled from measurements."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gpumix.schema.cluster.link_islands import PairTimes
from gpumix.schema.plan.optimizer_state import OptimizerState
from gpumix.schema.plan.plan import Collectives
from gpumix.schema.profile.profile import (
    ClassProfile,
    CollectiveTimes,
    HostInput,
    ModelProfile,
    StateBytes,
    TensorParallelTraffic,
)
from gpumix.schema.units import Count
from gpumix.schema.value import Document, Value


class InputMeasurement(Document):
    """Cost of reading a job's samples on each host of a cluster."""

    kind: Literal["input measurement"] = "input measurement"

    inputs: tuple[HostInput, ...]


class TensorParallelMeasurement(Value):
    """Measurement by a rank of a tensor-parallel group of `degree` ranks; see
    `TensorParallelProfile`."""

    degree: int = Field(ge=2)
    sequence: bool = False
    enters: tuple[int, ...] = ()
    leaves: tuple[int, ...] = ()
    device_class: ClassProfile
    model: ModelProfile
    told: dict[str, TensorParallelTraffic]


class ClassMeasurement(Document):
    """Measurements of a model on a device of a class, cached by dependencies."""

    kind: Literal["class-measurement"] = "class-measurement"

    device_class: ClassProfile
    model: ModelProfile
    host_memory_bytes: Count | None = Field(default=None, description="all of the host's")
    optimizer_bytes_per_element: StateBytes
    optimizer_state: OptimizerState = "fp32"
    exchanges_matrices: bool = Field(default=False, description="whether updates do, as Muon's")
    seconds_spent: float = Field(ge=0)
    ended_by_budget_s: float | None = Field(
        default=None, description="the budget that left larger micro-batches unmeasured, if it did"
    )
    tp_measurements: tuple[TensorParallelMeasurement, ...] = ()


class LinkMeasurement(Document):
    """Measurements of the links between all ranks of a cluster."""

    kind: Literal["link-measurement"] = "link-measurement"

    collectives: Collectives
    network: tuple[CollectiveTimes, ...]
    pairs: tuple[PairTimes, ...] = ()
    step_overhead_s: float = Field(ge=0)
    contention: float = Field(default=0.0, ge=0, le=1)
    seconds_spent: float = Field(ge=0)
