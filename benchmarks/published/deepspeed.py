"""When DeepSpeed's pipelines are done: our replay and our times, in the order of its engine.

Its `TrainSchedule` alternates steps of forward and of backward; neighbours are in unlike ones, and
at a step's begin the two tell each other things: first the gradient goes back, then the activation
of the micro-batch before goes on. So an activation waits here until a gradient has come, which in
gpumix it does not: `cost.pipeline.staged_step` alone tells the time of our engine, not of theirs.

A message that NCCL sends lies in buffers of its own (4 MiB a channel, more than any message here)
until the network has taken it: who sends goes on, who receives waits. A host's network adapter
sends one message at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Literal

from gpumix.cost.pipeline.staged_step import StagedStep, StageReductions
from gpumix.cost.pipeline_schedule import Action, ActionTimes, Transfer, replay


class Message(Action):
    """Equal to messages of its kind alone, not to the pass whose numbers it has."""

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((type(self), *self))


class Send(Message):
    """What a stage sends of a micro-batch: forward its output, backward a gradient."""


class Receive(Message):
    """The same, where it arrives."""


class DeepSpeedStep(StagedStep):
    """One step of a plan whose stages have as many workers each: the first ones are a pipeline, and
    so on."""

    @cached_property
    def times(self) -> ActionTimes:
        stages = len(self.pipeline.seats)
        orders = {
            seat.rank: tuple(instructions(seat.stage, stages, seat.batches))
            for seats in self.pipeline.seats
            for seat in seats
        }
        return replay(orders, _needs, self.action_s, self._transfer)

    @cached_property
    def reductions(self) -> tuple[StageReductions, ...]:
        """After all that a stage computes, and beside nothing; no two share parameters here."""
        ended = [
            max(end for action, end in self.times.end_s.items() if action.stage == number)
            for number in range(len(self.stages))
        ]
        after = [cost.after_s(overlapped=False) for cost in self.stages]
        return (
            StageReductions({n: (end, end + s) for n, (end, s) in enumerate(zip(ended, after))}),
        )

    def action_s(self, action: Action) -> float:
        return 0.0 if isinstance(action, Send | Receive) else super().action_s(action)

    def _reduces(self, action: Action, worker: int) -> bool:
        return False

    def _transfer(self, action: Action, other: Action) -> Transfer:
        found = super()._transfer(action, other)
        if found.over is None:
            return found
        giver, _ = found.over
        return replace(found, over=giver)


def instructions(stage: int, stages: int, batches: range) -> Iterator[Action]:
    """What one of a pipeline's stages does in a step, in order."""
    first, last, before = stage == 0, stage == stages - 1, -1
    for step in range(2 * (len(batches) + stages - 1)):
        kind, number = turn(stage, stages, step)
        now, earlier = number in range(len(batches)), before in range(len(batches))
        if kind == "forward":
            if earlier and not first:
                yield Send("backward", stage, batches[before])
            if now and not first:
                yield Receive("forward", stage, batches[number])
        else:
            if now and not last:
                yield Receive("backward", stage, batches[number])
            if earlier and not last:
                yield Send("forward", stage, batches[before])
        if now:
            yield Action(kind, stage, batches[number])
        before = number


def turn(stage: int, stages: int, step: int) -> tuple[Literal["forward", "backward"], int]:
    """Which pass of which micro-batch a stage has in a step; of those that there are not, none."""
    if step % 2 == stage % 2:
        return "forward", (step - stage) // 2
    return "backward", (step + stage + 1) // 2 - stages


def _needs(action: Action) -> Iterator[Action]:
    if isinstance(action, Receive):
        step = 1 if action.kind == "forward" else -1
        yield Send(action.kind, action.stage - step, action.batch)
