"""FLOPs of a plan's workers in one step: model FLOPs and hardware FLOPs.

*Model* FLOPs are what the mathematics requires under any plan: forward, and backward of trained
parameters. *Hardware* FLOPs add recomputation: units in the backward pass, unless their graph was
kept, and scores inside fused attention's backward. Divided by time and peak, they give the
utilization (MFU and HFU). Profiles hold the count per sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from gpumix.cost.tensor_parallel_groups import get_tp_profile
from gpumix.schema.plan.plan import Plan, Prediction
from gpumix.schema.plan.splitting import split_micro_batches
from gpumix.schema.profile.profile import ModelProfile, Profile, UnitKind


class Flops(NamedTuple):
    """FLOPs of one worker in one step."""

    model: float
    hardware: float


def add_flops(profile: Profile, plan: Plan, found: Prediction) -> Prediction:
    """Add each worker's FLOPs, where counted, and each class's peak to a prediction."""
    peaks = {c.device_class: c.peak for c in profile.classes if c.peak is not None}
    told = count_worker_flops(profile, plan)
    if told is None:
        return found.model_copy(update={"peaks": peaks})
    workers = tuple(
        expected.model_copy(update={"model_flops": own.model, "hardware_flops": own.hardware})
        for expected, own in zip(found.workers, told)
    )
    return found.model_copy(update={"workers": workers, "peaks": peaks})


def count_worker_flops(profile: Profile, plan: Plan) -> list[Flops] | None:
    """Return the FLOPs of each rank; None if the profile has no counts."""
    rank_of = {worker.device: rank for rank, worker in enumerate(plan.workers)}
    own = [Flops(0.0, 0.0)] * len(rank_of)
    for number, stage in enumerate(plan.stages):
        of_size = {}
        for size in {stage.get_tp_size(worker) for worker in stage.leaders}:
            model = profile.model
            if size > 1:
                model = get_tp_profile(profile, size, sequence=stage.sequence).model
            kinds = {kind.name: kind for kind in model.kinds}
            if model.root.backward_flops is None or any(
                kind.backward_flops is None for kind in kinds.values()
            ):
                return None
            first = plan.first_call(number)
            calls = [kinds[name] for name in model.kind_of_call[first : first + len(stage.units)]]
            root = _count_root_flops(model, first=number == 0, last=number == len(plan.stages) - 1)
            of_size[size] = cache(_StageFlopCounter(calls, root))
        for worker in stage.workers:
            found = of_size[stage.get_tp_size(worker)](
                worker.samples, worker.micro_batch, worker.mode.recompute, worker.kept_graphs
            )
            rank = rank_of[worker.device]
            own[rank] = Flops(own[rank].model + found.model, own[rank].hardware + found.hardware)
    return own


def _count_root_flops(model: ModelProfile, *, first: bool, last: bool) -> float:
    """Return the FLOPs per sample of a stage's part of the root. The first stage runs the code
    before the units, the last stage runs the rest with the loss."""
    root = model.root
    before = root.before_flops + root.before_backward_flops
    whole = root.flops + (root.backward_flops or 0.0)
    return before * first + (whole - before) * last


class _StageFlopCounter:
    """FLOPs of workers of one stage, by the kinds of the stage's unit calls."""

    def __init__(self, calls: Sequence[UnitKind], root: float) -> None:
        self._calls = calls
        self._per_sample = root + sum(k.flops + (k.backward_flops or 0.0) for k in calls)
        self._rerun = sum(kind.rerun_flops for kind in calls)

    def __call__(self, samples: int, micro_batch: int, recompute: bool, kept_graphs: int) -> Flops:
        model = samples * self._per_sample
        again = samples * self._rerun
        if recompute and samples:
            again += self._recomputed(split_micro_batches(samples, micro_batch), kept_graphs)
        return Flops(model, model + again)

    def _recomputed(self, sizes: Sequence[int], kept_graphs: int) -> float:
        """Return the recomputed FLOPs. The last `kept_graphs` pairs of call and micro-batch in
        forward order keep their graph."""
        calls, place = divmod(max(0, len(self._calls) * len(sizes) - kept_graphs), len(sizes))
        whole = sum(kind.flops for kind in self._calls[:calls]) * sum(sizes)
        part = self._calls[calls].flops * sum(sizes[:place]) if place else 0.0
        return whole + part
