"""Prediction of one step of a plan with several pipeline stages.

Each stage is a model of its own (`cost.pipeline.stage_model`). The rest of the cost model gives the
time of one pass of one micro-batch on each of its workers, and the memory left behind.
`cost.pipeline_schedule` gives the order; a replay of the order, with the messages between stages,
is the step:

* Below ZeRO stage 2 the first forward of a stage waits for its parameters, and its gradients are
  reduced after its last backward; at stage 0, if a rank has one stage, concurrently with it.
* From stage 2 on all workers of a stage run waves together: a wave takes the time of its slowest
  worker, including gathers and reductions.
* Root parameters used by several stages are gathered before the step and reduced after it.
* Between two hosts, messages are serialized; inside a host, messages do not slow each other down.

A rank stores the state of its stages, the activations of micro-batches between their forward and
their backward, and the working set of the current one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import itemgetter

import numpy as np

from gpumix.cost.memory_layout.buffer_slots import align_size
from gpumix.cost.memory_layout.curves import interpolate_bytes
from gpumix.cost.network.buckets import GRADIENT_BYTES
from gpumix.cost.network.link_times import Messages, build_subset_link_model
from gpumix.cost.peak_memory import MASTER_BYTES, StateModel, compute_usable_bytes
from gpumix.cost.pipeline.stage_cost import StageCost, select_larger
from gpumix.cost.pipeline.stage_model import SharedParameters, cut_into_stages
from gpumix.cost.pipeline_schedule import (
    NO_TRANSFER,
    Action,
    ActionTimes,
    Kind,
    MicroBatchSchedule,
    Transfer,
    replay,
)
from gpumix.cost.tensor_parallel_groups import compute_stage_end_seconds, make_stage_leaders
from gpumix.schema.cluster.link_islands import find_smallest_place
from gpumix.schema.plan.plan import Plan, Prediction, WorkerPrediction
from gpumix.schema.plan.splitting import compute_shard_sizes
from gpumix.schema.plan.stage import DTYPE_BYTES, StageInput, StageMicroBatch, Worker
from gpumix.schema.profile.profile import Profile

MESSAGES_AHEAD = 2  # actions with messages expected or in flight at once


def predict_stages(profile: Profile, plan: Plan) -> Prediction:
    """Predict one step of a plan with several stages.

    Raises:
        InputError: the profile does not say what units need of each other, or nothing is known of a
            collective or a link.
    """
    step = StagedStep(profile, plan)
    seconds, hidden = step.seconds, StagedStep(profile, plan, moved=False).seconds
    return Prediction(
        step_s=seconds,
        tokens_per_s=plan.global_batch * plan.sequence_length / seconds if seconds else np.inf,
        exposed_communication_s=max(0.0, seconds - hidden),
        workers=tuple(step.workers()),
    )


def compute_edge_seconds(profile: Profile, plan: Plan) -> list[float]:
    """Return about the seconds of each stage before its first forward and after its last backward:
    to gather and reduce once, and to update on its slowest worker. Nothing is replayed."""
    return [
        cost.before_s()
        + sum(cost.links.gather_s.get(kind, 0.0) for kind in cost.links.buckets.kinds)
        + cost.after_s(overlapped=False)
        + max(cost.update_s(worker) for worker in range(len(cost.workers)))
        for cost in StagedStep(profile, plan).stages
    ]


@dataclass(frozen=True)
class StageReductions:
    """Begin and end of each stage's reduction."""

    of_stages: Mapping[int, tuple[float, float]]

    def end_of(self, stage: int) -> float:
        return self.of_stages[stage][1]


class StagedStep:
    """Step of a plan with several stages; a tensor-parallel group counts as its first rank.

    Args:
        moved: communication takes time.
    """

    def __init__(self, profile: Profile, plan: Plan, *, moved: bool = True) -> None:
        self._whole, plan = plan, plan.of_leaders
        self.profile, self.plan = profile, plan
        self.pipeline = MicroBatchSchedule.of(plan)
        self._device_of = {device.id: device for device in profile.cluster.devices}
        self.cut = cut_into_stages(profile.model, [stage.units for stage in plan.stages])
        self.stages = [
            StageCost(
                make_stage_leaders(profile, stage, in_stages=True),
                self.cut,
                plan,
                number,
                near=find_smallest_place(
                    [self._device_of[w.device] for w in plan.stages[number].workers]
                ),
                moved=moved,
            )
            for number, stage in enumerate(self._whole.stages)
        ]
        self._messages = Messages(profile, moved)
        self._sizes: dict[tuple[int, int, int], int] = {}
        self._totals: dict[
            tuple[int, int], dict[tuple[int, int], tuple[tuple[int, int, int], ...]]
        ] = {}
        self._transfers: dict[Hashable, Transfer] = {}
        self._seconds: dict[Hashable, float] = {}
        self._amounts: dict[tuple[int, int], Hashable] = {}
        self._moved = moved
        self.in_waves = plan.in_waves
        self._workers = plan.workers
        rank_of = {worker.device: rank for rank, worker in enumerate(self._workers)}
        self._ranks = [tuple(rank_of[w.device] for w in stage.workers) for stage in plan.stages]
        # By (stage, rank): the rank's place among the stage's workers.
        self.place_of = {
            (number, rank): place
            for number, ranks in enumerate(self._ranks)
            for place, rank in enumerate(ranks)
        }
        self._stages_of: list[list[int]] = [[] for _ in self._workers]
        for number, rank in self.place_of:
            self._stages_of[rank].append(number)

    # -- time ----------------------------------------------------------------------------------

    @cached_property
    def times(self) -> ActionTimes:
        """Times of each action; a wave's are stored under the stage's first rank, for all ranks."""
        return replay(
            self.pipeline.orders,
            self.pipeline.needs,
            self.action_s,
            self._transfer,
            self._earliest_s,
        )

    @cached_property
    def seconds(self) -> float:
        """Seconds of the step; a rank updates all of its stages after the last reduction of any."""
        updated = (
            max(self.reductions[-1].end_of(number) for number in stages)
            + sum(self.stages[number].update_s(self.place_of[number, rank]) for number in stages)
            for rank, stages in enumerate(self._stages_of)
        )
        return max(updated) + self.profile.step_overhead_s

    @cached_property
    def reductions(self) -> tuple[StageReductions, ...]:
        """Reductions of gradients after the last backward: first each stage's own, then the shared.
        Each entry copies the unchanged ends of the previous entries."""
        own: dict[int, tuple[float, float]] = {}
        for number, cost in enumerate(self.stages):
            of_stage = {a: end for a, end in self.times.end_s.items() if a.stage == number}
            computed = max(of_stage.values())
            begun = max(end + self._compute_all_reduce_tail_s(a) for a, end in of_stage.items())
            overlapped = self.in_waves or self._can_overlap_all_reduce(number)
            own[number] = computed, begun + cost.after_s(overlapped=overlapped)
        found = [StageReductions(own)]
        for shared in self.cut.shared:
            before = found[-1].of_stages
            begin = max(before[number][1] for number in shared.stages)
            both = (begin, begin + self._shared_s(shared))
            found.append(StageReductions(dict(before) | dict.fromkeys(shared.stages, both)))
        return tuple(found)

    def _can_overlap_all_reduce(self, stage: int) -> bool:
        """Check if all ranks of a stage begin an all-reduce during the last action of a step."""
        return self.plan.zero_stage == 0 and all(
            len(self._stages_of[rank]) == 1
            and all(self._adds(action, place) for action in self.order(rank)[-1:])
            for place, rank in enumerate(self._ranks[stage])
        )

    def _adds(self, action: Action, worker: int) -> bool:
        """Check if an action of a stage's worker computes parameter gradients of units."""
        one = self.plan.stages[action.stage].workers[worker]
        ends: Kind = "weights" if self.plan.puts_off(action.stage, one) else "backward"
        return action.kind == ends

    def _shared_s(self, shared: SharedParameters) -> float:
        """Return the seconds to reduce and gather the root parameters used by several stages."""
        ranks = self._whole.shares_among(shared.stages)
        workers = [self._whole.workers[rank] for rank in ranks]
        if not self._moved or len(workers) == 1:
            return 0.0
        devices = [self._device_of[w.device] for w in workers]
        places = [(device.host, device.device_class) for device in devices]
        wire = build_subset_link_model(self.profile, places, find_smallest_place(devices))
        forms = self.plan.collectives
        size = shared.trainable * GRADIENT_BYTES
        width = DTYPE_BYTES[self.plan.communication_dtype]
        reduced = wire.seconds("reduce", forms.reduce, "all", size)
        return reduced + wire.seconds("gather", forms.gather, "all", shared.trainable * width)

    def action_s(self, action: Action) -> float:
        """Return the seconds of an action, on the slowest of the workers running it together."""
        amounts = self._make_work_key(action)
        key = (action.kind, action.stage, amounts, action in self._first_forwards)
        found = self._seconds.get(key)
        if found is None:
            found = self._seconds[key] = self._timed_action(action)
        return found

    def _make_work_key(self, action: Action) -> Hashable:
        """Return a key: equal for actions of a stage with equal samples on equal workers."""
        key = (action.stage, action.batch)
        found = self._amounts.get(key)
        if found is None:
            cost = self.stages[action.stage]
            found = self._amounts[key] = frozenset(
                (cost.kind_of[n], cost.micro_batches(n, action.batch))
                for n in self._together(action)
            )
        return found

    @cached_property
    def _first_forwards(self) -> set[Action | None]:
        """First forward of each stage and rank."""
        return set(self._first.values())

    def _timed_action(self, action: Action) -> float:
        cost = self.stages[action.stage]
        return max(
            cost.passes(worker, action.batch).forward_s + self._told_s(action, worker)
            if self._gathered_before(action, worker)
            else self._pass_s(action, worker)
            for worker in self._together(action)
        )

    def _earliest_s(self, action: Action) -> float:
        """Return a lower bound for an action's end: the arrival of parameters gathered only once,
        from the beginning of the step."""
        if action not in self._first_forwards:
            return 0.0
        waits = (
            self._pass_s(action, worker)
            for worker in self._together(action)
            if self._gathered_before(action, worker)
        )
        return max(waits, default=0.0)

    def _together(self, action: Action) -> Iterable[int]:
        """Return the workers of a stage running an action together."""
        if self.in_waves:
            return range(len(self.stages[action.stage].workers))
        seat = self.pipeline.assignment_of[action.stage, action.batch]
        return (self.place_of[action.stage, seat.rank],)

    def _gathered_before(self, action: Action, worker: int) -> bool:
        return self.plan.zero_stage < 3 and self._is_first_forward(action, worker)

    def _is_first_forward(self, action: Action, worker: int) -> bool:
        """Check if an action is a worker's first of a stage."""
        return self._first[action.stage, self._ranks[action.stage][worker]] == action

    def _pass_s(self, action: Action, worker: int) -> float:
        """Return the seconds of an action without earlier gathers."""
        return self._computed_s(action, worker) + self._told_s(action, worker)

    def _told_s(self, action: Action, worker: int) -> float:
        """Return the seconds of a tensor-parallel group's collectives at the ends of its stage."""
        stage = self._whole.stages[action.stage]
        if not stage.sequence:
            return 0.0
        samples = self.stages[action.stage].micro_batches(worker, action.batch)[0]
        one = stage.leaders[worker]
        ends = compute_stage_end_seconds(self.profile, self._whole, action.stage, one, samples)
        return {"forward": ends[0], "backward": ends[1], "weights": 0.0}[action.kind]

    def _computed_s(self, action: Action, worker: int) -> float:
        passes = self.stages[action.stage].passes(worker, action.batch)
        if action.kind == "forward":
            gathers = self._is_first_forward(action, worker)
            before = self.stages[action.stage].before_s() if gathers else 0.0
            if self.plan.zero_stage == 3 or gathers:
                return passes.first_s + before
            return passes.forward_s
        if action.kind == "weights":
            return passes.weights_last_s if self.in_waves else passes.weights_s
        return passes.last_s if self.in_waves else passes.backward_s

    def _compute_all_reduce_tail_s(self, action: Action) -> float:
        """Return the seconds after an action until an all-reduce begun during it is done: for the
        last action of a rank with one all-reduce. Messages to other stages are sent before."""
        if self.plan.zero_stage > 0:
            return 0.0
        rank = self.pipeline.assignment_of[action.stage, action.batch].rank
        worker = self.place_of[action.stage, rank]
        last = self.order(rank)[-1] == action and self._adds(action, worker)
        if len(self._stages_of[rank]) > 1 or not last:
            return 0.0
        passes = self.stages[action.stage].passes(worker, action.batch)
        if action.kind == "weights":
            return passes.weights_last_s - passes.weights_s
        return passes.last_s - passes.backward_s

    def order(self, rank: int) -> tuple[Action, ...]:
        """Return the actions of a rank in a step."""
        stage = self._stages_of[rank][0]
        return self.pipeline.orders[self._ranks[stage][0] if self.in_waves else rank]

    @cached_property
    def _first(self) -> dict[tuple[int, int], Action | None]:
        """First forward by (stage, rank)."""
        return {
            (stage, rank): next(
                (a for a in self.order(rank) if a.kind == "forward" and a.stage == stage), None
            )
            for stage, rank in self.place_of
        }

    # -- messages ------------------------------------------------------------------------------

    def _transfer(self, action: Action, other: Action) -> Transfer:
        """Return the message from `action` to `other`; over one link, messages are serialized, and
        each rank of a tensor-parallel group receives its own."""
        if action.stage == other.stage:
            return NO_TRANSFER
        key = (action.stage, other.stage, action.kind, self._pairs(action, other))
        found = self._transfers.get(key)
        if found is None:
            found = self._transfers[key] = self._timed_transfer(action, other)
        return found

    def _timed_transfer(self, action: Action, other: Action) -> Transfer:
        over: dict[Hashable, float] = {}
        for giver, taker, size in self.sent(action, other):
            if giver.device == taker.device:
                continue
            here, there = self._device_of[giver.device], self._device_of[taker.device]
            one = self._messages.transfer(here, there, size)
            before = over.get(one.over, 0.0)
            if one.over is None:
                over[None] = max(before, one.seconds)
            else:
                over[one.over] = before + self._tp_size[taker.device] * one.seconds
        link, seconds = max(over.items(), key=itemgetter(1), default=(None, 0.0))
        return Transfer(seconds, link)

    def sent(self, action: Action, other: Action) -> Iterator[tuple[Worker, Worker, int]]:
        """Yield sender, receiver and bytes of messages between two actions; of groups, first
        ranks."""
        takes = self._taken[max(action.stage, other.stage), action.kind != "forward"]
        one, two = (self.plan.stages[a.stage].workers for a in (action, other))
        for giver, taker, samples in self._pairs(action, other):
            size = sum(self.taken_bytes(taken, samples) for taken in takes)
            yield one[giver], two[taker], size

    @cached_property
    def _parts(self) -> list[tuple[StageMicroBatch, ...]]:
        """Micro-batches of each stage."""
        return [stage.micro_batches(self.plan.waves) for stage in self.plan.stages]

    @cached_property
    def _taken(self) -> dict[tuple[int, bool], tuple[StageInput, ...]]:
        """Outputs taken from the previous stage, by stage and direction (True: gradients back)."""
        found: dict[tuple[int, bool], tuple[StageInput, ...]] = {}
        for stage in range(1, len(self.stages)):
            earlier = self.cut.calls(stage - 1)
            takes = tuple(t for t in self.takes[stage] if t.call in earlier)
            found[stage, False] = takes
            found[stage, True] = tuple(t for t in takes if t.differentiable)
        return found

    def _pairs(self, action: Action, other: Action) -> tuple[tuple[int, int, int], ...]:
        """Return giver, taker and samples of messages, workers by their places in the stages."""
        if not self.in_waves:
            here = self._parts[action.stage][action.batch]
            there = self._parts[other.stage][other.batch]
            return ((here.worker, there.worker, len(here.rows)),)
        return self._wave_pairs(action.stage, other.stage)[action.batch, other.batch]

    def _wave_pairs(
        self, stage: int, other: int
    ) -> dict[tuple[int, int], tuple[tuple[int, int, int], ...]]:
        """Return the samples passing from each worker to each, by waves of two stages."""
        key = (stage, other)
        if key not in self._totals:
            found: dict[tuple[int, int], dict[tuple[int, int], int]] = {}
            for here, there in zip(self._parts[stage], self._parts[other]):
                totals = found.setdefault((here.wave, there.wave), {})
                pair = (here.worker, there.worker)
                totals[pair] = totals.get(pair, 0) + len(here.rows)
            self._totals[key] = {
                waves: tuple((giver, taker, n) for (giver, taker), n in totals.items())
                for waves, totals in found.items()
            }
        return self._totals[key]

    @cached_property
    def takes(self) -> list[tuple[StageInput, ...]]:
        """Outputs of earlier stages taken by each stage."""
        return [needs.outputs for needs in self.cut.needs]

    def taken_bytes(self, taken: StageInput, samples: int) -> int:
        """Return the bytes of an output for `samples` samples, in the dtype of the message."""
        key = (taken.call, taken.output, samples)
        if key not in self._sizes:
            self._sizes[key] = self._taken_bytes(taken, samples)
        return self._sizes[key]

    def _taken_bytes(self, taken: StageInput, samples: int) -> int:
        known = {m.compute_dtype: m for m in (self.profile.model, *self.profile.other_models)}
        sent = self.plan.communication_dtype
        model = known.get(sent, self.profile.model)
        curve = model.kind(model.kind_of_call[taken.call]).outputs.get(taken.output)
        if curve is None:
            return 0
        part = DTYPE_BYTES[sent] / DTYPE_BYTES[model.compute_dtype] if taken.differentiable else 1.0
        return int(float(interpolate_bytes(curve, samples)) * part)

    # -- workers -------------------------------------------------------------------------------

    def workers(self) -> Iterator[WorkerPrediction]:
        """Yield the prediction of each rank, in order."""
        known: dict[Hashable, WorkerPrediction] = {}
        for rank, worker in enumerate(self._workers):
            key = self._make_worker_key(rank)
            if key not in known:
                known[key] = self._predict_worker(rank)
            yield known[key].model_copy(update={"device": worker.device})

    def _make_worker_key(self, rank: int) -> Hashable:
        """Return a key: equal for ranks storing as much and doing the same in the same order."""
        stages = self._stages_of[rank]
        places = {n: self.place_of[n, rank] for n in stages}
        amounts = {n: self.stages[n].amounts[places[n]] for n in stages}
        return (
            tuple((n, self.stages[n].make_storage_key(place)) for n, place in places.items()),
            tuple(owned.get(rank) for owned in self._owned_of_shared),
            tuple((a.kind, a.stage, amounts[a.stage].get(a.batch)) for a in self.order(rank)),
        )

    def _predict_worker(self, rank: int) -> WorkerPrediction:
        worker, passes = self._workers[rank], {"forward": 0.0, "backward": 0.0, "weights": 0.0}
        for action in self.order(rank):
            passes[action.kind] += self._pass_s(action, self.place_of[action.stage, rank])
        stages = self._stages_of[rank]
        places = [(self.stages[n], self.place_of[n, rank]) for n in stages]
        update = sum(cost.update_s(place) for cost, place in places)
        return WorkerPrediction.model_construct(
            device=worker.device,
            forward_s=passes["forward"],
            backward_s=passes["backward"] + passes["weights"],
            optimizer_s=update,
            busy_s=sum(self._computed(rank)) + update,
            memory_bytes=self.peak(rank),
            memory_limit_bytes=compute_usable_bytes(
                self.profile.cluster.class_named(worker.device_class)
            ),
            host_bytes=sum(cost.host_bytes(place) for cost, place in places),
        )

    def _computed(self, rank: int) -> Iterator[float]:
        """Yield the seconds of a rank's actions, without waiting for workers of the stage."""
        for action in self.order(rank):
            passes = self.stages[action.stage].passes(
                self.place_of[action.stage, rank], action.batch
            )
            if action.kind == "forward":
                yield passes.forward_s
            else:
                yield passes.backward_s if action.kind == "backward" else passes.weights_s

    def peak(self, rank: int) -> dict[str, int]:
        """Return the bytes at a rank's peak by cause."""
        worker = self._workers[rank]
        causes: dict[str, int] = {}
        for number in self._stages_of[rank]:
            for cause, size in self.stages[number].state[self.place_of[number, rank]].items():
                causes[cause] = causes.get(cause, 0) + size
        buffers = self.profile.model.root.buffer_bytes
        causes["buffers"] = buffers
        for cause, size in self._shared_bytes(rank).items():
            causes[cause] += size
        causes |= self._find_activation_peak(rank)
        causes["messages"] = self._message_bytes(rank)
        framework = self.profile.of_class(worker.device_class).framework_bytes
        return causes | {"framework": framework}

    def _shared_bytes(self, rank: int) -> dict[str, int]:
        """Return a rank's bytes for root parameters used by several stages."""
        worker, found = self._workers[rank], {"state": 0, "replicas": 0}
        zero_stage = min(self.plan.zero_stage, 1)
        for shared, owned in zip(self.cut.shared, self._owned_of_shared):
            if rank not in owned:
                continue
            ranks, own = owned[rank]
            state = StateModel(
                self.profile,
                self.stages[0].links,
                ranks,
                zero_stage,
                self.profile.model_of(worker.device_class),
                worker.state_on,
            )
            numel = shared.trainable
            own = numel if zero_stage == 0 else own
            width = DTYPE_BYTES[worker.compute_dtype]
            found["state"] += int(own * state.sharded_per_element)
            frozen = shared.frozen_buffers(self.profile.model_in(worker.compute_dtype))
            found["replicas"] += align_size(numel * width) + sum(map(align_size, frozen))
            found["replicas"] += align_size(numel * GRADIENT_BYTES)
            if zero_stage and ranks > 1:  # receive buffer, to be summed
                found["replicas"] += ranks * own * MASTER_BYTES
        return found

    @cached_property
    def _owned_of_shared(self) -> list[dict[int, tuple[int, int]]]:
        """The number of ranks dividing shared root parameters, and elements, by leaders' rank."""
        every = []
        rank_of = {worker.device: rank for rank, worker in enumerate(self._workers)}
        whole = [rank_of.get(worker.device) for worker in self._whole.workers]
        for shared in self.cut.shared:
            shares = self._whole.shares_among(shared.stages)
            sizes = compute_shard_sizes(shared.trainable, tuple(shares.values()))
            found = {whole[rank]: (len(shares), own) for rank, own in zip(shares, sizes)}
            every.append({rank: own for rank, own in found.items() if rank is not None})
        return every

    @cached_property
    def _tp_size(self) -> dict[str, int]:
        """Size of each leader's tensor-parallel group."""
        return {
            leader.device: stage.get_tp_size(leader)
            for stage in self._whole.stages
            for leader in stage.leaders
        }

    def _find_activation_peak(self, rank: int) -> dict[str, int]:
        """Return the samples' memory at the peak."""
        waiting: dict[tuple[int, int], int] = {}
        most: dict[str, int] = {}
        splits = self.plan.schedule == "zero-bubble"
        ends: Kind = "weights" if splits else "backward"
        for action in self.order(rank):
            held = self.stages[action.stage].held(self.place_of[action.stage, rank], action.batch)
            key = (action.stage, action.batch)
            waiting.pop(key, None)
            others = sum(waiting.values())
            now = dict(held.forward)
            if action.kind != "forward":
                now = dict(select_larger(held.head, held.backward))
            now["activations"] += others
            if sum(now.values()) > sum(most.values()):
                most = now
            if action.kind != ends:
                waiting[key] = held.left if action.kind == "forward" else held.split
        return most

    def _message_bytes(self, rank: int) -> int:
        """Return the bytes of messages in flight from and to a rank: a slower peer may leave unread
        the messages of as many micro-batches as wait here for their backward."""
        most, ahead = 0, max(MESSAGES_AHEAD, self._most_waiting(rank))
        for stage in self._stages_of[rank]:
            worker = self.place_of[stage, rank]
            samples = (self.stages[stage].micro_batches(worker, b)[0] for b in self._batches(stage))
            calls = self.cut.calls(stage)
            takes = self.takes[stage]
            gives = {t for later in self.takes[stage + 1 :] for t in later if t.call in calls}
            of_batches = (
                sum(self.taken_bytes(taken, n) for taken in (*takes, *gives))
                for n in filter(None, samples)
            )
            most = max(most, sum(sorted(of_batches, reverse=True)[:ahead]))
        return most

    def _most_waiting(self, rank: int) -> int:
        """Return the maximum number of a rank's forward passes waiting for their backward."""
        steps = {"forward": 1, "backward": -1, "weights": 0}
        return max(accumulate(steps[action.kind] for action in self.order(rank)), default=0)

    def _batches(self, stage: int) -> Sequence[int]:
        return [batch for seat in self.pipeline.seats[stage] for batch in seat.batches]
