"""Values of an examination: suspects, findings, and the report. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import Any, Literal

from gpumix.doctor.change import Changes, describe_changes
from gpumix.doctor.verdict import Gain

BATCH_NOTE = (
    "the gain is per sample; this changes what is trained: steps are fewer, and the learning rate "
    "may have to be higher"
)
DTYPE_NOTE = "it rounds otherwise: look at the loss of a whole run"

STATE_NOTE = (
    "this changes what is trained: moments are kept from step to step, and a new learning rate has "
    "to be set in its `param_groups`"
)

RemarkName = Literal[
    "between",
    "loop",
    "remade_optimizer",
    "unfused_attention",
    "steering_reads",
    "model_reads",
    "starved",
    "cores",
    "disk",
    "allocator",
    "throttled",
    "pcie_link",
    "emulation",
    "spread",
]
"""Stable names of remarks, for programs."""


@dataclass(frozen=True)
class Suspect:
    """A suspected slowdown.

    Attributes:
        name: short and stable, for programs.
        what: description; `why`: reason for the suspicion.
        changes: expected to help, as job keys or changes of a function.
        fix: edit for the user, for changes of code; empty if `changes` are job keys.
        note: side effects or costs of the change.
        changes_training: beyond rounding; reported, and left to the user.
        costly: whether a test takes minutes, and runs only on request.
        alternatives: other changes for the same problem; the best is measured.
    """

    name: str
    what: str
    why: str
    changes: Changes
    fix: str = ""
    note: str = ""
    changes_training: bool = False
    costly: bool = False
    alternatives: tuple[Suspect, ...] = ()

    @property
    def change_text(self) -> str:
        """Description of the change."""
        made = self.fix or describe_changes(self.changes)
        return f"{made} ({self.note})" if self.note else made


@dataclass(frozen=True)
class Remark:
    """A problem that no measured change mends."""

    name: RemarkName
    text: str


@dataclass(frozen=True)
class Slowdown:
    """A confirmed slowdown, with the change fixing it and the measured gain."""

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
            "fix": self.suspect.change_text,
            "gain": self.gain.factor,
            "gain_low": self.gain.low,
            "gain_high": self.gain.high,
            "confidence": self.gain.confidence,
            "pairs": self.gain.pairs,
        }


@dataclass(frozen=True)
class Report:
    """Result of an examination.

    Attributes:
        findings: largest gain first. `changes` combines all changes without effect on training,
            `gain` is their product.
        cleared: suspects whose change did not shorten steps.
        unlike: suspects whose change altered training, with the difference.
        untried: names of costly suspects not requested.
        remarks: problems without a fix by a change.
        operations: of a step before any change, in torch; None: not counted.
        step_s: of an original step, including work between steps; `input_share`: the part of it
            waiting for data, on the device with the longest wait.
        seconds: since the command began; `trained_s` of measured steps.
    """

    findings: tuple[Slowdown, ...]
    cleared: tuple[tuple[str, Gain], ...]
    unlike: tuple[tuple[str, str], ...]
    untried: tuple[str, ...]
    remarks: tuple[Remark, ...]
    operations: int | None
    step_s: float
    input_share: float
    seconds: float
    trained_s: float

    @property
    def changes(self) -> dict[str, Any]:
        return {key: value for one in self._safe for key, value in one.suspect.changes.items()}

    @property
    def settings(self) -> dict[str, Any]:
        """Subset of `changes` with job keys."""
        return {key: value for one in self._key_suspects for key, value in one.changes.items()}

    @property
    def notes(self) -> list[str]:
        """Descriptions of noteworthy `settings`."""
        return [one.change_text for one in self._key_suspects if one.note]

    @property
    def left(self) -> list[str]:
        """Helpful changes left to the user, since they alter training or need code edits."""
        suspects = [one.suspect for one in self.findings]
        return [one.change_text for one in suspects if one.changes_training or one.fix]

    @property
    def gain(self) -> float:
        return prod(one.gain.factor for one in self._safe)

    @property
    def _safe(self) -> list[Slowdown]:
        return [one for one in self.findings if not one.suspect.changes_training]

    @property
    def _key_suspects(self) -> list[Suspect]:
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
            "remarks": [asdict(one) for one in self.remarks],
            "operations": self.operations,
            "changes": self.changes,
            "seconds": self.seconds,
            "trained_s": self.trained_s,
        }
