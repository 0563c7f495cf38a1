"""Runs the stages one after the other, each in a process group of its own that ends at its limit.

Whatever happens to a stage, its line is written and the next one begins.
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from proof.lines import (
    LINES_MISSED,
    NOT_TESTED,
    RESULTS,
    SKIPPED,
    STAGE,
    Lines,
    Place,
    Stamp,
    append,
    ended_stages,
    flat,
    last_lines,
    read,
)
from proof.service import quit_service
from proof.stages import Stage
from proof.starter import Starter, processes_on_gpu

LOG = "log.txt"
SUMMARY = ("stages", "failed", "skipped", "not_tested", "seconds", "device", "commit")
REHEARSAL_PATIENCE = 3.0  # limits are for a GPU's host, and CPUs that rehearse have other work too
RESERVE_S = 4.0  # of the budget, for ending a stage that does not want to


@dataclass(frozen=True)
class Wanted:
    """What the command was asked for.

    Attributes:
        done: a file of earlier lines; stages that ended there on this commit are left out.
        only: names of stages; empty: all.
    """

    place: Place
    out: Path
    done: Path | None
    budget_s: float
    stamp: Stamp
    only: Sequence[str] = ()


class Proof:
    """One call of the command."""

    def __init__(self, wanted: Wanted, stages: Sequence[Stage], starter: Starter) -> None:
        wanted.out.mkdir(parents=True, exist_ok=True)
        self.wanted = wanted
        self.results, self.log = wanted.out / RESULTS, wanted.out / LOG
        # Before its file is removed, if it is that of the same folder.
        self._earlier = ended_stages(wanted.done, wanted.stamp.commit) if wanted.done else {}
        self.results.unlink(missing_ok=True)
        self.log.unlink(missing_ok=True)
        self._lines = Lines(self.results, wanted.stamp)
        self._stages = [s for s in stages if not wanted.only or s.name in wanted.only]
        self._starter = starter
        self._begun = time.monotonic()
        self._folder = Path(tempfile.mkdtemp(prefix="gpu-proof-"))

    def run(self) -> dict[str, Any]:
        """All stages; the figures of the end: `SUMMARY`, then those of the stages, flat."""
        try:
            done = self._taken_over()
            for stage in self._stages:
                if stage.name not in done:
                    self._run(stage)
        finally:
            self._starter.close()
            shutil.rmtree(self._folder, ignore_errors=True)
        return self._summary()

    @property
    def _left_s(self) -> float:
        return self.wanted.budget_s - (time.monotonic() - self._begun)

    def _taken_over(self) -> set[str]:
        """The stages of earlier calls, whose lines are copied: the file then has all of them."""
        if self.wanted.done is not None and not self._earlier:
            commit = self.wanted.stamp.commit
            self._say(f"no stage of commit {commit} has ended in {self.wanted.done}")
        for stage, lines in self._earlier.items():
            append(self.results, lines)
            self._say(f"{stage}: ended in an earlier call")
        return set(self._earlier)

    def _run(self, stage: Stage) -> None:
        left_s = self._left_s - RESERVE_S
        if left_s < stage.least_s:
            why = f"{left_s:.0f} s are left, it takes {stage.least_s:g}"
            self._say(f"{stage.name}: skipped, {why}")
            self._lines.write(stage.name, SKIPPED, {"why": why}, ok=None)
            return
        patience = REHEARSAL_PATIENCE if self.wanted.place != "gpu" else 1.0
        limit_s = min(left_s, patience * (stage.limit_s or left_s))
        self._say(f"{stage.name}: begins, {limit_s:.0f} s at the most")
        begun, said = time.monotonic(), self._size_of_log()
        error = self._starter.run(stage, self.results, self.log, self._folder / stage.name, limit_s)
        shutil.rmtree(self._folder / stage.name, ignore_errors=True)
        took_s = time.monotonic() - begun
        if error or not self._has_ended(stage.name):
            told = last_lines(self._log_since(said))
            self._lines.write(
                stage.name,
                STAGE,
                {},
                s=round(took_s, 2),
                error=f"{error or 'it ended without a line'}\n{told}",
            )
        if stage.name == "unequal":
            quit_service()  # of a stage that could not do so itself
        if left := processes_on_gpu(self.wanted.place):
            self._say(f"{stage.name}: these processes are left on the GPU: {left}")
        self._say(f"{stage.name}: {took_s:.1f} s, {error or self._describe_outcome(stage.name)}")
        self._after_env(stage)

    def _after_env(self, stage: Stage) -> None:
        """Where a forked process cannot use the GPU, all further ones are started."""
        forked = self._starter.forks
        lines = [one for one in read(self.results) if one["stage"] == stage.name]
        works = any(one["what"] == "fork" and one["ok"] for one in lines)
        if stage.name == "env" and forked and not works:
            self._say(
                "a forked process cannot use the GPU: all stages are started by exec from now"
            )
            self._starter.forks = False
            self._run(replace(stage, least_s=0.0))

    def _describe_outcome(self, stage: str) -> str:
        """Return what became of a stage, in words: of its bars, and of what failed."""
        lines = [one for one in read(self.results) if one["stage"] == stage]
        bad = [one for one in lines if one["ok"] is False and one["what"] != STAGE]
        of_stage = [one for one in lines if one["what"] == STAGE]
        told = [f"{one['what']} failed" for one in bad if one["error"]]
        for one in (*bad, *of_stage[-1:]):
            missed = [name for name, bar in one["bar"].items() if bar.endswith("missed")]
            told += [f"{one['what']} {name} {one['bar'][name]}" for name in missed]
        return "; ".join(dict.fromkeys(told)) or _count_bars(lines)

    def _has_ended(self, stage: str) -> bool:
        return any(one["stage"] == stage and one["what"] == STAGE for one in read(self.results))

    def _size_of_log(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0

    def _log_since(self, place: int) -> str:
        if not self.log.exists():
            return ""
        with self.log.open("rb") as log:
            log.seek(place)
            return log.read().decode(errors="replace")

    def _say(self, line: str) -> None:
        told = f"[{time.monotonic() - self._begun:6.1f} s] {line}"
        print(told, file=sys.stderr, flush=True)
        with self.log.open("a", encoding="utf-8") as log:
            log.write(told + "\n")

    def _summary(self) -> dict[str, Any]:
        lines = list(read(self.results))
        ends = [one for one in lines if one["what"] == STAGE]
        return {
            "stages": len({one["stage"] for one in ends}),
            "failed": sum(one["ok"] is False for one in lines),
            "skipped": sum(one["what"] == SKIPPED for one in lines),
            "not_tested": _count(lines, NOT_TESTED),
            "seconds": round(time.monotonic() - self._begun, 1),
            "device": self.wanted.stamp.device,
            "commit": self.wanted.stamp.commit,
            **flat(lines),
        }


def _count_bars(lines: Sequence[dict[str, Any]]) -> str:
    """Return how many bars of a stage were met, not measured, or do not count on this device."""
    counts = {word: _count(lines, word) for word in ("met", "not measured", NOT_TESTED)}
    told = [f"{number} {word}" for word, number in counts.items() if number]
    return NOT_TESTED if counts[NOT_TESTED] and len(told) == 1 else f"bars: {', '.join(told)}"


def _count(lines: Sequence[dict[str, Any]], word: str) -> int:
    """Count the bars with this outcome."""
    return sum(
        bar.endswith(f": {word}")
        for one in lines
        for figure, bar in one.get("bar", {}).items()
        if figure != LINES_MISSED
    )


def take_sigterm() -> None:
    """SIGTERM ends the command as Ctrl-C does: stages are ended with it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
