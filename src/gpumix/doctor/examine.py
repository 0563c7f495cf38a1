"""Examines a job: runs a few of its steps, and tries what may make them shorter, one change at a
time, each against the job as it has become so far.

A window is a run of a few steps in processes of its own, so that nothing of one setting is left for
another; windows before and after a change run in turn.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gpumix.doctor.change import Changes, in_words, overrides
from gpumix.doctor.suspects import INPUT_SHARE, Evidence, Suspect, suspects
from gpumix.doctor.verdict import PAIRS, Gain, gain_of, hopeless
from gpumix.spec.errors import GpumixError
from gpumix.spec.job import Job
from gpumix.spec.plan import Plan
from gpumix.spec.profile import Profile
from gpumix.train.loop import Trial
from gpumix.train.pipeline import Pipeline

STEPS = 12  # of a window, beside its warm-up
SETTLING = 10  # steps more, in which the loader finds its setting
MEASURED = {"precision", "compile", "efficiency"}  # of a job, what its profile goes by

Say = Callable[[str], None]


@dataclass(frozen=True)
class Finding:
    """What slows a job down, and the change that mends it, by so much."""

    name: str
    what: str
    why: str
    changes: dict[str, Any]
    gain: Gain

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "what": self.what,
            "why": self.why,
            "changes": self.changes,
            "gain": self.gain.factor,
            "gain_low": self.gain.low,
            "gain_high": self.gain.high,
            "confidence": self.gain.confidence,
            "pairs": self.gain.pairs,
        }


@dataclass(frozen=True)
class Report:
    """What an examination came to.

    Attributes:
        findings: largest gain first; `changes` are those of all together.
        cleared: suspects whose change did not make steps shorter.
        remarks: what no setting mends.
        step_s: of the job as it was, all beside steps counted in.
    """

    findings: tuple[Finding, ...]
    cleared: tuple[tuple[str, Gain], ...]
    remarks: tuple[str, ...]
    step_s: float

    @property
    def changes(self) -> dict[str, Any]:
        return {key: value for one in self.findings for key, value in one.changes.items()}

    @property
    def gain(self) -> float:
        """Of all findings together."""
        factor = 1.0
        for one in self.findings:
            factor *= one.gain.factor
        return factor

    def as_dict(self) -> dict[str, Any]:
        return {
            "step_s": self.step_s,
            "gain": self.gain,
            "findings": [one.as_dict() for one in self.findings],
            "cleared": {name: gain.factor for name, gain in self.cleared},
            "remarks": list(self.remarks),
            "changes": self.changes,
        }


@dataclass
class _Patient:
    """The job with some changes."""

    path: Path
    given: tuple[str, ...]
    changes: Changes
    steps: int
    folder: Path
    debug: bool
    profiles: dict[str, Profile]
    trials: list[Trial] = field(default_factory=list)

    @cached_property
    def pipeline(self) -> Pipeline:
        said = [*self.given, *overrides(self.changes), f"output={self.folder}", "trace_step=null"]
        return Pipeline.of_file(self.path, said, debug=self.debug)

    @property
    def job(self) -> Job:
        return self.pipeline.job

    @cached_property
    def plan(self) -> Plan:
        return self.pipeline.plan(self._profile())

    def _profile(self) -> Profile:
        """Measured once for all changes that leave it as it is."""
        said = self.job.model_dump(mode="json", include=MEASURED)
        key = json.dumps([said, self.job.techniques.tensor, self.job.techniques.sequence])
        if key not in self.profiles:
            self.profiles[key] = self.pipeline.profile()
        return self.profiles[key]

    def window(self) -> float:
        """Seconds of a step, with its part of what is done beside steps."""
        trial = self.pipeline.try_out(self.plan, self.steps, beside=True)
        self.trials.append(trial)
        seconds = trial.mean_s
        for every, each_s in (
            (self.job.evaluation.every_steps, trial.evaluation_s),
            (self.job.checkpoint.every_steps, trial.save_s),
        ):
            seconds += each_s / every if every else 0.0
        return seconds

    def with_changes(self, changes: Changes) -> _Patient:
        return replace(self, changes={**self.changes, **changes}, trials=[])


def examine(
    path: Path,
    given: tuple[str, ...] = (),
    *,
    say: Say,
    steps: int = STEPS,
    pairs: int = PAIRS,
    only: tuple[str, ...] = (),
    debug: bool = False,
) -> Report:
    """Examine the job at `path`.

    Args:
        given: changes of the job, as `--set` has them.
        say: is told what is tried.
        steps: of a window.
        pairs: of windows, for each change.
        only: names of suspects to try; empty: all.

    Raises:
        GpumixError: the job as it is does not run.
    """
    with _folder() as folder:
        patient = _Patient(path, given, {}, steps + SETTLING, folder, debug, {})
        first_s = patient.window()
        say(f"a step takes {first_s * 1e3:.0f} ms")
        findings: list[Finding] = []
        cleared: list[tuple[str, Gain]] = []
        tried: set[str] = set()
        while (suspect := _next(patient, tried, only)) is not None:
            tried.add(suspect.name)
            say(f"suspected: {suspect.what} ({suspect.why}); with {in_words(suspect.changes)}:")
            after = patient.with_changes(suspect.changes)
            try:
                gain = _compared(patient, after, pairs)
            except GpumixError as error:
                say(f"  that does not run: {error.what}")
                continue
            say(f"  {gain}")
            if gain.real:
                changes = dict(suspect.changes)
                findings.append(Finding(suspect.name, suspect.what, suspect.why, changes, gain))
                patient = after
            else:
                cleared.append((suspect.name, gain))
        findings.sort(key=lambda one: -one.gain.factor)
        return Report(tuple(findings), tuple(cleared), tuple(_remarks(patient)), first_s)


@contextmanager
def _folder() -> Iterator[Path]:
    """For what windows write."""
    with tempfile.TemporaryDirectory(prefix="gpumix-doctor-") as name:
        yield Path(name)


def _next(patient: _Patient, tried: set[str], only: tuple[str, ...]) -> Suspect | None:
    for suspect in suspects(_evidence(patient)):
        if suspect.name not in tried and (not only or suspect.name in only):
            return suspect
    return None


def _compared(before: _Patient, after: _Patient, pairs: int) -> Gain:
    """By windows that run in turn; no more of them than show that there is nothing."""
    before_s: list[float] = []
    after_s: list[float] = []
    for number in range(pairs):
        order = ((before, before_s), (after, after_s))
        for patient, seconds in order if number % 2 == 0 else order[::-1]:
            seconds.append(patient.window())
        if hopeless(before_s, after_s):
            break
    return gain_of(before_s, after_s)


def _evidence(patient: _Patient) -> Evidence:
    trial, plan = patient.trials[-1], patient.plan
    planned_s = plan.prediction.step_s if plan.prediction else 0.0
    return Evidence(
        job=patient.job,
        plan=plan,
        input_share=max(trial.input_shares),
        step_s=trial.mean_s,
        save_s=trial.save_s,
        evaluation_s=trial.evaluation_s,
        padding_share=trial.padding_share,
        compilers=any(c.accelerator == "cuda" for c in patient.pipeline.cluster.classes),
        planned_s=planned_s,
        foretold_s=lambda changes: _foretold_s(patient.with_changes(changes)),
    )


def _foretold_s(patient: _Patient) -> float | None:
    try:
        expected = patient.plan.prediction
    except GpumixError:
        return None
    return None if expected is None else expected.step_s


def _remarks(patient: _Patient) -> Iterator[str]:
    share = max(patient.trials[-1].input_shares)
    if share > INPUT_SHARE:
        yield (
            f"a device still waits for its data in {share:.0%} of a step: reading samples takes "
            "more than this host's cores give; make that cheaper (store what was decoded), or read "
            "on a host with more cores"
        )
    if patient.trials[-1].overruns:
        yield "this machine is too busy to emulate devices: times are not to be trusted"
