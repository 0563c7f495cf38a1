"""The loop that tries one change after the other, on a patient whose steps are known."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from gpumix.doctor.examine import TimedWindow, examine
from gpumix.doctor.report import Remark, Report, Slowdown, Suspect
from gpumix.doctor.verdict import Gain
from gpumix.schema.errors import TrainingError
from helpers.errors import raises

FACTORS = {"half": 0.5, "tenth": 0.9, "nothing": 1.0, "worse": 1.5, "wrong": 0.1, "other": 0.5}
FACTORS |= {"minutes": 0.2, "loop": 0.5, "third": 1 / 3, "choice": 0.8}


CHOICES = tuple(
    Suspect("choice", "what choice", "why", {n: True}, fix=f"do {n}")
    for n in ("worse", "third", "broken", "half")
)


@dataclass
class Known:
    """Its steps take `FACTORS` of a second, those of all changes multiplied."""

    names: tuple[str, ...]
    changes: dict[str, Any] = field(default_factory=dict)
    log: list[tuple[str, ...]] = field(default_factory=list)
    noise: tuple[float, ...] = (1.0,)

    def window(self) -> TimedWindow:
        if "broken" in self.changes:
            raise TrainingError("it is broken", code="broken")
        step_s = self.noise[len(self.log) % len(self.noise)]
        self.log.append(tuple(self.changes))
        for name in self.changes:
            step_s *= FACTORS[name]
        return TimedWindow(step_s, 10 * step_s, input_share=0.25 if self.changes else 0.5)

    def with_changes(self, changes):
        return replace(self, changes={**self.changes, **changes})

    def suspects(self):
        return [
            Suspect(
                name=n,
                what=f"what {n}",
                why="why",
                changes={n: True},
                fix="mend it",
                changes_training=n == "other",
                costly=n == "minutes",
                alternatives=CHOICES if n == "choice" else (),
            )
            for n in self.names
        ]

    def unlike(self, before):
        return "its loss" if "wrong" in self.changes else ""

    operations = 7

    def remarks(self):
        yield Remark("between", ", ".join(self.changes))
        yield Remark("loop", "told by the finding of that name")


def report_of(findings: tuple[Slowdown, ...]) -> Report:
    measured = {"step_s": 1.0, "input_share": 0.0, "seconds": 1.0, "trained_s": 1.0}
    return Report(findings, (), (), (), remarks=(), operations=None, **measured)


def examined(*names: str, only: tuple[str, ...] = (), noise: tuple[float, ...] = (1.0,)):
    patient = Known(names, noise=noise)
    said: list[str] = []
    return examine(patient, say=said.append, pairs=3, only=only), patient, said


def test_findings_are_those_that_help_largest_first():
    report, _, _ = examined("tenth", "nothing", "half", "worse")
    assert [(one.suspect.name, one.gain.factor) for one in report.findings] == [
        ("half", pytest.approx(2.0)),
        ("tenth", pytest.approx(1 / 0.9)),
    ]
    assert [name for name, _ in report.cleared] == ["nothing", "worse"]
    assert report.changes == {"half": True, "tenth": True}
    assert report.gain == pytest.approx(2.0 / 0.9)
    assert report.step_s == 1.0 and report.input_share == 0.5


def test_each_change_is_tried_against_those_that_helped_before_in_turns():
    _, patient, _ = examined("half", "tenth")
    plain, half, both = (), ("half",), ("half", "tenth")
    assert patient.log[:7] == [plain, plain, half, half, plain, plain, half]
    assert patient.log[7:] == [half, both, both, half, half, both]


def test_how_long_windows_take_is_told_where_that_is_long(monkeypatch):
    monkeypatch.setattr("gpumix.doctor.examine.LONG_S", -1.0)
    _, _, said = examined("half")
    (told,) = [line for line in said if "one pair of runs of 3 took" in line]
    assert "the others take about" in told
    monkeypatch.undo()
    assert not any("one pair" in line for line in examined("half")[2])


def test_what_trains_something_else_is_no_finding():
    report, patient, said = examined("wrong", "half")
    assert [one.suspect.name for one in report.findings] == ["half"]
    assert report.unlike == (("wrong", "its loss"),)
    assert patient.log[-1] == ("half",)
    assert any("something else: its loss" in line for line in said)


def test_what_changes_the_training_is_told_and_not_done():
    report, patient, _ = examined("other", "tenth")
    assert [one.suspect.name for one in report.findings] == ["other", "tenth"]
    assert report.changes == {"tenth": True} and report.gain == pytest.approx(1 / 0.9)
    assert patient.log[-1] == ("tenth",) or patient.log[-2] == ("tenth",)
    assert [one["changes_training"] for one in report.as_dict()["findings"]] == [True, False]
    assert report.notes == [] and report.settings == {}  # they are of code


def test_of_several_changes_the_best_is_measured():
    """Each is run once before; what does not run is told."""
    report, patient, said = examined("choice", "tenth")
    (choice, tenth) = report.findings
    assert (choice.suspect.name, choice.suspect.changes) == ("choice", {"third": True})
    assert choice.gain.factor == pytest.approx(3.0) and choice.gain.pairs == 3
    assert patient.log[1:5] == [("choice",), ("worse",), ("third",), ("half",)]
    assert report.changes == {"third": True, "tenth": True}
    assert any("do broken does not run: it is broken" in line for line in said)
    assert tenth.gain.factor == pytest.approx(1 / 0.9)


def test_what_does_not_run_is_told_and_left():
    report, _, said = examined("broken", "half")
    assert [one.suspect.name for one in report.findings] == ["half"] and not report.cleared
    assert any("does not run: it is broken" in line for line in said)


def test_a_patient_that_does_not_run_is_an_error():
    with raises(TrainingError, code="broken"):
        examine(Known((), {"broken": True}), say=print)


def test_only_what_is_asked_for_is_tried():
    report, _, _ = examined("half", "tenth", only=("tenth",))
    assert [one.suspect.name for one in report.findings] == ["tenth"]


def test_what_takes_minutes_is_tried_where_it_is_asked_for():
    report, _, _ = examined("half", "minutes")
    assert [one.suspect.name for one in report.findings] == ["half"]
    assert report.untried == ("minutes",) == tuple(report.as_dict()["untried"])
    report, _, _ = examined("half", "minutes", only=("minutes",))
    assert [one.suspect.name for one in report.findings] == ["minutes"]
    assert report.untried == ()


def test_what_is_of_code_is_no_setting():
    """What changes the training is none that is written, either."""
    gain = Gain(1.5, 1.4, 1.6, pairs=5)
    made = [
        Suspect("a", "", "", {"data.num_workers": "auto"}),
        Suspect("b", "", "", {"quiet": True}, fix="print less"),
        Suspect("c", "", "", {"data.bucketing": True}, changes_training=True),
        Suspect("d", "", "", {"save_steps": 9}, note="older"),
    ]
    findings = tuple(Slowdown(one, gain) for one in made)
    report = report_of(findings)
    assert report.settings == {"data.num_workers": "auto", "save_steps": 9}
    assert report.changes == report.settings | {"quiet": True}
    assert report.left == ["print less", "`data.bucketing: true`"]
    assert report.notes == ["`save_steps: 9` (older)"]


def test_all_measured_steps_are_added_up():
    report, patient, _ = examined("nothing")
    assert report.trained_s == pytest.approx(10.0 * len(patient.log))
    assert 0 < report.seconds < 60
    begun_s = time.perf_counter() - 100.0
    assert 100 < examine(Known(()), say=print, begun_s=begun_s).seconds < 160


def test_remarks_are_those_of_the_patient_in_the_end():
    assert examined("half")[0].remarks == (
        Remark("between", "half"),
        Remark("loop", "told by the finding of that name"),
    )
    assert [one.name for one in examined("loop")[0].remarks] == ["between"]


def test_a_machine_that_does_something_else_is_told_of():
    """Windows of the same setting take one and two seconds."""
    remarks = examined("nothing", noise=(1.0, 1.0, 1.0, 2.0, 2.0, 1.0, 1.0))[0].remarks
    assert remarks[-1].name == "spread" and "does something else" in remarks[-1].text
    assert "spread" not in {one.name for one in examined("nothing", noise=(1.0, 1.05))[0].remarks}


def test_a_report_as_json():
    report = examined("half", "nothing", "wrong")[0].as_dict()
    (finding,) = report["findings"]
    assert finding["name"] == "half" and finding["changes"] == {"half": True}
    assert finding["gain_low"] == finding["gain"] == pytest.approx(2.0)
    assert report["cleared"] == {"nothing": pytest.approx(1.0)}
    assert report["input_share"] == 0.5  # as it was
    assert report["unlike"] == {"wrong": "its loss"}
    assert report["remarks"][0] == {"name": "between", "text": "half"} and report["operations"] == 7
