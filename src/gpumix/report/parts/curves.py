"""Curves of loss and throughput over the steps, with events marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpumix.report import words
from gpumix.report.draw import Shape, choose_ticks, draw_label, draw_legend, percent
from gpumix.report.facts import RunFacts
from gpumix.report.html import Markup, el
from gpumix.report.parts.section import render_remark, render_section

HEIGHT, AXIS_HEIGHT = 190, 22  # pixels of the curve, and of the step axis
POINTS = 400  # positions of a curve, each showing minimum and maximum
HOVERS = 100
MARGIN_SHARE = 0.06  # margin above and below, as fraction of the range

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class CurveLine:
    """A curve, or dots, with a class of the style sheet."""

    points: Points
    class_: str
    name: str
    shape: Shape = "line"


def render_curves(facts: RunFacts) -> Markup:
    history = facts.run.history
    if not history.steps:
        return render_section(
            facts, "curves", "Loss and throughput", render_remark("No step was done yet.")
        )
    losses = [(one.step, one.loss) for one in history.steps]
    held_out = [(one.step, one.loss) for one in history.evaluations]
    lines = [CurveLine(losses, "line-main", "training loss")]
    lines += [CurveLine(held_out, "line-dot", "held-out loss", "dot")] if held_out else []
    return render_section(
        facts,
        "curves",
        "Loss and throughput",
        el(
            "div",
            _chart("Loss", lines, facts, from_zero=False),
            _chart("Tokens a second", _speeds(facts), facts, from_zero=True),
            class_="charts",
        ),
        [
            render_remark(f"{told}.")
            for told in (history.thinning_note, history.unread_note)
            if told
        ],
    )


def _speeds(facts: RunFacts) -> list[CurveLine]:
    steps = facts.run.history.steps
    answer = facts.answer
    lines = [CurveLine([(one.step, one.tokens_per_s) for one in steps], "line-main", "this run")]
    for speed, class_, name in (
        (answer.predicted, "line-predicted", "predicted"),
        (answer.even, "line-even", f"even split, {answer.even.source}"),
    ):
        if speed.tokens_per_s:
            ends = [(steps[0].step, speed.tokens_per_s), (steps[-1].step, speed.tokens_per_s)]
            lines.append(CurveLine(ends, class_, name))
    return lines


def _chart(name: str, lines: Sequence[CurveLine], facts: RunFacts, *, from_zero: bool) -> Markup:
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    left, right = min(xs), max(xs)
    low, high = (0.0 if from_zero else min(ys)), max(ys)
    room = (high - low) * MARGIN_SHARE or abs(high) * MARGIN_SHARE or 1.0
    frame = _Frame(left, right, low if from_zero else low - room, high + room)
    last = lines[0].points[-1]
    title = (
        f"{name} over steps {left:.0f} to {right:.0f}; {words.format_number(last[1])} at the end"
    )
    return el(
        "figure",
        el("figcaption", f"{name}, by step"),
        draw_legend([(line.class_, line.name, line.shape) for line in lines]),
        el(
            "div",
            frame.left_axis(),
            el(
                "svg",
                el("title", title),
                frame.grid(),
                frame.events(facts),
                [frame.draw_line(line) for line in lines],
                frame.draw_hover_strips(lines[0]),
                frame.steps(),
                role="img",
                width="100%",
                height=HEIGHT + AXIS_HEIGHT,
            ),
            class_="chart",
        ),
    )


@dataclass(frozen=True)
class _Frame:
    """Visible range of a chart, and positions in it."""

    left: float
    right: float
    low: float
    high: float

    def x(self, value: float) -> float:
        return (value - self.left) / (self.right - self.left) if self.right > self.left else 0.5

    def y(self, value: float) -> float:
        return HEIGHT * (1 - (value - self.low) / (self.high - self.low))

    def left_axis(self) -> Markup:
        marks = choose_ticks(self.low, self.high, 4)
        words_of = (
            el("text", f"{value:,.6g}", x=46, y=self.y(value) + 4, text_anchor="end")
            for value in marks
        )
        return el(
            "svg",
            words_of,
            width=50,
            height=HEIGHT + AXIS_HEIGHT,
            class_="axis",
            aria_hidden="true",
        )

    def grid(self) -> list[Markup]:
        return [
            el("line", x1="0%", x2="100%", y1=self.y(v), y2=self.y(v), class_="grid")
            for v in choose_ticks(self.low, self.high, 4)
        ]

    def steps(self) -> list[Markup]:
        marks = [v for v in choose_ticks(self.left, self.right, 5) if v == int(v)] or [self.left]
        return [draw_label(self.x(v), HEIGHT + 16, f"{v:,.0f}", class_="axis-word") for v in marks]

    def events(self, facts: RunFacts) -> list[Markup]:
        """Return a vertical line for each change of the run's course."""
        told = [one for one in facts.events if one.weight != "note" or one.event == "restart"]
        found = []
        for one in told[-200:]:
            at = percent(self.x(one.step))
            title = el("title", f"step {one.step}: {one.what}")
            line = el("line", title, x1=at, x2=at, y1=0, y2=HEIGHT, class_=f"event {one.weight}")
            found.append(line)
        return found

    def draw_line(self, line: CurveLine) -> Markup | list[Markup]:
        if line.shape == "dot":
            return [
                el(
                    "circle",
                    el("title", f"{line.name} {y:.4f} at step {x:.0f}"),
                    cx=percent(self.x(x)),
                    cy=round(self.y(y), 1),
                    r=4,
                    class_=line.class_,
                )
                for x, y in _thin_points(line.points)
            ]
        places = _thin_points(line.points)
        told = " ".join(f"{1000 * self.x(x):.1f},{self.y(y):.1f}" for x, y in places)
        # Stretched to the available width, with constant stroke width.
        return el(
            "svg",
            el("polyline", points=told, class_=line.class_, vector_effect="non-scaling-stroke"),
            viewBox=f"0 0 1000 {HEIGHT}",
            preserveAspectRatio="none",
            width="100%",
            height=HEIGHT,
        )

    def draw_hover_strips(self, line: CurveLine) -> list[Markup]:
        """Return strips showing the value under the pointer."""
        points = line.points[:: max(1, len(line.points) // HOVERS)]
        half = 0.5 / max(1, len(points))
        return [
            el(
                "rect",
                el(
                    "title",
                    f"step {x:,.0f}: {line.name} "
                    + (words.format_number(y) if y >= 10 else f"{y:.4f}"),
                ),
                x=percent(self.x(x) - half),
                y=0,
                width=percent(2 * half),
                height=HEIGHT,
                class_="hover",
            )
            for x, y in points
        ]


def _thin_points(points: Points) -> Points:
    """Reduce points to minimum and maximum per position, keeping all peaks."""
    if len(points) <= 2 * POINTS:
        return points
    found: list[tuple[float, float]] = []
    for place in range(POINTS):
        some = points[place * len(points) // POINTS : (place + 1) * len(points) // POINTS]
        ends = {min(some, key=lambda p: p[1]), max(some, key=lambda p: p[1])}
        found += sorted(ends)
    return found
