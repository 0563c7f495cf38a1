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
from gpumix.cost.predict import predict, predict_step_seconds
from gpumix.planner.common.strategy import (
    PlanRequest,
    get_prediction,
    is_within_memory,
    list_devices_by_rank,
)
from gpumix.planner.data_parallel.class_options import TimeBounds
from gpumix.planner.data_parallel.no_fit_error import can_fit_devices
from gpumix.planner.data_parallel.search import plan_one_stage_below
from gpumix.planner.pipeline_parallel.tensor_parallel_search import Searched
from gpumix.planner.refine import join_units
from gpumix.schema.errors import InputError, LoadingMemoryError, NoFeasiblePlanError
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.splitting import compute_shard_sizes
from gpumix.schema.plan.stage import Stage, Worker
from gpumix.schema.profile.profile import Profile

NUMBERS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64)  # of waves, as first tried
MOST_TRIED = 4  # numbers of waves, from the first at which memory may suffice
FASTER_NUMBERS = (2, 4, 8, 16, 32)  # of waves that may be faster than one
# Samples of a device in a wave up to which they may be too few to divide them well; and how many
# more of a wave are tried then.
FEW_SAMPLES, MOST_SIZES = 8, 16
ROUNDING = 1e-9
MAX_JOIN_FACTOR = 1.02  # most that joined units may gain
MOST_FAILED = 2  # numbers of waves that were no faster, of a ZeRO stage


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
    devices = list_devices_by_rank(profile, request)
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


class FasterWaves:
    """Search of plans in several waves that are faster than `below_s`, of workers alike.

    Args:
        paces: of these classes and this batch.
    """

    def __init__(
        self, profile: Profile, request: PlanRequest, paces: TimeBounds, below_s: float
    ) -> None:
        self._profile, self._request, self._paces = profile, request, paces
        self._below_s = below_s
        self._devices = list_devices_by_rank(profile, request)
        counts = Counter(device.device_class for device in self._devices)
        self._speeds = [
            (compute_ideal_samples_per_s(profile, name), count) for name, count in counts.items()
        ]
        self._best: Plan | None = None
        self._number = 0  # of waves, with which the best was searched
        self._bound_s = float("inf")

    def search(self) -> Searched:
        """Return the fastest plan, None if none is faster; and a lower bound of those tried."""
        space = self._request.space.of_one_wave()
        if space is None:
            return None, float("inf")
        for zero_stage in space.zero_stages:
            of_stage = space.model_copy(update={"zero_stages": (zero_stage,)})
            failed = 0
            for number in FASTER_NUMBERS:
                failed += self._try_number(number, of_stage)
                if failed == MOST_FAILED:
                    break
        if self._best is not None:
            of_stage = space.model_copy(update={"zero_stages": (self._best.zero_stage,)})
            for numbers in _list_numbers_about(self._number):
                any(self._try_number(number, of_stage) for number in numbers)
        return self._best, self._bound_s

    def _try_number(self, number: int, space: Space) -> bool:
        """Search a plan in about so many waves; return True if they are slower, though they fit."""
        batch = self._request.global_batch
        if number > batch:
            return False
        size = _choose_size(self._speeds, batch, number)
        part = self._request.model_copy(update={"global_batch": size, "space": space})
        paces, waves = self._paces.of_part(self._profile, size), batch / size
        try:
            limit_s = MAX_JOIN_FACTOR * self._below_s
            found = plan_one_stage_below(self._profile, part, paces, limit_s / waves, waves=waves)
            if found is None:
                self._bound_s = min(self._bound_s, self._below_s)
                return can_fit_devices(self._profile, self._devices, space, size)
            self._bound_s = min(self._bound_s, waves * (get_prediction(found).bound_s or 0.0))
            plan = _repeat_below(self._profile, found, batch, limit_s)
        except (NoFeasiblePlanError, InputError):
            return False
        plan = plan and join_units(self._profile, plan, self._below_s)
        if plan is None or get_prediction(plan).step_s >= self._below_s:
            return True
        self._best, self._number, self._below_s = plan, number, get_prediction(plan).step_s
        return False


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


def _list_numbers_about(number: int) -> tuple[list[int], list[int]]:
    """Return the fewer and the more waves up to the next of `FASTER_NUMBERS`, the nearest first."""
    fewer = [near for near in NUMBERS if number < 2 * near < 2 * number]
    return fewer[::-1], [near for near in NUMBERS if number < near < 2 * number]


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
    """Return ways to deal a batch into the rooms of tensor-parallel groups: in proportion, and
    with all that the batch is short of at one class, which then has nothing to do in some waves."""
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
    """Return the stage with new samples of its tensor-parallel groups, in micro-batches of these
    sizes."""
    workers: list[Worker] = []
    for count, size, tp_group in zip(samples, sizes, stage.tp_groups, strict=True):
        changes = {"samples": count, "micro_batch": min(size, count), "kept_graphs": 0}
        workers += [worker.model_copy(update=changes) for worker in tp_group]
    return stage.model_copy(update={"workers": tuple(workers)})
