"""Point-to-point messages between pipeline stages: outputs forward, gradients backward.

Every pair of ranks has a separate line for each pair of connected stages and each direction;
messages on a line arrive in order. Both ends know the order of all messages from the plan, and
know their looks too, so only values are sent.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

import torch

from gpumix.cost.pipeline_schedule import Action
from gpumix.engine.comm.communicator import Communicator, Pending
from gpumix.engine.schedule.remote_stage_values import TensorMeta, refuse_without_values
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import StageInput, pair_replicas

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


@dataclass(frozen=True)
class Message:
    """Output of an earlier stage's call taken by stage `to` in a micro-batch, or the gradient."""

    direction: Direction
    to: int
    batch: int
    taken: StageInput

    def __str__(self) -> str:
        """Return the name used in error messages."""
        what = f"output {self.taken.output} of unit call {self.taken.call + 1}"
        way = "to" if self.direction == "forward" else "back from"
        gradient = "" if self.direction == "forward" else "gradient of "
        return (
            f"message with the {gradient}{what} {way} stage {self.to + 1}, "
            f"micro-batch {self.batch + 1}"
        )


@dataclass(frozen=True)
class _Channel:
    """Line from one rank to another in one direction, for outputs of stage `of` taken by `to`.
    On a line of several stage pairs, messages would have no order known to both ends."""

    direction: Direction
    of: int
    to: int
    sender: int
    receiver: int


class PointToPointChannels:
    """Lines of one rank. Construction is collective: all ranks make all lines.

    Args:
        dtype: dtype in which floating values are sent.
    """

    def __init__(self, plan: Plan, comm: Communicator, dtype: torch.dtype) -> None:
        self._comm = comm
        self._dtype = dtype
        self._stage_of_call = [n for n, stage in enumerate(plan.stages) for _ in stage.units]
        self._lines: dict[_Channel, Communicator] = {}
        self._made: set[_Channel] = set()  # lines of all ranks
        self._here: dict[Message, torch.Tensor] = {}  # between two stages of this rank
        self._coming: dict[Message, tuple[torch.Tensor, Pending]] = {}
        self._going: deque[Pending] = deque()
        self.replan(plan)

    def replan(self, plan: Plan) -> None:
        """Continue with a plan of the same stages and other micro-batches per worker. Collective,
        between two steps."""
        self._tp_group_of = {
            (number, batch): plan.ranks_of(number)[one.seats.start : one.seats.stop]
            for number, stage in enumerate(plan.stages)
            for batch, one in enumerate(stage.micro_batches(plan.waves))
        }
        for line in sorted(self._needed(plan) - self._made, key=str):
            made = self._comm.among((line.sender, line.receiver))
            if made is not None:
                self._lines[line] = made
            self._made.add(line)

    def _needed(self, plan: Plan) -> set[_Channel]:
        found = set()
        for to, batch in self._tp_group_of:
            for taken in plan.stages[to].takes:
                for direction in DIRECTIONS:
                    for line in self._find_channels(Message(direction, to, batch, taken)):
                        if line.sender != line.receiver:
                            found.add(line)
        return found

    def _find_channels(self, message: Message) -> list[_Channel]:
        """Return the lines of a message, to all members of a tensor-parallel group."""
        of = self._stage_of_call[message.taken.call]
        givers = self._tp_group_of[of, message.batch]
        takers = self._tp_group_of[message.to, message.batch]
        if message.direction == "backward":
            givers, takers = takers, givers
        return [
            _Channel(message.direction, of, message.to, giver, taker)
            for giver, taker in pair_replicas(givers, takers)
        ]

    def _line(self, message: Message) -> _Channel:
        """Return the line on which this rank receives a message."""
        lines = self._find_channels(message)
        return next(line for line in lines if line.receiver == self._comm.rank)

    def send(self, message: Message, value: torch.Tensor) -> None:
        """Begin to send; `value` must not change afterwards.

        Raises:
            ModelError: `value` is a tensor without values.
        """
        refuse_without_values(value, str(message))
        lines = [line for line in self._find_channels(message) if line.sender == self._comm.rank]
        sent = value.to(self._dtype) if value.is_floating_point() else value
        for line in lines:
            if line.sender == line.receiver:
                self._here[message] = value
                continue
            self._release_completed_sends()
            name = str(message)
            label = f"{name} (to rank {line.receiver})"
            going = self._lines[line].pass_on(sent.contiguous(), self._own(line), label)
            self._comm.record.passed_on("send", self._pass_of(message), name, going)
            self._going.append(going)

    def expect(self, message: Message, look: TensorMeta) -> None:
        """Begin to receive a tensor of the given look."""
        line = self._line(message)
        if line.sender == line.receiver or message in self._coming:
            return
        dtype = self._dtype if look.dtype.is_floating_point else look.dtype
        room = torch.empty(look.shape, dtype=dtype, device=self._comm.device)
        lines, name = self._lines[line], str(message)
        coming = lines.pass_on(room, 1 - lines.rank, f"{name} (from rank {line.sender})")
        self._comm.record.passed_on("receive", self._pass_of(message), name, coming)
        self._coming[message] = (room, coming)

    def receive(self, message: Message, look: TensorMeta) -> torch.Tensor:
        """Return the tensor received, in the dtype of `look`."""
        if message in self._here:
            return self._here.pop(message)
        self.expect(message, look)
        room, pending = self._coming.pop(message)
        self._comm.record.waits("receive", str(message))
        pending.wait()
        self._comm.record.goes_on()
        return room.to(look.dtype)

    def finish(self) -> None:
        """Wait until all messages sent have arrived."""
        self._comm.record.meets("other stage")
        while self._going:
            self._going.popleft().wait()
        self._comm.record.goes_on()

    def abandon(self) -> None:
        """Drop the messages of a failed step."""
        self._here.clear()
        self._coming.clear()
        self._going.clear()

    def _pass_of(self, message: Message) -> Action:
        """Return the pass producing the content of a message."""
        forward = message.direction == "forward"
        stage = self._stage_of_call[message.taken.call] if forward else message.to
        return Action(message.direction, stage, message.batch)

    def _own(self, line: _Channel) -> int:
        return self._lines[line].rank

    def _release_completed_sends(self) -> None:
        """Release completed sends."""
        while self._going and all(work.is_completed() for work in self._going[0].works):
            self._going.popleft().wait()
