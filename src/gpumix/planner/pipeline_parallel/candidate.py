"""The parts of a plan of several stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from gpumix.cost.network.link_times import select_collective_forms
from gpumix.planner.pipeline_parallel.device_order import DevicePlace, Group, Row, get_device_place
from gpumix.planner.pipeline_parallel.stage_modes import (
    StageMode,
    WorkerCounts,
    count_workers_by_class,
    get_group_kind,
)
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.plan.dtypes import choose_communication_dtype
from gpumix.schema.plan.plan import Plan, Schedule, ZeroStage
from gpumix.schema.plan.stage import Stage, Worker
from gpumix.schema.profile.profile import Profile

Cut = tuple[int, ...]
"""The call after the last call of each stage."""

WorkerMicroBatches = tuple[int, ...]
"""Micro-batches of each worker of a group, or of each tensor-parallel group in it."""

Counts = tuple[WorkerMicroBatches, ...]
"""The deals of all groups."""

INTERLEAVED_STAGES = 2  # stages of each group, if interleaved


@dataclass(frozen=True)
class UncutCandidate:
    """A plan without a cut: a row of groups with `stages_per_group` stages each (several if
    interleaved), a manner for each stage, a schedule and a micro-batch size."""

    row: Row
    manners: tuple[StageMode, ...]
    schedule: Schedule
    micro_batch: int

    @property
    def stages_per_group(self) -> int:
        return get_stages_per_group(self.schedule)

    @property
    def stages(self) -> tuple[Group, ...]:
        """The devices of each stage."""
        return self.row * self.stages_per_group

    @cached_property
    def workers_by_class(self) -> tuple[WorkerCounts, ...]:
        """The workers of each group, by class."""
        return tuple(
            count_workers_by_class(get_group_kind(group), manner.tp.degree)
            for group, manner in zip(self.row, self.manners)
        )


def get_stages_per_group(schedule: Schedule) -> int:
    """Return the number of stages of each group."""
    return INTERLEAVED_STAGES if schedule == "interleaved" else 1


def list_leaders(group: Group, degree: int) -> tuple[Device, ...]:
    """Return the first device of each tensor-parallel group in a stage's group."""
    return tuple(tp_group[0] for tp_group in form_tensor_parallel_groups(group, degree))


def form_tensor_parallel_groups(group: Group, degree: int) -> tuple[Group, ...]:
    """Return the tensor-parallel groups in a stage's group: successive devices of one class and
    island of a host. Devices too few for a further one are in none."""
    alike: dict[DevicePlace, list[Device]] = {}
    for device in group:
        alike.setdefault(get_device_place(device), []).append(device)
    return tuple(
        tuple(devices[begin : begin + degree])
        for devices in alike.values()
        for begin in range(0, len(devices) - degree + 1, degree)
    )


def build_staged_plan(
    profile: Profile,
    batch: int,
    way: UncutCandidate,
    cut: Cut,
    counts: Counts,
    *,
    strategy: str,
    zero_stage: ZeroStage = 0,
    waves: int = 1,
) -> Plan:
    """Build the plan, without a prediction. Workers of a stage have equal shares of its state.

    Args:
        batch: samples of a step.
        counts: micro-batches of each worker, or of each tensor-parallel group.
        waves: each group has a worker with as many micro-batches.
    """
    model = profile.model
    stages = []
    for number, (begin, end) in enumerate(pairwise((0, *cut))):
        needs, manner = model.needs_of(begin, end), way.manners[number]
        tp_groups = form_tensor_parallel_groups(way.stages[number], manner.tp.degree)
        samples = _count_samples(counts[number % len(way.row)], way.micro_batch, batch)
        classes = {d.device_class: profile.of_class(d.device_class) for d in way.stages[number]}
        workers = tuple(
            Worker.model_construct(  # unvalidated: workers may be very many
                device=device.id,
                device_class=device.device_class,
                host=device.host,
                samples=n,
                micro_batch=min(way.micro_batch, n),
                state_share=1.0 / len(tp_groups),
                mode=manner.mode,
                compile=classes[device.device_class].compiled and manner.tp.degree == 1,
                compute_dtype=classes[device.device_class].compute_dtype,
                efficiency=classes[device.device_class].efficiency,
            )
            for tp_group, n in zip(tp_groups, samples)
            for device in tp_group
        )
        stages.append(
            Stage(
                units=model.calls[begin:end],
                workers=workers,
                tensor=manner.tp.degree,
                sequence=manner.tp.sequence,
                takes=needs.outputs,
                root=needs.root,
            )
        )
    used = sorted({device.device_class for group in way.row for device in group})
    return Plan(
        strategy=strategy,
        model=model.fingerprint,
        sequence_length=profile.sequence_length,
        global_batch=batch,
        communication_dtype=choose_communication_dtype(
            profile.of_class(n).compute_dtype for n in used
        ),
        stages=tuple(stages),
        schedule=way.schedule,
        waves=waves,
        zero_stage=zero_stage,
        optimizer_state=profile.optimizer_state,
        collectives=select_collective_forms(profile),
        emulated=any(profile.cluster.class_named(name).emulated for name in used),
        estimated=tuple(name for name in used if profile.of_class(name).estimated),
    )


def _count_samples(counts: Sequence[int], micro_batch: int, batch: int) -> list[int]:
    """Return samples by numbers of micro-batches; the last micro-batch of all may be smaller."""
    samples = [count * micro_batch for count in counts]
    last = max(place for place, count in enumerate(counts) if count)
    samples[last] -= sum(samples) - batch
    return samples
