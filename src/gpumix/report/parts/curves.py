"""Curves of loss, throughput and utilization over the steps, with events marked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpumix.report.draw import (
    Shape,
    choose_ticks,
    draw_label,
    draw_legend,
    get_type_class,
    percent,
)
from gpumix.report.events import ShownEvent
from gpumix.report.facts import RunFacts
from gpumix.report.html import Markup, el
from gpumix.report.parts.section import render_remark, render_section
from gpumix.report.run import Run
from gpumix.train.run_figures import words
from gpumix.train.run_figures.history import Evaluation
from gpumix.train.run_log.metrics import StepRecord

HEIGHT, AXIS_HEIGHT = 190, 22  # pixels of the curve, and of the step axis
POINTS = 400  # positions of a curve, each showing minimum and maximum
HOVERS = 100
MARGIN_SHARE = 0.06  # margin above and below, as fraction of the range

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class CurveLine:
    """A curve, or dots, with a class of the style sheet, and the value that stands for it."""

    points: Points
    class_: str
    name: str
    value: str
    shape: Shape = "line"


def render_curves(facts: RunFacts) -> Markup:
    history = facts.run.history
    heading = "Loss, speed and utilization"
    if not history.steps:
        return render_section("curves", heading, render_remark("No step is done yet."))
    charts = [
        draw_chart("Loss", list(_losses(facts.run)), facts.events, from_zero=False),
        draw_chart("Tokens/s", _speeds(facts), facts.events, from_zero=True),
    ]
    busy = list(_utilization(facts))
    if busy:
        name = "GPU utilization: part of each step spent computing, %"
        charts.append(draw_chart(name, busy, facts.events, from_zero=True, top=100.0))
    return render_section(
        "curves",
        heading,
        el("div", charts, class_="charts"),
        [
            render_remark(f"{told}.")
            for told in (history.thinning_note, history.unread_note)
            if told
        ],
    )


def _losses(run: Run) -> Iterator[CurveLine]:
    steps, evaluations = run.history.steps, run.history.evaluations
    yield make_loss_line(steps, "line-measured", "training loss")
    if evaluations:
        yield make_loss_line(evaluations, "dot-measured", "validation loss", "dot")


def make_loss_line(
    losses: Sequence[StepRecord] | Sequence[Evaluation],
    class_: str,
    name: str,
    shape: Shape = "line",
) -> CurveLine:
    last = losses[-1]
    points = [(one.step, one.loss) for one in losses]
    return CurveLine(points, class_, name, f"{last.loss:.4f} at step {last.step:,}", shape)


def _speeds(facts: RunFacts) -> list[CurveLine]:
    steps, answer = facts.run.history.steps, facts.answer
    rate = words.format_number(answer.measured.tokens_per_s)
    points = [(one.step, one.tokens_per_s) for one in steps]
    lines = [CurveLine(points, "line-measured", "this run", f"{rate} in a median step")]
    for speed, class_, name in (
        (answer.predicted, "line-predicted", "predicted"),
        (answer.even, "line-even", f"even split, {answer.even.source}"),
    ):
        if speed.tokens_per_s:
            ends = [(steps[0].step, speed.tokens_per_s), (steps[-1].step, speed.tokens_per_s)]
            lines.append(CurveLine(ends, class_, name, words.format_number(speed.tokens_per_s)))
    return lines


def _utilization(facts: RunFacts) -> Iterator[CurveLine]:
    """Yield the busy share of each GPU type, at the end of each window of steps."""
    for place, one in enumerate(facts.classes):
        points = [
            (window.step, 100 * seen.busy_share)
            for window in facts.run.history.windows
            for seen in window.classes
            if seen.device_class == one.device_class
        ]
        if points:
            value = f"{words.format_fraction(one.busy_share)} over the run"
            shape: Shape = "line" if len(points) > 1 else "dot"
            class_ = f"{shape}-type {get_type_class(place)}"
            yield CurveLine(points, class_, one.device_class, value, shape)


def draw_chart(
    name: str,
    lines: Sequence[CurveLine],
    events: Sequence[ShownEvent],
    *,
    from_zero: bool,
    top: float | None = None,
) -> Markup:
    """Return curves over the steps, with a legend and events as vertical lines.

    Args:
        from_zero: the vertical axis begins at 0.
        top: its end; by default a little above the highest value.
    """
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    left, right = min(xs), max(xs)
    low, high = (0.0 if from_zero else min(ys)), max(ys)
    room = (high - low) * MARGIN_SHARE or abs(high) * MARGIN_SHARE or 1.0
    ceiling = high + room if top is None else top
    frame = _Frame(left, right, low if from_zero else low - room, ceiling)
    last = lines[0].points[-1]
    title = (
        f"{name} over steps {left:.0f} to {right:.0f}; {words.format_number(last[1])} at the end"
    )
    return el(
        "figure",
        el("figcaption", f"{name}, by step"),
        draw_legend([(one.class_, f"{one.name}, {one.value}", one.shape) for one in lines]),
        el(
            "div",
            frame.left_axis(),
            el(
                "svg",
                el("title", title),
                frame.grid(),
                frame.events(events),
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

    def events(self, events: Sequence[ShownEvent]) -> list[Markup]:
        """Return a vertical line for each change of the run's course."""
        told = [one for one in events if one.weight != "note" or one.event == "restart"]
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
