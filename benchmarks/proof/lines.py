"""The lines of `results.jsonl`: one for each stage, and one for each measurement inside a stage.

A line is on the disk when `Lines.write` returns: whatever ends the proof leaves what was before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

RESULTS = "results.jsonl"
STAGE = "stage"  # `what` of the line that ends a stage
SKIPPED = "skipped"
LINES_MISSED = "lines_missed"  # of a stage: how many of its measurements missed a bar
NOT_TESTED = "not tested here"  # of a bar that does not count on this device

Judge = Literal["any", "gpu", "hopper"]
Place = Literal["gpu", "cpu", "test device"]


@dataclass(frozen=True)
class Bar:
    """The limits of a figure.

    Attributes:
        figure: its name; a figure of a whole mapping is limited in each of its values.
        judges: where the bar counts: anywhere, on every GPU, or on an H100 or H200 alone, for whose
            speed the limits are. Elsewhere it is `not tested here`.
    """

    figure: str
    least: float | None = None
    most: float | None = None
    judges: Judge = "any"

    def meets(self, value: Any) -> bool:
        values = value.values() if isinstance(value, Mapping) else [value]
        return all(self._meets(one) for one in values)

    def _meets(self, value: Any) -> bool:
        if isinstance(value, str):
            return False
        above = self.least is None or value >= self.least
        return above and (self.most is None or value <= self.most)

    def __str__(self) -> str:
        if self.least is not None and self.least == self.most:
            return f"= {self.least:g}"
        limits = [f">= {self.least:g}"] if self.least is not None else []
        limits += [f"<= {self.most:g}"] if self.most is not None else []
        return " and ".join(limits)


def is_true(figure: str, judges: Judge = "any") -> Bar:
    """The bar of a figure that must be true."""
    return Bar(figure, 1, 1, judges)


@dataclass(frozen=True)
class Stamp:
    """What all lines say of the machine and the code."""

    device: str
    torch: str
    commit: str

    @property
    def judges(self) -> frozenset[Judge]:
        """Whose bars count on this device."""
        found: set[Judge] = {"any"}
        if self.device not in ("cpu", "test device"):
            found.add("gpu")
        if "H100" in self.device or "H200" in self.device:
            found.add("hopper")
        return frozenset(found)


class Lines:
    """A file of lines, to which several processes add one after the other."""

    def __init__(self, file: Path, stamp: Stamp) -> None:
        self.file = file
        self.stamp = stamp

    def write(
        self,
        stage: str,
        what: str,
        figures: Mapping[str, Any],
        bars: Sequence[Bar] = (),
        **more: Any,
    ) -> dict[str, Any]:
        """Add a line, which is on the disk then.

        Args:
            bars: of these figures; a figure that is missing, or None, was not measured and fails
                none.
            more: further fields; `ok` and `error` count before what the bars say.
        """
        told, met = {}, True
        for bar in bars:
            value = figures.get(bar.figure)
            if bar.judges not in self.stamp.judges:
                word = NOT_TESTED
            elif value is None:
                word = "not measured"
            else:
                word = "met" if bar.meets(value) else "missed"
            told[bar.figure] = f"{bar}: {word}"
            met = met and word != "missed"
        error = more.get("error", "")
        line = {"stage": stage, "what": what, "ok": met and not error, "figures": dict(figures)}
        line |= {"bar": told, **vars(self.stamp), "error": error, **more}
        append(self.file, [line])
        return line


def append(file: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Add lines to a file, which are on the disk then."""
    with file.open("a", encoding="utf-8") as opened:
        for line in lines:
            opened.write(json.dumps(line, default=str) + "\n")
        opened.flush()
        os.fsync(opened.fileno())


def read(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file; half a line at its end, and a file that is not there, are nothing."""
    if not file.is_file():
        return
    for text in file.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and {"stage", "what"} <= line.keys():
            yield line


def ended_stages(file: Path, commit: str) -> dict[str, list[dict[str, Any]]]:
    """By stage the lines of those that ended, well or not, on this commit: an error is no end."""
    by_stage: dict[str, list[dict[str, Any]]] = {}
    ended: dict[str, list[dict[str, Any]]] = {}
    for line in read(file):
        if line.get("commit") != commit:
            continue
        stage, of_one = line["stage"], by_stage.setdefault(line["stage"], [])
        of_one.append(line)
        if line["what"] == STAGE:
            if line.get("ok") is not None and not line.get("error"):
                ended[stage] = of_one
            by_stage[stage] = []
    return ended


def flat(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of lines as one flat mapping: numbers, words and truths by stage, measurement and
    name. What a stage tells again of a measurement is there once, as the stage's."""
    found: dict[str, Any] = {}
    lines = list(lines)
    of_stages = {one["stage"]: one.get("figures", {}) for one in lines if one["what"] == STAGE}
    for line in lines:
        begin, again = line["stage"], {}
        if line["what"] != STAGE:
            begin, again = f"{begin}_{line['what']}", of_stages.get(begin, {})
        for name, value in line.get("figures", {}).items():
            if isinstance(value, str | int | float | bool) and again.get(name) != value:
                key = f"{begin}_{name}".lower()
                found["".join(c if c.isalnum() else "_" for c in key)] = value
    return found


def last_lines(text: str, number: int = 40) -> str:
    """The end of what a stage said."""
    return "\n".join(text.strip().splitlines()[-number:])
