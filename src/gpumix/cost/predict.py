"""What one step of a plan takes and holds: the cost model applied to a whole plan.

The planner, the simulator, the memory check and the report all ask here. Time follows the formula
in `cost.time`, memory the moments in `cost.phases`.
"""

from __future__ import annotations

import numpy as np

from gpumix.cost.curves import FloatArray, MicroBatches
from gpumix.cost.memory import memory_by_worker, usable_bytes
from gpumix.cost.network import Links, free_links, links_for
from gpumix.cost.time import (
    backward_seconds,
    exposed_seconds,
    forward_seconds,
    optimizer_seconds,
)
from gpumix.spec.errors import InputError
from gpumix.spec.plan import Plan, Prediction, Worker, WorkerPrediction
from gpumix.spec.profile import ROOT, Profile


def predict(profile: Profile, plan: Plan) -> Prediction:
    """What `cost.time` and `cost.memory` expect of one step of `plan`.

    `exposed_communication_s` is how much shorter the step were if the collectives took no time.

    Raises:
        InputError: the profile is of another model, sequence length or precision, or lacks a
            class or a collective form of the plan.
    """
    check_match(profile, plan)
    workers = plan.workers
    links = links_for(profile, plan.collectives, tuple(w.state_share for w in workers))
    forward, backward = _passes(profile, workers, links)
    free_forward, free_backward = _passes(profile, workers, free_links(profile.model))
    optimizer = [optimizer_seconds(profile, w.device_class) * w.state_share for w in workers]
    exposed = exposed_seconds(profile, links)
    step = exposed + float(forward.max()) + float(backward.max()) + max(optimizer)
    hidden = float(free_forward.max() + free_backward.max()) + max(optimizer)
    memory = memory_by_worker(profile, workers, links)
    return Prediction(
        step_s=step,
        tokens_per_s=plan.global_batch * plan.sequence_length / step if step > 0 else float("inf"),
        exposed_communication_s=max(0.0, step - hidden - profile.step_overhead_s),
        workers=tuple(
            WorkerPrediction(
                device=worker.device,
                forward_s=float(forward[rank]),
                backward_s=float(backward[rank]),
                optimizer_s=optimizer[rank],
                busy_s=float(free_forward[rank] + free_backward[rank]) + optimizer[rank],
                memory_bytes=memory[rank],
                memory_limit_bytes=usable_bytes(profile.cluster.class_named(worker.device_class)),
            )
            for rank, worker in enumerate(workers)
        ),
    )


def check_match(profile: Profile, plan: Plan) -> None:
    """Refuse a plan that was made for something else.

    Raises:
        InputError: model, sequence length, precision or device classes differ.
    """
    for what, planned, profiled in (
        ("model", plan.model, profile.model.fingerprint),
        ("sequence length", plan.sequence_length, profile.sequence_length),
        ("precision", plan.compute_dtype, profile.compute_dtype),
    ):
        if planned != profiled:
            raise InputError(
                f"the plan's {what} is {planned}, the profile's is {profiled}",
                fix="plan again from this profile: `gpumix plan JOB.yaml`",
            )
    for name in sorted({w.device_class for w in plan.workers}):
        check_class(profile, name)


def check_class(profile: Profile, name: str) -> None:
    """Refuse a device class that was not measured, in full, for this model.

    Raises:
        InputError: the profile lacks the class, or the times of one of its kinds of unit.
    """
    measured = {c.device_class: c for c in profile.classes}
    if name not in measured or name not in {c.name for c in profile.cluster.classes}:
        raise InputError(
            f"the profile knows nothing of device class '{name}'",
            fix="profile again on this cluster: `gpumix profile JOB.yaml`",
        )
    missing = {ROOT, *profile.model.kind_of_call} - set(measured[name].units)
    if missing:
        raise InputError(
            f"the profile has no times of unit '{min(missing)}' on device class '{name}'",
            fix="profile again on this cluster: `gpumix profile JOB.yaml`",
        )


def _passes(
    profile: Profile, workers: tuple[Worker, ...], links: Links
) -> tuple[FloatArray, FloatArray]:
    """Forward and backward seconds of each worker, in their order."""
    forward, backward = np.zeros(len(workers)), np.zeros(len(workers))
    for name in sorted({w.device_class for w in workers}):
        ranks = [rank for rank, w in enumerate(workers) if w.device_class == name]
        micro = MicroBatches.of(
            [workers[rank].samples for rank in ranks], [workers[rank].micro_batch for rank in ranks]
        )
        times = profile.of_class(name).units
        forward[ranks] = forward_seconds(profile.model, times, links, micro)
        backward[ranks] = backward_seconds(profile.model, times, links, micro)
    return forward, backward
