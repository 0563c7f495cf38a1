"""What a stage is given: where it computes, how long it may take, and where its lines go."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from proof.card import READINGS, Card, Reading
from proof.lines import LINES_MISSED, STAGE, Bar, Lines, Place, last_lines, read

Measure = Callable[[], tuple[Mapping[str, Any], Sequence[Bar]]]


@dataclass
class Bench:
    """One stage's place and time.

    Attributes:
        place: a real GPU, or a rehearsal with tiny shapes: on the CPU, or on the CUDA device of the
            tests.
        folder: for the stage's own files; it is removed after the stage.
        deadline: by `time.monotonic()`, when the stage is ended.
    """

    stage: str
    place: Place
    folder: Path
    deadline: float
    lines: Lines
    card: Card | None = None
    begun: float = field(default_factory=time.monotonic)
    failed: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)  # measurements beyond a bar

    def __post_init__(self) -> None:
        self._last, self._before = self.begun, self._reading()

    @property
    def rehearses(self) -> bool:
        return self.place != "gpu"

    @property
    def on_cuda(self) -> bool:
        """Whether tensors are on a CUDA device, real or of the tests."""
        return self.place != "cpu"

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.on_cuda else torch.device("cpu")

    @property
    def left_s(self) -> float:
        """Seconds until the stage is ended."""
        return self.deadline - time.monotonic()

    def measured(self, what: str, measure: Measure) -> Mapping[str, Any]:
        """The figures of a measurement, whose line is written; of one that fails, which others do
        not suffer from, none."""
        try:
            figures, bars = measure()
        except Exception as error:
            traceback.print_exc()
            told = last_lines("".join(traceback.format_exception(error)))
            traceback.clear_frames(error.__traceback__)  # they hold tensors
            self.failed.append(f"{what}: {type(error).__name__}")
            self.tell(what, {}, error=told)
            return {}
        self.tell(what, figures, bars)
        return figures

    def tell(
        self, what: str, figures: Mapping[str, Any], bars: Sequence[Bar] = (), error: str = ""
    ) -> dict[str, Any]:
        """Write a line about one measurement, or with `what` "stage" about all of them."""
        now, after = time.monotonic(), self._reading()
        since = self.begun if what == STAGE else self._last
        before, clocks = asdict(self._before), asdict(after)
        nvml = {name: [before[name], clocks[name]] for name in READINGS}
        more = {"s": round(now - since, 2), **nvml, "error": error}
        if what == STAGE:
            figures = {**figures, LINES_MISSED: len(self.missed)}
            bars = (*bars, Bar(LINES_MISSED, most=0))
        line = self.lines.write(self.stage, what, figures, bars, **more)
        if what != STAGE and not line["ok"] and not error:
            self.missed.append(what)
        self._last, self._before = now, after
        print(f"{self.stage}, {what}: {figures} {line['bar'] or ''}", file=sys.stderr, flush=True)
        return line

    def earlier(self, stage: str, what: str = STAGE) -> dict[str, Any]:
        """The figures of an earlier line of this device; empty if there is none."""
        found: dict[str, Any] = {}
        for line in read(self.lines.file):
            same = (line["stage"], line["what"], line.get("device"), line.get("commit"))
            if same == (stage, what, self.lines.stamp.device, self.lines.stamp.commit):
                found = line["figures"]
        return found

    def _reading(self) -> Reading:
        return self.card.read() if self.card is not None else Reading()
