"""A climb from a plan of one stage: samples, micro-batches, modes, state and buckets, one change at
a time. Each plan is judged by the cost model alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from random import Random

from pydantic import ValidationError

from gpumix.cost.loading_memory import find_room_on_host
from gpumix.cost.predict import predict
from gpumix.cost.step_time import can_keep_state_on_host, can_predict_mode
from gpumix.planner.common.strategy import PlanRequest, is_within_memory
from gpumix.schema.errors import GpumixError
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Worker
from gpumix.schema.profile.profile import Profile

LEAST_GAIN = 1e-9


class OneStageClimb:
    """Climbs from a plan of one stage on devices that compute alone.

    Args:
        budget: plans that are predicted.
    """

    def __init__(
        self, profile: Profile, request: PlanRequest, plan: Plan, *, budget: int, seed: int
    ) -> None:
        assert len(plan.stages) == 1
        self._profile, self._space = profile, request.space
        self._left, self._random = budget, Random(seed)
        self.plan = plan

    def run(self) -> float:
        """Seconds of the fastest plan that was found."""
        best_s = predict(self._profile, self.plan).step_s
        improved = True
        while improved and self._left > 0:
            improved = False
            others = list(self._neighbours(self.plan))
            self._random.shuffle(others)
            for other in others:
                seconds = self._seconds(other)
                if seconds < best_s * (1 - LEAST_GAIN):
                    self.plan, best_s, improved = other, seconds, True
                    break
                if self._left <= 0:
                    break
        return best_s

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

    def _neighbours(self, plan: Plan) -> Iterator[Plan]:
        (stage,) = plan.stages
        for joined in {stage.joined - 1, stage.joined + 1, 2 * stage.joined}:
            if joined > 0:
                yield _with(plan, stage.model_copy(update={"joined": joined}))
        for zero_stage in self._space.zero_stages:
            yield plan.model_copy(update={"zero_stage": zero_stage})
        for sharding in self._space.shardings:
            yield plan.model_copy(update={"sharding": sharding})
        for workers in self._other_workers(list(stage.workers)):
            yield _with(plan, stage.model_copy(update={"workers": tuple(workers)}))

    def _other_workers(self, workers: list[Worker]) -> Iterator[list[Worker]]:
        alike: dict[object, list[int]] = {}
        for rank, w in enumerate(workers):
            key = w.device_class, w.samples, w.micro_batch, w.mode, w.kept_graphs, w.state_share
            alike.setdefault(key, []).append(rank)
        for giver, taker in permutations([ranks[0] for ranks in alike.values()], 2):
            for count in (1, 2):
                if workers[giver].samples >= count:
                    moved = list(workers)
                    moved[giver] = _of_samples(workers[giver], -count)
                    moved[taker] = _of_samples(workers[taker], count)
                    yield moved
            share = min(workers[giver].state_share, 0.1 / len(workers))
            moved = list(workers)
            for rank, more in ((giver, -share), (taker, share)):
                update = {"state_share": workers[rank].state_share + more}
                moved[rank] = workers[rank].model_copy(update=update)
            yield moved
        kinds: dict[object, list[int]] = {}
        for rank, w in enumerate(workers):
            kinds.setdefault((w.device_class, w.samples), []).append(rank)
        for ranks in kinds.values():
            for update in self._changes(workers[ranks[0]]):
                changed = list(workers)
                for rank in ranks:
                    changed[rank] = workers[rank].model_copy(update=update)
                yield changed

    def _changes(self, worker: Worker) -> Iterator[dict[str, object]]:
        size, kept, mode = worker.micro_batch, worker.kept_graphs, worker.mode
        for other in {size - 1, size + 1, 2 * size, size // 2}:
            if 0 < other <= worker.samples:
                yield {"micro_batch": other, "kept_graphs": 0}
                yield {"micro_batch": other}
        for other in {kept - 1, kept + 1, kept + 4, kept // 2}:
            if other >= 0 and mode.recompute and worker.samples:
                yield {"kept_graphs": other}
        changes = (
            {"recompute": not mode.recompute},
            {"boundary": "host" if mode.boundary == "device" else "device"},
            {"order": "sequential" if mode.order == "layered" else "layered"},
            {"head": "chunked" if mode.head == "whole" else "whole"},
        )
        for change in changes:
            yield {"mode": mode.model_copy(update=change), "kept_graphs": 0}
        yield {"state_on": "host" if worker.state_on == "device" else "device"}


def _of_samples(worker: Worker, more: int) -> Worker:
    samples = worker.samples + more
    micro_batch = min(max(worker.micro_batch, 1), samples)
    if worker.micro_batch == worker.samples:  # one micro-batch stays one
        micro_batch = samples
    return worker.model_copy(update={"samples": samples, "micro_batch": micro_batch})


def _with(plan: Plan, stage) -> Plan:
    return plan.model_copy(update={"stages": (stage,), "prediction": None})
