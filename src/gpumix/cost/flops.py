"""FLOPs of a plan's workers in one step: of the model, and all that is computed.

The *model's* are what its mathematics asks for, whatever the plan: forward, and backward of what is
trained. The *hardware's* have besides what is computed again: units in the backward pass, unless
their graph was kept, and scores inside fused attention's backward. Whoever divides them by time and
peak has the utilisation (MFU and HFU). Profiles say what was counted of one sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from gpumix.cost.teams import team_of
from gpumix.spec.cut import split_micro_batches
from gpumix.spec.plan import Plan, Prediction
from gpumix.spec.profile import ModelProfile, Profile, UnitKind


class Flops(NamedTuple):
    """Of one worker in one step."""

    model: float
    hardware: float


def with_flops(profile: Profile, plan: Plan, found: Prediction) -> Prediction:
    """The prediction with each worker's FLOPs, if they were counted, and its class's peak."""
    peaks = {c.device_class: c.peak for c in profile.classes if c.peak is not None}
    told = flops_of_workers(profile, plan)
    if told is None:
        return found.model_copy(update={"peaks": peaks})
    workers = tuple(
        expected.model_copy(update={"model_flops": own.model, "hardware_flops": own.hardware})
        for expected, own in zip(found.workers, told)
    )
    return found.model_copy(update={"workers": workers, "peaks": peaks})


def flops_of_workers(profile: Profile, plan: Plan) -> list[Flops] | None:
    """Of each rank; None if the profile does not say."""
    rank_of = {worker.device: rank for rank, worker in enumerate(plan.workers)}
    own = [Flops(0.0, 0.0)] * len(rank_of)
    for number, stage in enumerate(plan.stages):
        of_size = {}
        for size in {stage.team_size(worker) for worker in stage.leaders}:
            model = profile.model
            if size > 1:
                model = team_of(profile, size, sequence=stage.sequence).model
            kinds = {kind.name: kind for kind in model.kinds}
            if model.root.backward_flops is None or any(
                kind.backward_flops is None for kind in kinds.values()
            ):
                return None
            first = plan.first_call(number)
            calls = [kinds[name] for name in model.kind_of_call[first : first + len(stage.units)]]
            root = _root(model, first=number == 0, last=number == len(plan.stages) - 1)
            of_size[size] = cache(_Counted(calls, root))
        for worker in stage.workers:
            found = of_size[stage.team_size(worker)](
                worker.samples, worker.micro_batch, worker.mode.recompute, worker.kept_graphs
            )
            rank = rank_of[worker.device]
            own[rank] = Flops(own[rank].model + found.model, own[rank].hardware + found.hardware)
    return own


def _root(model: ModelProfile, *, first: bool, last: bool) -> float:
    """Of one sample, what a stage computes of the root: the code before the units is the first
    stage's, all else goes with the loss."""
    root = model.root
    before = root.before_flops + root.before_backward_flops
    whole = root.flops + (root.backward_flops or 0.0)
    return before * first + (whole - before) * last


class _Counted:
    """Workers of one stage, whose unit calls are of these kinds."""

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
        """Pairs of call and micro-batch keep their graph from the end of the forward pass on."""
        calls, place = divmod(max(0, len(self._calls) * len(sizes) - kept_graphs), len(sizes))
        whole = sum(kind.flops for kind in self._calls[:calls]) * sum(sizes)
        part = self._calls[calls].flops * sum(sizes[:place]) if place else 0.0
        return whole + part
