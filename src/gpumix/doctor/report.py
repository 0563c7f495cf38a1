"""The values of an examination: suspects, findings, and the report of them all. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from gpumix.doctor.change import Changes, in_words
from gpumix.doctor.verdict import Gain

BATCH_NOTE = (
    "the gain is per sample; this changes what is trained: steps are fewer, and the learning rate "
    "may have to be higher"
)
DTYPE_NOTE = "it rounds otherwise: look at the loss of a whole run"


@dataclass(frozen=True)
class Suspect:
    """One thing that may cost time.

    Attributes:
        name: short and stable, for programs.
        what: it is, in words; `why` it is suspected.
        changes: that would mend it: of a job, or of what a function does.
        fix: what its user must change, where that is code; empty: `changes` are keys of a job.
        note: what comes with it, or is given up for it.
        changes_training: beyond rounding; that is told, and left to the user.
        costly: to try takes minutes: only where it is asked for.
    """

    name: str
    what: str
    why: str
    changes: Changes
    fix: str = ""
    note: str = ""
    changes_training: bool = False
    costly: bool = False

    @property
    def mended_by(self) -> str:
        """In words."""
        made = self.fix or in_words(self.changes)
        return f"{made} ({self.note})" if self.note else made


@dataclass(frozen=True)
class Finding:
    """What slows training down, and the change that mends it, by so much."""

    suspect: Suspect
    gain: Gain

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.suspect.name,
            "what": self.suspect.what,
            "why": self.suspect.why,
            "changes": dict(self.suspect.changes),
            "changes_training": self.suspect.changes_training,
            "note": self.suspect.note,
            "fix": self.suspect.mended_by,
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
        findings: largest gain first; `changes` are those of all together that leave what is trained
            as it is, `gain` what they bring.
        cleared: suspects whose change did not make steps shorter.
        unlike: suspects whose change made something else of the training, and in what.
        untried: names of suspects that take minutes to try, and were not asked for.
        remarks: what no setting mends.
        step_s: of a step as it was, all beside steps counted in; `input_share`: the part of it in
            which a device, the one that does so longest, waited for its data.
        seconds: that the examination took; `trained_s` of these were steps that were measured.
    """

    findings: tuple[Finding, ...]
    cleared: tuple[tuple[str, Gain], ...]
    unlike: tuple[tuple[str, str], ...]
    untried: tuple[str, ...]
    remarks: tuple[str, ...]
    step_s: float
    input_share: float
    seconds: float
    trained_s: float

    @property
    def changes(self) -> dict[str, Any]:
        return {key: value for one in self._safe for key, value in one.suspect.changes.items()}

    @property
    def settings(self) -> dict[str, Any]:
        """Those of `changes` that are keys of a job."""
        return {key: value for one in self._of_keys for key, value in one.changes.items()}

    @property
    def notes(self) -> list[str]:
        """What comes with `settings`."""
        return [one.mended_by for one in self._of_keys if one.note]

    @property
    def left(self) -> list[str]:
        """Changes that would help, and are left to the user: they change what is trained, or are of
        code."""
        suspects = [one.suspect for one in self.findings]
        return [one.mended_by for one in suspects if one.changes_training or one.fix]

    @property
    def gain(self) -> float:
        return prod(one.gain.factor for one in self._safe)

    @property
    def _safe(self) -> list[Finding]:
        return [one for one in self.findings if not one.suspect.changes_training]

    @property
    def _of_keys(self) -> list[Suspect]:
        return [one.suspect for one in self._safe if not one.suspect.fix]

    def as_dict(self) -> dict[str, Any]:
        return {
            "step_s": self.step_s,
            "input_share": self.input_share,
            "gain": self.gain,
            "findings": [one.as_dict() for one in self.findings],
            "cleared": {name: gain.factor for name, gain in self.cleared},
            "unlike": dict(self.unlike),
            "untried": list(self.untried),
            "remarks": list(self.remarks),
            "changes": self.changes,
            "seconds": self.seconds,
            "trained_s": self.trained_s,
        }
