"""Count of operations in a step, and of lines repeating them in a loop of Python."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from gpumix.doctor.function.observations import OperationCounts, RepeatedLine
from gpumix.doctor.function.patches import format_line, is_user_file

LEAST_REPEATS = 16  # executions of a line that count as a loop
_UNCOUNTED = (torch.ops.aten.detach,)  # autograd's own, without computation
_DISPATCHING = ("torch/_compile.py", "torch/_dynamo/eval_frame.py")  # between operation and mode

Line = tuple[CodeType, int]


@dataclass
class _Level:
    """A frame of user code on the stack of the last operation.

    Attributes:
        callee: frame called by `frame`, or None if `frame` calls the operation itself. Frames are
            kept alive until the next operation, so that no new frame is taken for an old one.
        seen: operations called by the current instruction, if `callee` is None.
        executions: of each line of `frame`, without a backward pass in between.
    """

    frame: FrameType
    callee: FrameType | None
    line: int
    instruction: int
    seen: set[Any] = field(default_factory=set)
    executions: Counter[int] = field(default_factory=Counter)

    def goes_on(self, now: _Level, operation: Any) -> bool:
        """Return whether the current operation, with level `now`, belongs to the same execution of
        the line."""
        if now.line != self.line or now.instruction < self.instruction:
            return False
        if now.instruction > self.instruction:
            return True
        if now.callee is not None or self.callee is not None:
            return now.callee is self.callee
        return operation not in self.seen


class OperationCounter:
    """An `OperationLooker` counting the operations of each step.

    Attributes:
        last: counts of the last complete step; None before.
    """

    def __init__(self) -> None:
        self.last: OperationCounts | None = None
        self._user_code: dict[CodeType, bool] = {}
        self._levels: list[_Level] = []
        self._restart()

    def begin(self) -> None:
        self._restart()

    def end(self) -> None:
        self._levels = []

    def next_step(self) -> None:
        """Handle the end of a step."""
        if self._total:
            self.last = OperationCounts(self._total, sum(self._paths.values()), self._find_loops())
        self._restart()

    def look(self, operation: Any, args: Any, result: Any, *, backward: bool) -> None:
        if operation in _UNCOUNTED:
            return
        self._total += 1
        if backward:
            self._levels = []  # micro-batches one after the other are no loop
            return
        levels = self._list_levels(sys._getframe(2))
        self._update(levels, operation)
        path = tuple((one.frame.f_code, one.line) for one in levels)
        self._paths[path] += 1
        for one in args:
            if isinstance(one, nn.Parameter):
                for line in path:
                    self._parameters.setdefault(line, set()).add(id(one))

    def _restart(self) -> None:
        self._total = 0
        self._levels = []
        self._paths: Counter[tuple[Line, ...]] = Counter()
        self._repeats: Counter[Line] = Counter()
        self._parameters: dict[Line, set[int]] = {}

    def _list_levels(self, frame: FrameType | None) -> list[_Level]:
        """Return the frames of user code, outermost first."""
        levels: list[_Level] = []
        callee: FrameType | None = None
        while frame is not None and frame.f_code.co_filename.endswith(_DISPATCHING):
            frame = frame.f_back
        while frame is not None:
            code = frame.f_code
            its = self._user_code.get(code)
            if its is None:
                its = self._user_code[code] = is_user_file(code.co_filename)
            if its:
                levels.append(_Level(frame, callee, frame.f_lineno, frame.f_lasti))
            callee, frame = frame, frame.f_back
        return levels[::-1]

    def _update(self, levels: list[_Level], operation: Any) -> None:
        """Count executions of lines, by comparison with the operation before."""
        same = True
        for n, now in enumerate(levels):
            before = self._levels[n] if same and n < len(self._levels) else None
            if before is None or before.frame is not now.frame:
                same = False
                now.executions[now.line] += 1
            else:
                now.executions = before.executions
                same = before.goes_on(now, operation)
                if not same:
                    now.executions[now.line] += 1
                elif now.instruction == before.instruction:
                    now.seen = before.seen
            if now.callee is None:
                now.seen.add(operation)
            line = now.frame.f_code, now.line
            self._repeats[line] = max(self._repeats[line], now.executions[now.line])
        self._levels = levels

    def _find_loops(self) -> tuple[RepeatedLine, ...]:
        """Attribute operations to the outermost line repeating them."""
        found: Counter[Line] = Counter()
        for path, operations in self._paths.items():
            line = next((one for one in path if self._is_loop(one)), None)
            if line is not None:
                found[line] += operations
        return tuple(
            RepeatedLine(
                format_line(code.co_filename, number), operations, self._repeats[code, number]
            )
            for (code, number), operations in found.most_common()
        )

    def _is_loop(self, line: Line) -> bool:
        """Return whether a line repeats operations with the same parameters; layers in a row have
        their own."""
        repeats = self._repeats[line]
        return repeats >= LEAST_REPEATS and 2 * len(self._parameters.get(line, ())) <= repeats
