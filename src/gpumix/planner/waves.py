"""Plans of one stage in several waves: a wave is a part of each worker's micro-batches.

Waves go forward and backward one after another, so only one wave's activations are alive; but each
wave gathers and reduces anew. They serve batches that fit no plan of one wave, and those that need
slower techniques to fit at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from math import ceil

from gpumix.cost.device_alone import compute_ideal_samples_per_s
from gpumix.cost.loading_memory import check_room_for_loading
from gpumix.cost.predict import compute_plan_collectives, predict, predict_step_seconds
from gpumix.cost.step_time import can_keep_state_on_host, optimizer_seconds
from gpumix.cost.tensor_parallel_groups import reduce_to_leaders
from gpumix.planner.common.strategy import (
    PlanRequest,
    get_prediction,
    is_within_memory,
    ranked_devices,
)
from gpumix.planner.data_parallel.why_nothing_fits import can_fit_devices
from gpumix.planner.pipeline_parallel.tensor_parallel_teams import Searched
from gpumix.schema.errors import InputError, LoadingMemoryError, NoFeasiblePlanError
from gpumix.schema.plan.plan import Plan, ZeroStage
from gpumix.schema.plan.splitting import compute_shard_sizes
from gpumix.schema.plan.stage import Stage, Worker
from gpumix.schema.profile.profile import ROOT, ClassProfile, Profile

NUMBERS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64)  # of waves, as first tried
MOST_TRIED = 4  # numbers of waves, from the first at which memory may suffice
FASTER_NUMBERS = (2, 4, 8, 16, 32)  # of waves that may be faster than one
# Samples of a device in a wave up to which they may be too few to divide them well; and how many
# more of a wave are tried then.
FEW_SAMPLES, MOST_SIZES = 8, 16
ROUNDING = 1e-9
VARIES = 1.2  # how much longer gathers and copies of other plans may take


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
    best, best_s = None, float("inf")
    for size in sizes[first : first + MOST_TRIED]:
        part = request.model_copy(update={"global_batch": size, "space": space})
        with suppress(NoFeasiblePlanError, InputError):
            plan = _repeat_below(profile, plan_wave(part), batch, best_s)
            if plan is not None:
                best, best_s = plan, get_prediction(plan).step_s
    return best


def plan_faster_in_waves(
    profile: Profile,
    request: PlanRequest,
    search_wave: Callable[[Profile, PlanRequest, float], Searched],
    than: Plan,
) -> Searched:
    """Return the fastest plan in several waves, None if none is faster than the plan `than`; and a
    lower bound of those tried.

    Args:
        search_wave: searches a plan of one wave, as of a smaller batch, below a number of seconds.
    """
    space = request.space.of_one_wave()
    if space is None:
        return None, float("inf")
    below_s = get_prediction(than).step_s
    waves = _FasterWaves(profile, request.model_copy(update={"space": space}), below_s)
    for number in FASTER_NUMBERS:
        waves.try_number(number, space.zero_stages, search_wave)
    best = waves.best or than
    for number in _list_numbers_about(waves.number or than.waves) if best.waves > 1 else ():
        waves.try_number(number, (best.zero_stage,), search_wave)
    return waves.best, waves.bound_s


class _FasterWaves:
    """The fastest plan in several waves so far, the number of waves that it was searched with (0:
    none), and a lower bound of the plans tried."""

    def __init__(self, profile: Profile, request: PlanRequest, below_s: float) -> None:
        self.best: Plan | None = None
        self.number = 0
        self.bound_s = float("inf")
        self._gathers_s = float("inf")  # of a wave; not known before a plan is found
        self._profile, self._request, self._below_s = profile, request, below_s
        self._counts = Counter(d.device_class for d in ranked_devices(profile, request))
        self._speeds = [
            (compute_ideal_samples_per_s(profile, name), count)
            for name, count in self._counts.items()
        ]

    def try_number(
        self,
        number: int,
        zero_stages: Sequence[ZeroStage],
        search_wave: Callable[[Profile, PlanRequest, float], Searched],
    ) -> None:
        """Search a plan in about so many waves, at each of these ZeRO stages."""
        batch, space = self._request.global_batch, self._request.space
        if number > batch:
            return
        shared = _share_step(self._profile, number)
        size = _choose_size(self._speeds, batch, number)
        for zero_stage in zero_stages:
            update = {
                "global_batch": size,
                "space": space.model_copy(update={"zero_stages": (zero_stage,)}),
            }
            saved_s = self._get_saved_s(zero_stage)
            limit_s = min(self._below_s, self._below_s * size / batch + saved_s)
            with suppress(NoFeasiblePlanError, InputError):
                found, bound_s = search_wave(
                    shared, self._request.model_copy(update=update), limit_s
                )
                if found is not None:
                    self._gathers_s = VARIES * _sum_gathers_s(shared, found)
                least_s = max(0.0, (bound_s or 0.0) - self._get_saved_s(zero_stage))
                of_others_s = (batch / size - 1) * least_s
                self.bound_s = min(self.bound_s, (bound_s or 0.0) + of_others_s)
                plan = found and _repeat_below(self._profile, found, batch, self._below_s)
                if plan is not None:
                    self.best, self.number = plan, number
                    self._below_s = get_prediction(plan).step_s

    def _get_saved_s(self, zero_stage: ZeroStage) -> float:
        """Return the seconds by which a wave but one is shorter than alone, about the most: below
        stage 3 parameters are gathered once a step, and state on hosts is updated once."""
        profile, counts = self._profile, self._counts
        there = "host" in self._request.space.state_on
        copied = [
            optimizer_seconds(
                profile.model_copy(
                    update={"classes": tuple(map(_update_for_free, profile.classes))}
                ),
                name,
                zero_stage,
                "host",
            )
            for name in counts
            if there and can_keep_state_on_host(profile, name)
        ]
        copies_s = max(copied, default=0.0) * min(1.0, VARIES / counts.total())
        return copies_s + (0.0 if zero_stage == 3 else self._gathers_s)


def _update_for_free(one: ClassProfile) -> ClassProfile:
    """Return a class whose host takes no time to update, only to copy."""
    free = one.host_optimizer_s_per_element and 0.0
    return one.model_copy(update={"host_optimizer_s_per_element": free})


def _choose_size(speeds: Sequence[tuple[float, int]], batch: int, number: int) -> int:
    """Return the samples of a wave with which devices have the least to wait, of those with which
    there are so many waves; the fewest if so many that whole samples make no difference.

    Args:
        speeds: samples per second and number of devices, of each class.
    """
    least, devices = ceil(batch / number), sum(count for _, count in speeds)
    if least > FEW_SAMPLES * devices or any(speed == float("inf") for speed, _ in speeds):
        return least
    most = max(least, min(ceil(batch / (number - 1)) - 1, least + MOST_SIZES))

    def wait_s(size: int) -> float:
        """Return the seconds of a sample, if whole samples are where they end first."""
        ends = sorted({n / speed for speed, _ in speeds for n in range(1, size + 1)})
        done = bisect_left(
            ends,
            size,
            key=lambda end: sum(count * int(end * speed + ROUNDING) for speed, count in speeds),
        )
        return ends[done] / size

    return min(range(least, most + 1), key=lambda size: (round(wait_s(size), 12), size))


def _sum_gathers_s(profile: Profile, plan: Plan) -> float:
    """Return the seconds of all gathers before and in a forward pass."""
    links = compute_plan_collectives(*reduce_to_leaders(profile, plan))
    return links.gather_s[ROOT] + links.idle_pass_s[0]


def _list_numbers_about(number: int) -> list[int]:
    """Return numbers of waves near one of `FASTER_NUMBERS`, up to the next ones."""
    return [near for near in NUMBERS if number < 2 * near and near < 2 * number and near != number]


def _repeat_below(profile: Profile, of_wave: Plan, batch: int, below_s: float) -> Plan | None:
    """Return the plan of a batch in such waves; None if it does not fit, or takes no less than
    `below_s`."""
    best: Plan | None = None
    fuller: Plan | None = None
    with suppress(InputError):
        fuller = repeat_wave(profile, of_wave, batch, fuller=True)
    if fuller is not None and not _is_below(profile, fuller, below_s):
        fuller = None
    plan = fuller or repeat_wave(profile, of_wave, batch)
    # Fewer waves with a micro-batch more in some may fit: the last one may be small.
    while _is_below(profile, plan, below_s if best is None else get_prediction(best).step_s):
        best = plan
        if plan.waves <= 2:
            break
        fewer = plan.model_copy(update={"waves": plan.waves - 1})
        plan = fewer.model_copy(update={"prediction": predict(profile, fewer)})
    return best


def _is_below(profile: Profile, plan: Plan, below_s: float) -> bool:
    """Return True if a plan is faster than that, and devices and hosts have room: a wave that is
    repeated may keep more there than alone."""
    expected = get_prediction(plan)
    if expected.step_s >= below_s or not is_within_memory(expected.workers):
        return False
    with suppress(LoadingMemoryError):
        check_room_for_loading(profile, plan)
        return True
    return False


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


def repeat_wave(
    profile: Profile, of_wave: Plan, global_batch: int, *, fuller: bool = False
) -> Plan:
    """Return the plan of a batch in waves, in none of which a worker has more samples than in the
    plan of one wave.

    Args:
        fuller: a wave may have the few samples more with which a worker's last micro-batch is as
            large as the others, and may then not fit.

    Raises:
        InputError: the batch is too small for waves of whole micro-batches.
    """
    (stage,) = of_wave.stages
    # Whole micro-batches: a wave of so many has no more samples, wherever the smaller ones are.
    if fuller:
        numbers = [len(w.micro_batches) for w in stage.leaders]
        sizes = [ceil(w.samples / max(1, n)) for w, n in zip(stage.leaders, numbers)]
    else:
        sizes = [_choose_micro_batch(w) for w in stage.leaders]
        numbers = [w.samples // size if size else 0 for w, size in zip(stage.leaders, sizes)]
    rooms = [number * size for number, size in zip(numbers, sizes)]
    waves = ceil(global_batch / sum(rooms))
    changes = {"global_batch": global_batch, "waves": waves, "prediction": None}
    plans: list[Plan] = []
    for samples in _list_deals(stage, [room * waves for room in rooms], global_batch):
        dealt = _deal(stage, samples, sizes)
        if waves <= max(len(worker.micro_batches) for worker in dealt.workers):
            plans.append(of_wave.model_copy(update={**changes, "stages": (dealt,)}))
    if not plans:
        raise InputError(
            f"no worker has a micro-batch for each of {waves} waves",
            code="waves-without-micro-batches",
        )
    one_way = len(plans) == 1
    plan = plans[0] if one_way else min(plans, key=partial(predict_step_seconds, profile))
    return plan.model_copy(update={"prediction": predict(profile, plan)})


def _list_deals(stage: Stage, rooms: Sequence[int], batch: int) -> Iterable[tuple[int, ...]]:
    """Return ways to deal a batch into the rooms of teams: in proportion, and with all that the
    batch is short of at one class, which then has nothing to do in some waves."""
    whole = sum(rooms)
    deals = [compute_shard_sizes(batch, tuple(room / whole for room in rooms))]
    for name in {leader.device_class: None for leader in stage.leaders}:
        own = [room * (w.device_class == name) for room, w in zip(rooms, stage.leaders)]
        if whole - batch < sum(own) < whole:
            less = compute_shard_sizes(whole - batch, tuple(room / sum(own) for room in own))
            deals.append(tuple(room - few for room, few in zip(rooms, less)))
    return dict.fromkeys(deals)


def _choose_micro_batch(worker: Worker) -> int:
    """Return the size of at least half of a worker's micro-batches that leaves the fewest of its
    samples over, the largest of these."""
    sizes = range((worker.micro_batch + 1) // 2, worker.micro_batch + 1)
    return max(sizes, key=lambda size: (size and worker.samples // size * size, size))


def _deal(stage: Stage, samples: Sequence[int], sizes: Sequence[int]) -> Stage:
    """Return the stage with new samples of its teams, in micro-batches of these sizes."""
    workers: list[Worker] = []
    for count, size, team in zip(samples, sizes, stage.teams, strict=True):
        changes = {"samples": count, "micro_batch": min(size, count), "kept_graphs": 0}
        workers += [worker.model_copy(update=changes) for worker in team]
    return stage.model_copy(update={"workers": tuple(workers)})
