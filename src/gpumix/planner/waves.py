"""Plans of one stage in several waves: a wave is a part of each worker's micro-batches.

Waves go forward and backward one after another, so only one wave's activations are alive; but each
wave gathers and reduces anew. They serve batches that fit no plan of one wave, and those that need
slower techniques to fit at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from math import ceil

from gpumix.cost.predict import predict
from gpumix.planner.common.strategy import (
    PlanRequest,
    get_prediction,
    is_within_memory,
    ranked_devices,
)
from gpumix.planner.data_parallel.why_nothing_fits import can_fit_devices
from gpumix.planner.pipeline_parallel.tensor_parallel_teams import Searched
from gpumix.schema.errors import InputError, NoFeasiblePlanError
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.splitting import compute_shard_sizes
from gpumix.schema.plan.stage import Worker
from gpumix.schema.profile.profile import ClassProfile, Profile

NUMBERS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)  # of waves, as first tried
MOST_TRIED = 4  # numbers of waves, from the first at which memory may suffice
# Numbers of waves that may be faster than one, tried until some in a row are not.
FASTER_NUMBERS, MOST_MISSED = (2, 4, 8, 16, 32), 2


def plan_in_waves(
    profile: Profile, request: PlanRequest, plan_wave: Callable[[PlanRequest], Plan]
) -> Plan | None:
    """Return the fastest plan in about as few waves as fit; None if none fits.

    Args:
        plan_wave: returns the plan of one wave, as of a smaller batch.
    """
    space, batch = request.space.of_one_wave(), request.global_batch
    if space is None:
        return None
    devices = ranked_devices(profile, request)
    sizes = sorted({ceil(batch / number) for number in NUMBERS}, reverse=True)

    def can_fit(size: int) -> bool:
        return can_fit_devices(profile, devices, space, size)

    if not can_fit(sizes[-1]):
        return None
    first = bisect_left(sizes, True, key=can_fit)  # what fits a batch fits each smaller one
    found: list[Plan] = []
    for size in sizes[first : first + MOST_TRIED]:
        part = request.model_copy(update={"global_batch": size, "space": space})
        with suppress(NoFeasiblePlanError, InputError):
            plan = repeat_wave(profile, plan_wave(part), batch)
            if is_within_memory(get_prediction(plan).workers):
                found.append(plan)
    return min(found, key=lambda plan: get_prediction(plan).step_s, default=None)


def plan_faster_in_waves(
    profile: Profile,
    request: PlanRequest,
    search_wave: Callable[[Profile, PlanRequest, float], Searched],
    below_s: float,
) -> Searched:
    """Return the fastest plan in several waves, None if none takes less than `below_s`; and a lower
    bound of those tried.

    Args:
        search_wave: searches a plan of one wave, as of a smaller batch, below a number of seconds.
    """
    space, batch = request.space.of_one_wave(), request.global_batch
    best, bound_s, missed = None, float("inf"), 0
    for number in FASTER_NUMBERS if space is not None else ():
        if missed == MOST_MISSED or number > batch:
            break
        part = request.model_copy(update={"global_batch": ceil(batch / number), "space": space})
        missed += 1
        with suppress(NoFeasiblePlanError, InputError):
            found, of_wave_s = search_wave(_share_step(profile, number), part, below_s / number)
            bound_s = min(bound_s, number * (of_wave_s or 0.0))
            if found is None:
                continue
            plan = repeat_wave(profile, found, batch)
            expected = get_prediction(plan)
            if expected.step_s < below_s and is_within_memory(expected.workers):
                best, below_s, missed = plan, expected.step_s, 0
    return best, bound_s


def _share_step(profile: Profile, waves: int) -> Profile:
    """Return the profile in which a wave pays for its part of what is done once a step: updates,
    and the step's own overhead."""

    def share(one: ClassProfile) -> ClassProfile:
        on_host_s = one.host_optimizer_s_per_element
        return one.model_copy(
            update={
                "optimizer_s_per_element": one.optimizer_s_per_element / waves,
                "host_optimizer_s_per_element": on_host_s and on_host_s / waves,
            }
        )

    return profile.model_copy(
        update={
            "step_overhead_s": profile.step_overhead_s / waves,
            "classes": tuple(map(share, profile.classes)),
        }
    )


def repeat_wave(profile: Profile, of_wave: Plan, global_batch: int) -> Plan:
    """Return the plan of a batch in waves, in none of which a worker has more samples than in the
    plan of one wave.

    Raises:
        InputError: the batch is too small for waves of whole micro-batches.
    """
    (stage,) = of_wave.stages
    # Whole micro-batches: a wave of so many has no more samples, wherever the smaller ones are.
    rooms = [w.samples // w.micro_batch * w.micro_batch if w.samples else 0 for w in stage.leaders]
    waves = ceil(global_batch / sum(rooms))
    sizes = compute_shard_sizes(global_batch, tuple(room / sum(rooms) for room in rooms))
    workers: list[Worker] = []
    for samples, team in zip(sizes, stage.teams, strict=True):
        micro_batch = min(team[0].micro_batch, samples)
        changes = {"samples": samples, "micro_batch": micro_batch, "kept_graphs": 0}
        workers += [worker.model_copy(update=changes) for worker in team]
    if waves > max(len(worker.micro_batches) for worker in workers):
        raise InputError(f"no worker has a micro-batch for each of {waves} waves")
    plan = of_wave.model_copy(
        update={
            "global_batch": global_batch,
            "stages": (stage.model_copy(update={"workers": tuple(workers)}),),
            "waves": waves,
            "prediction": None,
        }
    )
    return plan.model_copy(update={"prediction": predict(profile, plan)})
