"""Examination of a patient (a job or a training function): runs a few steps, then measures
candidate changes in turn, each on top of the changes accepted before.

A window is a run of a few steps in its own processes, isolated from the settings of earlier
windows. Windows before and after a change alternate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol, Self, TypeVar

from gpumix.doctor.change import Changes
from gpumix.doctor.report import Remark, Report, Slowdown, Suspect
from gpumix.doctor.verdict import PAIRS, Gain, compute_gain, has_enough_pairs
from gpumix.schema.errors import GpumixError
from gpumix.schema.units import show_seconds

MOST_SPREAD = 0.3  # limit on the spread of windows with equal settings, as fraction of a step
LONG_S = 20.0  # duration of windows above which an estimate is printed

Say = Callable[[str], None]


@dataclass(frozen=True)
class TimedWindow:
    """Timing of a window: `step_s` per step, including work between steps and scaled to the
    unchanged samples per step; `trained_s` measured; the fraction of a step waiting for data."""

    step_s: float
    trained_s: float
    input_share: float


class Patient(Protocol):
    """A system under examination, with some changes applied."""

    def window(self) -> TimedWindow:
        """Run a few steps.

        Raises:
            GpumixError: the window fails.
        """
        ...

    def with_changes(self, changes: Changes) -> Self:
        """Return a copy with additional changes."""
        ...

    def suspects(self) -> list[Suspect]:
        """Return suspects in the order of testing, based on the last window."""
        ...

    def unlike(self, before: Self) -> str:
        """Describe differences in training from `before` beyond rounding, as shown by the last
        windows; empty without a difference."""
        ...

    @property
    def operations(self) -> int | None:
        """Operations of torch in a step before any change; None: not counted."""
        ...

    def remarks(self) -> Iterator[Remark]:
        """Yield remarks on problems without a fix by changes, based on the last window."""
        ...


AnyPatient = TypeVar("AnyPatient", bound=Patient)


@dataclass
class _WindowStatistics:
    """Statistics of all windows so far."""

    trained_s: float = 0.0
    spreads: list[float] = field(default_factory=list)

    def one_more(self, patient: Patient) -> TimedWindow:
        found = patient.window()
        self.trained_s += found.trained_s
        return found

    def remarks(self) -> Iterator[Remark]:
        """Yield remarks on the spread of windows."""
        if self.spreads and (spread := median(self.spreads)) > MOST_SPREAD:
            yield Remark(
                "spread",
                f"runs with the same settings differ by {spread:.0%}: this machine does something "
                "else beside, so smaller gains than that may have been missed",
            )


@dataclass
class _Results:
    findings: list[Slowdown] = field(default_factory=list)
    cleared: list[tuple[str, Gain]] = field(default_factory=list)
    unlike: list[tuple[str, str]] = field(default_factory=list)


def examine(
    patient: AnyPatient,
    *,
    say: Say,
    pairs: int = PAIRS,
    only: tuple[str, ...] = (),
    begun_s: float | None = None,
) -> Report:
    """Examine `patient`.

    Args:
        say: reports progress.
        pairs: of windows per change; disturbed windows cause additional pairs.
        only: names of suspects to try; empty: all except costly suspects.
        begun_s: `time.perf_counter` at the start of the command; default: now.

    Raises:
        GpumixError: the unchanged patient does not run.
    """
    begun_s = time.perf_counter() if begun_s is None else begun_s
    tally, found = _WindowStatistics(), _Results()
    say("running a few steps without changes")
    first = tally.one_more(patient)
    waits = f"of which {first.input_share:.0%} waits for data"
    say(f"a step takes {show_seconds(first.step_s)}, {waits}")
    tried: set[str] = set()
    while (suspect := _next(patient, tried, only)) is not None:
        tried.add(suspect.name)
        say(f"suspected: {suspect.what} ({suspect.why}); with {suspect.change_text}:")
        suspect = _choose_alternative(patient, suspect, tally, say)
        after = patient.with_changes(suspect.changes)
        try:
            gain = _measure_gain(patient, after, pairs, tally, say)
        except GpumixError as error:
            say(f"  that does not run: {error.what}")
            continue
        say(f"  {gain}")
        if not gain.real:
            found.cleared.append((suspect.name, gain))
        elif unlike := after.unlike(patient):
            say(f"  but it trains something else: {unlike}")
            found.unlike.append((suspect.name, unlike))
        else:
            found.findings.append(Slowdown(suspect, gain))
            patient = patient if suspect.changes_training else after
    remarks = (*patient.remarks(), *tally.remarks())
    named = {one.suspect.name for one in found.findings}  # a finding says more
    return Report(
        findings=tuple(sorted(found.findings, key=lambda one: -one.gain.factor)),
        cleared=tuple(found.cleared),
        unlike=tuple(found.unlike),
        untried=tuple(one.name for one in patient.suspects() if one.costly and not only),
        remarks=tuple(one for one in remarks if one.name not in named),
        operations=patient.operations,
        step_s=first.step_s,
        input_share=first.input_share,
        seconds=time.perf_counter() - begun_s,
        trained_s=tally.trained_s,
    )


def _next(patient: Patient, tried: set[str], only: tuple[str, ...]) -> Suspect | None:
    for suspect in patient.suspects():
        wanted = suspect.name in only if only else not suspect.costly
        if wanted and suspect.name not in tried:
            return suspect
    return None


def _choose_alternative(
    patient: Patient, suspect: Suspect, tally: _WindowStatistics, say: Say
) -> Suspect:
    """Return the suspect with the best of its changes, by one window each."""
    if not suspect.alternatives:
        return suspect
    best, best_s = suspect, math.inf
    for one in (suspect, *suspect.alternatives):
        try:
            step_s = tally.one_more(patient.with_changes(one.changes)).step_s
        except GpumixError as error:
            say(f"  {one.change_text} does not run: {error.what}")
            continue
        say(f"  {show_seconds(step_s)} a step with {one.change_text}")
        if step_s < best_s:
            best, best_s = one, step_s
    say(f"  the best in full: {best.change_text}")
    return best


def _measure_gain(
    before: AnyPatient, after: AnyPatient, pairs: int, tally: _WindowStatistics, say: Say
) -> Gain:
    """Measure the gain in alternating windows, stopping once the result is clear."""
    begun_s = time.perf_counter()
    before_s: list[float] = []
    after_s: list[float] = []
    while not has_enough_pairs(before_s, after_s, pairs):
        order = ((before, before_s), (after, after_s))
        for patient, seconds in order if len(before_s) % 2 == 0 else order[::-1]:
            seconds.append(tally.one_more(patient).step_s)
        pair_s = time.perf_counter() - begun_s
        if len(before_s) == 1 and (left_s := pair_s * (pairs - 1)) > LONG_S:
            say(
                f"  one pair of runs of {pairs} took {show_seconds(pair_s)}, the others take about "
                f"{show_seconds(left_s)}"
            )
    tally.spreads.append((max(before_s) - min(before_s)) / median(before_s))
    return compute_gain(before_s, after_s)
