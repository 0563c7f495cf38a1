"""Measurements against predictions, with the difference in words."""

from __future__ import annotations

from collections.abc import Callable

from gpumix.report.facts import ClassFacts, RunFacts
from gpumix.report.html import Child, Markup, el
from gpumix.report.parts.section import render_gap, render_remark, render_section, render_table
from gpumix.train.run_figures import words


def render_prediction_errors(facts: RunFacts) -> Markup:
    figures = facts.figures
    rows: list[list[Child]] = [
        [
            "step time",
            words.format_seconds(figures.step_s),
            words.format_seconds(figures.predicted_step_s),
            render_gap(figures) or words.UNKNOWN,
        ]
    ]
    for one in facts.classes:
        rows += _make_class_rows(one)
    return render_section(
        "compared",
        "Measured against predicted",
        render_table(
            "The run, and each GPU type",
            ["", "measured", "predicted", "measured is"],
            rows,
            numbers=1,
        ),
        render_remark(_note(facts)),
    )


def _row(
    what: str, measured: float | None, predicted: float | None, shown: Callable[[float | None], str]
) -> list[Child]:
    far = words.is_far_off(words.compute_gap(predicted, measured))
    told = words.describe_excess(predicted, measured)
    return [
        what,
        shown(measured),
        shown(predicted),
        el("span", told, class_="off" if far else None),
    ]


def _make_class_rows(one: ClassFacts) -> list[list[Child]]:
    name = one.device_class
    rows = [
        _row(f"{name}: memory", one.peak_bytes, one.planned_peak_bytes, words.format_bytes),
        _row(f"{name}: busy", one.busy_share, one.planned_busy_share, words.format_fraction),
        _row(f"{name}: MFU", one.mfu, one.planned_mfu, words.format_fraction),
    ]
    if (one.hfu, one.planned_hfu) != (one.mfu, one.planned_mfu):
        rows.append(_row(f"{name}: HFU", one.hfu, one.planned_hfu, words.format_fraction))
    return rows


def _note(facts: RunFacts) -> str:
    parts = [
        "Memory: the peak of the fullest GPU of each type.",
        "Busy: the part of a step spent computing.",
    ]
    known = [one for one in facts.classes if one.peak_source]
    if known:
        peaks = ", ".join(f"{one.device_class} {one.peak_source}" for one in known)
        parts.append(f"MFU: the part of the peak FLOP/s ({peaks}); HFU also counts recomputing.")
    else:
        parts.append("MFU and HFU are unknown: so are the peak FLOP/s.")
    return " ".join(parts)
