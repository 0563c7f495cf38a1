"""Climbs among plans of one stage, in one wave or in several: samples, micro-batches, waves, modes,
state and buckets, one change at a time. Each plan is judged by the cost model alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, permutations, product
from math import ceil
from random import Random

from pydantic import ValidationError

from gpumix.cost.loading_memory import find_room_on_host
from gpumix.cost.predict import predict
from gpumix.cost.step_time import can_keep_state_on_host, can_predict_mode
from gpumix.planner.common.strategy import PlanRequest, is_within_memory
from gpumix.schema.errors import GpumixError
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import PLAIN, Worker
from gpumix.schema.profile.profile import Profile

LEAST_GAIN = 1e-9
MOST_WAVES = 32  # of a plan that is drawn
Workers = list[Worker]
Changes = dict[str, object]
# What fewer activations at once may spare, of all workers.
EASIER: tuple[Changes, ...] = (
    {},
    {"recompute": False, "boundary": "device"},
    {"boundary": "device"},
    {"head": "whole"},
    {"head": "chunked"},
    {"state_on": "device"},
    {"recompute": False, "boundary": "device", "head": "whole", "state_on": "device"},
)


class OneStageClimb:
    """Climbs from plans of one stage on devices that compute alone.

    Args:
        starts: plans to begin with; their devices, samples and forms are those of drawn ones.
        budget: plans that are predicted, by all climbs together.
        drawn: climbs that begin with a random plan on the devices of the first start.
    """

    def __init__(
        self,
        profile: Profile,
        request: PlanRequest,
        *starts: Plan,
        budget: int,
        seed: int,
        drawn: int = 1,
    ) -> None:
        assert all(len(plan.stages) == 1 for plan in starts)
        self._profile, self._space = profile, request.space
        self._left, self._budget, self._random = budget, budget, Random(seed)
        self._starts, self._drawn = starts, drawn
        self.plan = starts[0]

    def run(self) -> float:
        """Seconds of the fastest plan that was found."""
        best_s = float("inf")
        climbs = len(self._starts) + self._drawn
        for number in range(climbs):
            end = self._budget - self._budget * (number + 1) // climbs
            start = self._starts[number] if number < len(self._starts) else self._draw(end)
            if start is None:
                continue
            found, found_s = self._climb(start, end)
            if found_s < best_s:
                self.plan, best_s = found, found_s
        return best_s

    def _climb(self, plan: Plan, end: int) -> tuple[Plan, float]:
        best_s = predict(self._profile, plan).step_s
        seen = {_key(plan)}
        improved = True
        while improved and self._left > end:
            improved = False
            others = list(self._neighbours(plan))
            self._random.shuffle(others)
            for other in others:
                if _key(other) in seen:
                    continue
                seen.add(_key(other))
                seconds = self._seconds(other)
                if seconds < best_s * (1 - LEAST_GAIN):
                    plan, best_s, improved = other, seconds, True
                    break
                if self._left <= end:
                    break
        return plan, best_s

    def _draw(self, end: int) -> Plan | None:
        """A random plan in several waves that fits; None if half of the plans until `end` do
        not."""
        like, random = self._starts[0], self._random
        end += (self._left - end) // 2
        stages = [stage for stage in self._space.zero_stages if stage >= 2]
        while stages and self._left > end:
            waves = random.randint(2, min(MOST_WAVES, max(2, like.global_batch)))
            speeds: dict[str, float] = {}
            weights = [speeds.setdefault(w.device_class, random.random()) for w in like.workers]
            counts = _share_out(like.global_batch, weights)
            modes, sizes = list(self._space.modes(3)), {}
            worn: dict[str, Changes] = {}
            workers = []
            for worker, count in zip(like.workers, counts):
                sizes.setdefault(worker.device_class, random.choice((1, 1, 2, 4)))
                own = worn.setdefault(worker.device_class, {"mode": random.choice(modes)})
                size = _cut(count, waves, sizes[worker.device_class])
                update = {"samples": count, "micro_batch": size, "kept_graphs": 0, **own}
                workers.append(worker.model_copy(update=update))
            plan = _with(like, workers).model_copy(
                update={"waves": waves, "zero_stage": random.choice(stages)}
            )
            if self._seconds(plan) < float("inf"):
                return plan
        return None

    def _seconds(self, plan: Plan) -> float:
        """Of a plan that is in the space, measured, and has room; else infinite."""
        if self._space.missing(plan) or not all(map(self._measured, plan.workers)):
            return float("inf")
        self._left -= 1
        try:
            plan = Plan.model_validate(plan.model_dump())  # copies are not checked
            expected = predict(self._profile, plan)
        except (GpumixError, AssertionError, ValidationError):
            return float("inf")
        if not is_within_memory(expected.workers) or not self._has_host_memory(plan, expected):
            return float("inf")
        return expected.step_s

    def _measured(self, worker: Worker) -> bool:
        of_class = self._profile.of_class(worker.device_class)
        largest = of_class.largest_micro_batch
        return (
            can_predict_mode(self._profile, worker.device_class, worker.mode)
            and (largest is None or worker.micro_batch <= largest)
            and (
                worker.state_on == "device"
                or can_keep_state_on_host(self._profile, worker.device_class)
            )
        )

    def _has_host_memory(self, plan: Plan, expected) -> bool:
        limits = (find_room_on_host(self._profile, w.device_class) for w in plan.workers)
        return all(
            limit is None or told.host_bytes <= limit
            for limit, told in zip(limits, expected.workers)
        )

    # -- what is one change away -------------------------------------------------------------------

    def _neighbours(self, plan: Plan) -> Iterator[Plan]:
        (stage,) = plan.stages
        for joined in {stage.joined - 1, stage.joined + 1, 2 * stage.joined}:
            if joined > 0:
                changed = stage.model_copy(update={"joined": joined})
                yield plan.model_copy(update={"stages": (changed,), "prediction": None})
        for zero_stage in self._space.zero_stages:
            if zero_stage >= 2 or plan.waves == 1:
                yield plan.model_copy(update={"zero_stage": zero_stage})
        for sharding in self._space.shardings:
            yield plan.model_copy(update={"sharding": sharding})
        yield from self._other_waves(plan)
        workers = list(stage.workers)
        for changed in (*_other_shares(workers), *self._other_modes(workers, plan.waves)):
            yield _with(plan, changed)
        for changed in _other_samples(workers, plan.waves):
            yield _with(plan, changed)

    def _other_waves(self, plan: Plan) -> Iterator[Plan]:
        """In other numbers of waves, with what that may spare: micro-batches of the same size, as
        many of them in a wave as before, or a few."""
        now, workers = plan.waves, plan.stages[0].workers
        numbers = {now - 1, now + 1, now + 2, now // 2, 2 * now, 4 * now, 1} - {-1, 0, now}
        stages = {plan.zero_stage} if plan.zero_stage >= 2 else {2, 3}
        every = product(sorted(numbers), stages & set(self._space.zero_stages), EASIER)
        for waves, zero_stage, easier in every:
            eased = [_change(worker, easier, in_waves=waves > 1) for worker in workers]
            kept = [_resize(w, min(w.micro_batch, _cut(w.samples, waves, 1))) for w in eased]
            scaled = [_scale(w, now, waves) for w in eased]
            few = [[_resize(w, _cut(w.samples, waves, n)) for w in eased] for n in (1, 2, 4)]
            for changed in (kept, scaled, *few):
                yield _with(plan, changed).model_copy(
                    update={"waves": waves, "zero_stage": zero_stage}
                )

    def _other_modes(self, workers: Workers, waves: int) -> Iterator[Workers]:
        """Of all workers of a class with so many samples, and of all of a class."""
        kinds: dict[object, list[int]] = {}
        for rank, w in enumerate(workers):
            kinds.setdefault((w.device_class, w.samples), []).append(rank)
            kinds.setdefault(w.device_class, []).append(rank)
        for ranks in {tuple(ranks) for ranks in kinds.values()}:
            for update in _changes(workers[ranks[0]], waves):
                changed = list(workers)
                for rank in ranks:
                    changed[rank] = workers[rank].model_copy(update=update)
                yield changed


def _other_samples(workers: Workers, waves: int) -> Iterator[Workers]:
    """A few samples move from a worker to another, or from all workers of a kind to those of
    another."""
    alike: dict[object, list[int]] = {}
    for rank, w in enumerate(workers):
        key = w.device_class, w.samples, w.micro_batch, w.mode, w.kept_graphs, w.state_share
        alike.setdefault(key, []).append(rank)
    for givers, takers in permutations(alike.values(), 2):
        for count in {1, 2, waves, 2 * waves}:
            moves = [(givers[:1], takers[:1]), (givers, takers)]
            for some, others in moves[: 1 if len(givers) == len(takers) == 1 else 2]:
                total = count * len(some)
                if workers[some[0]].samples < count:
                    continue
                moved = list(workers)
                for rank in some:
                    moved[rank] = _of_samples(workers[rank], -count, waves)
                for rank, more in zip(others, _share_out(total, [1.0] * len(others))):
                    moved[rank] = _of_samples(workers[rank], more, waves)
                yield moved
    for giver, taker in permutations([ranks[0] for ranks in alike.values()], 2):
        # A sample of a kind may have to move where several have as many to do.
        for rank in (giver, taker):
            if waves > 1 and workers[rank].samples:
                size = _cut(workers[rank].samples, waves, 1)
                changed = list(workers)
                changed[rank] = _resize(workers[rank], size)
                yield changed


def _other_shares(workers: Workers) -> Iterator[Workers]:
    kinds: dict[object, list[int]] = {}
    for rank, w in enumerate(workers):
        kinds.setdefault((w.device_class, w.samples, w.mode, w.state_share), []).append(rank)
    for givers, takers in permutations(kinds.values(), 2):
        for part in (0.1, 0.02):
            share = min(workers[givers[0]].state_share, part / len(workers))
            moved = list(workers)
            for ranks, more in ((givers, -share), (takers, share * len(givers) / len(takers))):
                for rank in ranks:
                    update = {"state_share": workers[rank].state_share + more}
                    moved[rank] = workers[rank].model_copy(update=update)
            yield moved


def _changes(worker: Worker, waves: int) -> Iterator[Changes]:
    size, kept, mode = worker.micro_batch, worker.kept_graphs, worker.mode
    for other in {size - 1, size + 1, 2 * size, size // 2, _cut(worker.samples, waves, 1)}:
        if 0 < other <= worker.samples:
            yield {"micro_batch": other, "kept_graphs": 0}
            if waves == 1:
                yield {"micro_batch": other}
    for other in {kept - 1, kept + 1, kept + 4, kept // 2} if waves == 1 else ():
        if other >= 0 and mode.recompute and worker.samples:
            yield {"kept_graphs": other}
    changes: tuple[Changes, ...] = (
        {"recompute": not mode.recompute},
        {"boundary": "host" if mode.boundary == "device" else "device"},
        {"order": "sequential" if mode.order == "layered" else "layered"},
        {"head": "chunked" if mode.head == "whole" else "whole"},
        {"recompute": False, "boundary": "device"},
    )
    for change in changes:
        yield {"mode": mode.model_copy(update=change), "kept_graphs": 0}
    yield {"state_on": "host" if worker.state_on == "device" else "device"}


def _change(worker: Worker, easier: Changes, *, in_waves: bool) -> Worker:
    """With easier techniques; in waves each block is taken for all micro-batches of a wave."""
    of_mode = {key: value for key, value in easier.items() if key in type(PLAIN).model_fields}
    if in_waves:
        of_mode["order"] = "layered"
    update: Changes = {"mode": worker.mode.model_copy(update=of_mode)}
    if in_waves or of_mode:
        update["kept_graphs"] = 0
    if "state_on" in easier:
        update["state_on"] = easier["state_on"]
    return worker.model_copy(update=update)


def _cut(samples: int, waves: int, each: int) -> int:
    """Of how many samples micro-batches are, if so many of them are in a wave."""
    return ceil(ceil(samples / waves) / each)


def _resize(worker: Worker, micro_batch: int) -> Worker:
    return worker.model_copy(update={"micro_batch": micro_batch})


def _scale(worker: Worker, now: int, waves: int) -> Worker:
    """With as many micro-batches in a wave as now."""
    each = max(1, -(-len(worker.micro_batches) // now))
    return _resize(worker, _cut(worker.samples, waves, each))


def _of_samples(worker: Worker, more: int, waves: int) -> Worker:
    samples = worker.samples + more
    if waves > 1 and worker.samples and samples:
        changed = worker.model_copy(update={"samples": samples})
        each = -(-len(worker.micro_batches) // waves)
        return changed.model_copy(update={"micro_batch": _cut(samples, waves, each)})
    micro_batch = min(max(worker.micro_batch, 1), samples)
    if worker.micro_batch == worker.samples:  # one micro-batch stays one
        micro_batch = samples
    return worker.model_copy(update={"samples": samples, "micro_batch": micro_batch})


def _share_out(total: int, weights: Sequence[float]) -> list[int]:
    """Of a whole number, by weights."""
    ends, running, whole = [0], 0.0, sum(weights)
    for weight in weights:
        running += weight
        ends.append(round(total * running / whole))
    return [end - begin for begin, end in pairwise(ends)]


def _key(plan: Plan) -> object:
    (stage,) = plan.stages
    own = [
        (w.samples, w.micro_batch, w.state_share, w.mode, w.kept_graphs, w.state_on)
        for w in stage.workers
    ]
    return plan.zero_stage, plan.sharding, plan.waves, stage.joined, *own


def _with(plan: Plan, workers: Iterable[Worker]) -> Plan:
    stage = plan.stages[0].model_copy(update={"workers": tuple(workers)})
    return plan.model_copy(update={"stages": (stage,), "prediction": None})
