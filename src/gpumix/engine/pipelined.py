"""A step of a rank whose plan has several stages: the forward and backward passes of its
micro-batches through its stage, in the order of the plan's schedule.

One pass runs as in layers (`engine.layered`), with the micro-batch that it is for. Before it comes
what earlier stages have computed, or the gradients from later ones; what comes next is expected
already, so that it is on its way meanwhile. Gradients are summed over the workers of a stage in the
last backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gpumix.cost.pipeline import Action, Pipeline
from gpumix.engine import layered
from gpumix.engine.buckets import Reductions
from gpumix.engine.coroutine import UnitCall
from gpumix.engine.elsewhere import Elsewhere, Look, Returned, hand_over
from gpumix.engine.glue import hand, without_memory
from gpumix.engine.layered import Begun, Turns
from gpumix.engine.micro_batch import Loss, MicroBatch
from gpumix.engine.parts import Parts
from gpumix.engine.wires import Message, Wires
from gpumix.spec.plan import Plan, Taken

Looks = object
"""What tells micro-batches apart whose tensors differ in shape."""


@dataclass
class Place:
    """Where a rank is in a plan of several stages.

    Attributes:
        stage: its number.
        actions: what the rank does in a step.
    """

    plan: Plan
    pipeline: Pipeline
    stage: int
    rank: int
    wires: Wires
    elsewhere: Elsewhere
    known: dict[tuple[Looks, Taken], Look] = field(default_factory=dict)

    @property
    def last(self) -> bool:
        """Whether the loss is computed here."""
        return self.stage == len(self.plan.stages) - 1

    @property
    def takes(self) -> Sequence[Taken]:
        return self.plan.stages[self.stage].takes

    @property
    def first_call(self) -> int:
        return self.plan.first_call(self.stage)

    @property
    def earlier(self) -> list[str]:
        """Unit calls of earlier stages."""
        return [name for stage in self.plan.stages[: self.stage] for name in stage.units]

    @property
    def batches(self) -> range:
        """Numbers of this rank's micro-batches, in the order of its samples."""
        return next(s.batches for s in self.pipeline.seats[self.stage] if s.rank == self.rank)

    @property
    def sends(self) -> dict[int, tuple[int, ...]]:
        """By own call, places of the outputs that later stages take."""
        wanted: dict[int, dict[int, None]] = {}
        for _, taken in self.gives:
            wanted.setdefault(taken.call - self.first_call, {})[taken.output] = None
        return {call: tuple(outputs) for call, outputs in wanted.items()}

    @property
    def gives(self) -> list[tuple[int, Taken]]:
        """What later stages take of this one, with the stage."""
        first = self.first_call
        own = range(first, first + len(self.plan.stages[self.stage].units))
        return [
            (number, taken)
            for number, stage in enumerate(self.plan.stages)
            for taken in stage.takes
            if taken.call in own
        ]


class Entrance:
    """How one micro-batch comes to the first unit call of its stage: with what earlier stages have
    computed. `leaves` get the gradients of that.

    Args:
        batch: its number.
        looks: of its samples.
    """

    def __init__(self, place: Place, batch: int, looks: Looks) -> None:
        self._place = place
        self._batch = batch
        self._looks = looks
        self._call = 0
        self.leaves: dict[Taken, torch.Tensor] = {}

    def expect(self) -> None:
        """Begin to receive what comes, as far as its looks are known."""
        for taken in self._place.takes:
            look = self._place.known.get((self._looks, taken))
            if look is None:
                return  # messages come in order
            self._place.wires.expect(self._message(taken), look)

    def returned(self, call: UnitCall) -> Any:
        """What an earlier stage's unit returned."""
        returned = self._place.elsewhere.returned(call)
        leaves = [
            self._place.elsewhere.tensor(leaf) if isinstance(leaf, Look) else leaf
            for leaf in returned.leaves
        ]
        for taken in self._place.takes:
            if taken.call == self._call:
                leaves[taken.output] = self._received(taken, returned, call.state.gradients)
        self._call += 1
        return hand_over(call, returned, leaves)

    def _received(self, taken: Taken, returned: Returned, gradients: bool) -> torch.Tensor:
        look = returned.look(taken.output)
        self._place.known[self._looks, taken] = look
        value = self._place.wires.receive(self._message(taken), look)
        if not (taken.differentiable and gradients):
            return value
        leaf = self.leaves[taken] = without_memory(value).requires_grad_()
        return hand(leaf, value)

    def send_gradients(self) -> None:
        """Give earlier stages the gradients of what they sent."""
        for taken in self._place.takes:
            if taken.differentiable:
                leaf = self.leaves.pop(taken)
                gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                self._place.wires.send(
                    Message("backward", self._place.stage, self._batch, taken), gradient
                )

    def _message(self, taken: Taken) -> Message:
        return Message("forward", self._place.stage, self._batch, taken)


@dataclass
class _Running:
    """A micro-batch between its forward and its backward; `sent` by what later stages took."""

    batch: MicroBatch
    entrance: Entrance
    sent: dict[tuple[int, Taken], Look] = field(default_factory=dict)


class Step:
    """One step of one rank.

    Args:
        make: the micro-batch of a number, with its entrance.
        scale: what each loss is multiplied with before its backward.
        exchange: starts to tell all ranks the losses and counts; gives what reduces.
    """

    def __init__(
        self,
        place: Place,
        parts: Parts,
        make: Callable[[int], tuple[MicroBatch, Entrance]],
        scale: torch.Tensor,
        exchange: Callable[[list[Loss]], Reductions],
    ) -> None:
        self._place = place
        self._parts = parts
        self._make = make
        self._scale = scale
        self._exchange = exchange
        self._running: dict[int, _Running] = {}
        self._results: list[Loss] = []
        self._begun = Begun()

    def run(self) -> None:
        """Do all of it."""
        actions = self._place.pipeline.orders[self._place.rank]
        try:
            for number, action in enumerate(actions):
                for coming in actions[number : number + 2]:
                    self._expect(coming)
                if action.kind == "forward":
                    self._forward(action)
                else:
                    self._backward(action, last=number == len(actions) - 1)
            if not actions:
                self._without_samples()
            self._place.wires.finish()
        except BaseException:
            self._place.wires.abandon()
            raise
        finally:
            for running in self._running.values():
                running.batch.close()

    def _running_of(self, batch: int) -> _Running:
        if batch not in self._running:
            self._running[batch] = _Running(*self._make(batch))
        return self._running[batch]

    def _expect(self, action: Action) -> None:
        if action.kind == "forward":
            self._running_of(action.batch).entrance.expect()
        elif action.batch in self._running:
            for message, look in self._gradients(action.batch):
                self._place.wires.expect(message, look)

    def _forward(self, action: Action) -> None:
        running = self._running_of(action.batch)
        layered.forward(self._parts, Turns([running.batch]), keep=True)
        for to, taken in self._place.gives:
            value = running.batch.sent[taken.call - self._place.first_call, taken.output]
            running.sent[to, taken] = Look(value.shape, value.dtype)
            self._place.wires.send(Message("forward", to, action.batch, taken), value)
        running.batch.sent.clear()

    def _backward(self, action: Action, *, last: bool) -> None:
        running = self._running[action.batch]
        turns = Turns([running.batch])
        if self._place.last:
            self._results += layered.head(self._parts, turns, self._scale, self._begun)
        else:
            running.batch.expect_gradients()
            for message, look in self._gradients(action.batch):
                gradient = self._place.wires.receive(message, look)
                call = message.taken.call - self._place.first_call
                running.batch.add_gradient(call, message.taken.output, gradient)
        reductions = self._exchange(self._results) if last else None
        # The end of a reduction needs the number of all samples, and so all ranks: one that waits
        # for it must not be waited for.
        beside = reductions if self._parts.division.replicated else None
        layered.backward(self._parts, turns, beside, self._begun)
        running.entrance.send_gradients()
        running.batch.close()
        del self._running[action.batch]
        if reductions is not None:
            if beside is None:
                layered.reduce_units(self._parts, reductions)
            layered.finish(self._parts, reductions)

    def _gradients(self, batch: int) -> Iterator[tuple[Message, Look]]:
        """What later stages send back, in the order of what they were sent."""
        for (to, taken), look in self._running[batch].sent.items():
            if taken.differentiable:
                yield Message("backward", to, batch, taken), look

    def _without_samples(self) -> None:
        nothing = Turns([])
        layered.forward(self._parts, nothing, keep=True)
        reductions = self._exchange([])
        layered.backward(self._parts, nothing, reductions, self._begun)
        layered.finish(self._parts, reductions)
