"""Pipeline-parallel step of a rank: forward and backward passes of micro-batches through the rank's
stages, in the order of the plan's schedule.

A pass runs layer by layer (`engine.schedule.layered_schedule`) for one micro-batch, or for a wave
of micro-batches where a stage's workers gather and reduce for each other. Before a pass, outputs
arrive from earlier stages, or gradients from later stages. Receives of the next pass are posted
early, to overlap with computing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from gpumix.cost.pipeline_schedule import Action
from gpumix.engine.batch.batch_split import MicroBatchTask
from gpumix.engine.comm.communicator import Communicator
from gpumix.engine.model.forward_coroutine import ModelError, UnitCall
from gpumix.engine.schedule import layered_schedule
from gpumix.engine.schedule.layered_schedule import MicroBatchOrder, Schedule, StepTasks
from gpumix.engine.schedule.micro_batch import Loss, MicroBatch
from gpumix.engine.schedule.point_to_point import Message, PointToPointChannels
from gpumix.engine.schedule.remote_stage_values import RemoteStages, Returned, TensorMeta, hand_over
from gpumix.engine.sharding.bucket import Bucket, BucketReductions, GradientProgress
from gpumix.engine.unit.sharded_units import ShardedUnits
from gpumix.engine.unit.unit_call import attach_leaf
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import StageInput, Worker

ShapeKey = object
"""Key of a micro-batch's tensor shapes."""


@dataclass
class PipelineStage:
    """Pipeline stage of a rank.

    Attributes:
        parts: the stage's parts of the model.
        shared: parameters that a stage of this rank shares with others, in the plan's order, hence
            in the same order on all ranks.
    """

    plan: Plan
    stage: int
    rank: int
    parts: ShardedUnits
    shared: Sequence[Bucket]
    wires: PointToPointChannels
    elsewhere: RemoteStages
    _known: dict[tuple[ShapeKey, StageInput], TensorMeta] = field(default_factory=dict)

    @cached_property
    def worker(self) -> Worker:
        """Worker of this rank in the stage."""
        return self.plan.worker_of(self.rank, self.stage)

    @cached_property
    def puts_off(self) -> bool:
        """True if gradients of parameters are computed in separate passes."""
        return self.plan.puts_off(self.stage, self.worker)

    @property
    def last(self) -> bool:
        """True if the loss is computed in this stage."""
        return self.stage == len(self.plan.stages) - 1

    @property
    def takes(self) -> Sequence[StageInput]:
        return self.plan.stages[self.stage].takes

    @property
    def first_call(self) -> int:
        return self.plan.first_call(self.stage)

    @cached_property
    def earlier(self) -> list[str]:
        """Unit calls of earlier stages."""
        return [name for stage in self.plan.stages[: self.stage] for name in stage.units]

    @cached_property
    def batches(self) -> tuple[int, ...]:
        """Numbers of this rank's micro-batches, in the order of samples."""
        return self.plan.numbers_of(self.rank, self.stage)

    def members(self, action: Action) -> list[int]:
        """Return the micro-batches of an action: one, or this rank's part of a wave."""
        if not self.plan.in_waves:
            return [action.batch]
        return [n for n in self.batches if self._waves[n] == action.batch]

    @cached_property
    def _waves(self) -> list[int]:
        """Wave of each micro-batch."""
        stage = self.plan.stages[self.stage]
        return [one.wave for one in stage.micro_batches(self.plan.waves)]

    @cached_property
    def outgoing_outputs(self) -> list[tuple[int, StageInput]]:
        """Pairs of a later stage and an output taken from this stage."""
        first = self.first_call
        own = range(first, first + len(self.plan.stages[self.stage].units))
        return [
            (number, taken)
            for number, stage in enumerate(self.plan.stages)
            for taken in stage.takes
            if taken.call in own
        ]

    @cached_property
    def sends(self) -> dict[int, tuple[int, ...]]:
        """Places of the outputs taken by later stages, by own call."""
        wanted: dict[int, dict[int, None]] = {}
        for _, taken in self.outgoing_outputs:
            wanted.setdefault(taken.call - self.first_call, {})[taken.output] = None
        return {call: tuple(outputs) for call, outputs in wanted.items()}

    def find_tensor_meta(self, taken: StageInput, looks: ShapeKey) -> TensorMeta | None:
        """Return the look of an output for samples of shapes `looks`; None if not seen yet."""
        return self._known.get((looks, taken))

    def seen(self, taken: StageInput, looks: ShapeKey, look: TensorMeta) -> None:
        self._known[looks, taken] = look


class StageInputs:
    """Arrival of a micro-batch at its stage, with outputs of earlier stages.

    With gradients on, `leaves` collect the gradients of received tensors. `earlier` and `sends` are
    those of the stage.

    Args:
        batch: number of the micro-batch.
        looks: key of the samples' shapes.
    """

    def __init__(self, place: PipelineStage, batch: int, looks: ShapeKey) -> None:
        self._place = place
        self._batch = batch
        self._looks = looks
        self._call = 0
        self.earlier, self.sends = place.earlier, place.sends
        self.leaves: dict[StageInput, torch.Tensor] = {}

    def expect(self) -> bool:
        """Post receives up to the first unknown look; return True if all are posted."""
        for taken in self._place.takes:
            look = self._place.find_tensor_meta(taken, self._looks)
            if look is None:
                return False
            self._place.wires.expect(self._message(taken), look)
        return True

    def returned(self, call: UnitCall) -> Any:
        """Return the result of an earlier stage's unit."""
        returned = self._place.elsewhere.returned(call)
        leaves = [
            self._place.elsewhere.tensor(leaf) if isinstance(leaf, TensorMeta) else leaf
            for leaf in returned.leaves
        ]
        for taken in self._place.takes:
            if taken.call == self._call:
                leaves[taken.output] = self._received(taken, returned, call.state.gradients)
        self._call += 1
        return hand_over(call, returned, leaves)

    def _received(self, taken: StageInput, returned: Returned, gradients: bool) -> torch.Tensor:
        look = returned.look(taken.output)
        self._place.seen(taken, self._looks, look)
        value = self._place.wires.receive(self._message(taken), look)
        if not (gradients and value.is_floating_point()):
            return value
        leaf, received = attach_leaf(value)
        if taken.differentiable:
            self.leaves[taken] = leaf
        else:
            leaf.register_hook(partial(_refuse_gradient, taken))
        return received

    def send_gradients(self) -> None:
        """Send the gradients of received tensors to earlier stages."""
        for taken in self._place.takes:
            if taken.differentiable:
                leaf = self.leaves.pop(taken, None)
                self._place.wires.send(
                    Message("backward", self._place.stage, self._batch, taken),
                    self._zeros(taken) if leaf is None or leaf.grad is None else leaf.grad,
                )

    def _zeros(self, taken: StageInput) -> torch.Tensor:
        """Return zeros: the sending stage waits for a gradient."""
        look = self._place.find_tensor_meta(taken, self._looks)
        assert look is not None, "it was received"
        return self._place.elsewhere.zeros(look)

    def _message(self, taken: StageInput) -> Message:
        return Message("forward", self._place.stage, self._batch, taken)


@dataclass
class InFlightMicroBatch:
    """Micro-batch between forward and backward, with looks of outputs `sent` to later stages."""

    number: int
    batch: MicroBatch
    entrance: StageInputs
    sent: dict[tuple[int, StageInput], TensorMeta] = field(default_factory=dict)


Make = Callable[[PipelineStage, int], InFlightMicroBatch]
"""Begins the micro-batch of a given number in a stage."""


class PipelineStep:
    """Step of one rank.

    Args:
        places: the rank's stages.
        scale: factor of each loss before its backward; None: no backward.
        in_order: see `MicroBatchOrder`.
        empty: numbers of micro-batches without samples, skipped.
    """

    def __init__(
        self,
        places: Sequence[PipelineStage],
        actions: Sequence[Action],
        make: Make,
        scale: torch.Tensor | None,
        *,
        in_order: bool = False,
        empty: Collection[int] = (),
    ) -> None:
        self._in_order = in_order
        self._empty = frozenset(empty)
        self._places = {place.stage: place for place in places}
        self._shared = places[0].shared
        self._actions = actions
        self._make = make
        self._scale = scale
        self._running: dict[tuple[int, int], InFlightMicroBatch] = {}
        self._results: list[Loss] = []
        self._begun = GradientProgress()
        layout = places[0].parts.layout
        # Separate buffers let each reduction run without waiting for another. With one stage per
        # rank, all ranks of the stage issue the same collectives, so none deadlocks.
        self._beside = layout.replicated and len(places) == 1
        self._in_waves = not layout.whole_gradients
        self._reductions = BucketReductions(None, at_once=layout.replicated)

    def _turns(self, running: Sequence[InFlightMicroBatch]) -> MicroBatchOrder:
        return MicroBatchOrder([one.batch for one in running], in_order=self._in_order)

    def run(self) -> list[Loss]:
        """Run all actions; the caller settles the gradients afterwards.

        Returns:
            (summed loss, count) of each micro-batch whose loss is computed here.
        """
        wires = next(iter(self._places.values())).wires
        try:
            # Gather now: other stages of a shared bucket may begin only when this stage is done.
            for bucket in self._shared:
                bucket.start_gather()
            for place in self._places.values():
                parts, kept = place.parts, place.parts.layout.whole_parameters
                for bucket in parts.buckets if kept else parts.always_used_buckets:
                    bucket.start_gather()
            for place in self._idle:
                layered_schedule.forward(place.parts, MicroBatchOrder([]), keep=False)
            for number, action in enumerate(self._actions):
                # Messages arrive in order: none can be expected behind an unknown look.
                all(self._expect(coming) for coming in self._actions[number : number + 2])
                self._do(action, number)
            if self._scale is not None:
                for place in self._idle:
                    reductions = self._reductions if self._beside else None
                    layered_schedule.backward(
                        place.parts, MicroBatchOrder([]), reductions, self._begun
                    )
                stages = [place.parts for place in reversed(self._places.values())]
                layered_schedule.finish_reductions(
                    stages, self._reductions, self._begun, shared=self._shared
                )
            wires.finish()
        except BaseException:
            wires.abandon()
            raise
        finally:
            for running in self._running.values():
                running.batch.close()
        return self._results

    @cached_property
    def _idle(self) -> list[PipelineStage]:
        """Stages where this rank stores shards but computes nothing."""
        busy = {action.stage for action in self._actions}
        return [place for number, place in self._places.items() if number not in busy]

    def _do(self, action: Action, number: int) -> None:
        place = self._places[action.stage]
        place.parts.recorder.now.passes(action)
        if action.kind == "forward":
            self._forward(place, action)
            following = self._actions[number + 1 : number + 2]
            if following != (_backward_of(action),):
                place.parts.rest()
        elif action.kind == "backward":
            self._backward(place, action, last=number == len(self._actions) - 1)
        elif place.puts_off:
            self._weights(place, action, last=number == len(self._actions) - 1)

    def _begin_micro_batches(
        self, place: PipelineStage, action: Action
    ) -> list[InFlightMicroBatch]:
        """Return the micro-batches of an action, begun if necessary."""
        found = []
        for number in place.members(action):
            if number not in self._empty:
                key = place.stage, number
                if key not in self._running:
                    self._running[key] = self._make(place, number)
                found.append(self._running[key])
        return found

    def _expect(self, action: Action) -> bool:
        place = self._places[action.stage]
        if action.kind == "forward":
            return all(
                running.entrance.expect() for running in self._begin_micro_batches(place, action)
            )
        if action.kind == "backward":
            for running in self._begin_micro_batches(place, action):
                for message, look in self._gradients(running):
                    place.wires.expect(message, look)
        return True

    def _forward(self, place: PipelineStage, action: Action) -> None:
        running = self._begin_micro_batches(place, action)
        for bucket in self._shared:  # the model uses shared parameters in every stage
            bucket.arrived()
        layered_schedule.forward(place.parts, self._turns(running), keep=self._scale is not None)
        for one in running:
            for to, taken in place.outgoing_outputs:
                value = one.batch.sent[taken.call - place.first_call, taken.output]
                one.sent[to, taken] = TensorMeta.of(value)
                place.wires.send(Message("forward", to, one.number, taken), value)
            one.batch.sent.clear()
        if self._scale is None:
            if place.last:
                self._results += layered_schedule.run_head(
                    place.parts, self._turns(running), None, self._begun
                )
            self._close(place, running)

    def _backward(self, place: PipelineStage, action: Action, *, last: bool) -> None:
        running = self._begin_micro_batches(place, action)
        if place.last:
            turns = self._turns(running)
            self._results += layered_schedule.run_head(place.parts, turns, self._scale, self._begun)
        else:
            for one in running:
                one.batch.expect_gradients()
                for message, look in self._gradients(one):
                    gradient = place.wires.receive(message, look)
                    call = message.taken.call - place.first_call
                    one.batch.add_gradient(call, message.taken.output, gradient)
        splits, reductions = place.puts_off, self._reduced_in(last)
        layered_schedule.backward(
            place.parts, self._turns(running), reductions, self._begun, splits=splits
        )
        for one in running:
            one.entrance.send_gradients()
        if not splits:
            self._close(place, running)
        if self._in_waves:
            self._reductions.finish()

    def _weights(self, place: PipelineStage, action: Action, *, last: bool) -> None:
        running = self._begin_micro_batches(place, action)
        layered_schedule.run_weight_backward(
            place.parts, self._turns(running), self._reduced_in(last), self._begun
        )
        self._close(place, running)
        if self._in_waves:
            self._reductions.finish()

    def _reduced_in(self, last: bool) -> BucketReductions | None:
        """Return the reductions to start in an action, `last` or not; None: reduce later."""
        return self._reductions if self._in_waves or (last and self._beside) else None

    def _close(self, place: PipelineStage, running: Sequence[InFlightMicroBatch]) -> None:
        for one in running:
            self._running.pop((place.stage, one.number)).batch.close()

    def _gradients(self, running: InFlightMicroBatch) -> Iterator[tuple[Message, TensorMeta]]:
        """Yield the messages of gradients from later stages, in the order of outputs sent."""
        for (to, taken), look in running.sent.items():
            if taken.differentiable:
                yield Message("backward", to, running.number, taken), look


@dataclass(frozen=True)
class PipelineSchedule(Schedule):
    """Micro-batches through the pipeline stages of a rank.

    Attributes:
        actions: of this rank in a step.
        stages: of this rank.
        buckets: of all of its stages.
    """

    actions: Sequence[Action]
    comm: Communicator
    stages: Sequence[PipelineStage]
    buckets: Sequence[Bucket]

    def run_step(self, step: StepTasks) -> None:
        gradient_scale = step.exchange(self._run(step.micro_batches, step.rows, step.scale.float()))
        self.comm.record.meets("other stage")
        gradient_scale()
        self.comm.record.goes_on()
        for bucket in self.buckets:
            bucket.settle(gradient_scale)
            if step.done is not None:
                step.done(bucket)

    def run_forward(self, cut: list[MicroBatchTask], rows: Sequence[range]) -> list[Loss]:
        return self._run(cut, rows, None)

    def _run(
        self, cut: list[MicroBatchTask], rows: Sequence[range], scale: torch.Tensor | None
    ) -> list[Loss]:
        """Run this rank's part of the pipeline; without a `scale` of losses, forward only."""
        actions = self.actions
        if scale is None:
            actions = [action for action in actions if action.kind == "forward"]

        def make(stage: PipelineStage, number: int) -> InFlightMicroBatch:
            own = stage.batches.index(number)
            entry = StageInputs(stage, number, cut[own].looks)
            batch = self._make_micro_batch(
                stage.parts, cut, own, keep=scale is not None, worker=stage.worker, entry=entry
            )
            return InFlightMicroBatch(number, batch, entry)

        empty = [number for number, own in zip(self.stages[0].batches, rows) if not own]
        return PipelineStep(
            self.stages, actions, make, scale, in_order=self.in_order, empty=empty
        ).run()


def _refuse_gradient(taken: StageInput, _: torch.Tensor) -> None:
    raise ModelError(
        f"output {taken.output} of unit call {taken.call} gets a gradient in a later stage",
        code="gradient-not-planned",
        why="it got none when the model was profiled, so the plan sends none back",
        fix="profile and plan again for this model, or make a plan of one stage",
    )


def _backward_of(action: Action) -> Action:
    return Action("backward", action.stage, action.batch)
