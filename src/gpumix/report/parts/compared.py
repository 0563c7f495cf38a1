"""Predictions against measurements, with the error of each prediction."""

from __future__ import annotations

from collections.abc import Callable

from gpumix.report import words
from gpumix.report.facts import ClassFacts, RunFacts
from gpumix.report.html import Markup
from gpumix.report.parts.section import render_remark, render_section, render_table


def render_prediction_errors(facts: RunFacts) -> Markup:
    answer = facts.answer
    rows = [
        _row("step time", answer.predicted.step_s, answer.measured.step_s, words.format_seconds),
        _row(
            "tokens/s",
            answer.predicted.tokens_per_s,
            answer.measured.tokens_per_s,
            words.format_number,
        ),
    ]
    for one in facts.classes:
        rows += _make_class_rows(one)
    return render_section(
        facts,
        "compared",
        "Predicted against measured",
        render_table(
            "The run, and each class of devices; by how much the prediction is off",
            ["what", "predicted", "measured", "off by"],
            rows,
            numbers=1,
        ),
        render_remark(_note(facts)),
    )


def _row(
    what: str, predicted: float | None, measured: float | None, shown: Callable[[float | None], str]
) -> list[str]:
    return [what, shown(predicted), shown(measured), words.format_error(predicted, measured)]


def _make_class_rows(one: ClassFacts) -> list[list[str]]:
    name = one.device_class
    return [
        _row(f"{name}: memory", one.planned_peak_bytes, one.peak_bytes, words.format_bytes),
        _row(f"{name}: busy", one.planned_busy_share, one.busy_share, words.format_fraction),
        _row(f"{name}: MFU", one.planned_mfu, one.mfu, words.format_fraction),
        _row(f"{name}: HFU", one.planned_hfu, one.hfu, words.format_fraction),
    ]


def _note(facts: RunFacts) -> str:
    peaks = {one.device_class: one.peak_source or "not known" for one in facts.classes}
    told = ", ".join(f"{name} {source}" for name, source in peaks.items())
    return (
        "Memory is the peak of the fullest device of a class; busy, MFU and HFU are means over its "
        f"devices and the whole run. MFU and HFU are parts of each class's peak ({told})."
    )
