"""Parts of a run's terminal views: speed, advice and the table of GPU types. The table during
training, `gpumix top` and the final summary consist of them, and so show the same numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpumix.cost.memory_layout.memory_parts import group_by_part
from gpumix.schema.plan.plan import Plan
from gpumix.schema.units import show_bytes
from gpumix.train.run_figures import words
from gpumix.train.run_figures.advice import Advice
from gpumix.train.run_figures.figures import RunFigures
from gpumix.train.run_log.metrics import ClassRecord, fullest_by_class

SEPARATOR = "  ·  "
FAR_OFF_STYLE = "bold red"
# Columns left out of a narrow terminal, in this order.
DISPENSABLE = (
    "of the\nlimit",
    "allocator",
    "waits for\ndata",
    "HFU",
    "memory\nplanned",
    "tokens/s\neach",
    "MFU",
)
LONGEST_NAME = 24  # columns of the first column; it is cut if there is no room
GAP = 2  # columns between columns
MOST_ADVICE = 3


def render_speed(figures: RunFigures) -> Text:
    """Return tokens/s, step time and the distance from the plan; measured before predicted."""
    if not figures.tokens_per_s:
        planned = figures.predicted_step_s
        return Text(f"planned: {words.format_seconds(planned)} a step" if planned else "")
    line = Text(words.format_token_rate(figures.tokens_per_s), style="bold")
    line.append(f"{SEPARATOR}{words.format_seconds(figures.step_s)} a step", "not bold")
    if gap := words.describe_gap(figures.slower_than_planned):
        far = words.is_far_off(figures.slower_than_planned)
        line.append(SEPARATOR, "not bold").append(gap, FAR_OFF_STYLE if far else "not bold")
    return line


def render_advice(advice: Sequence[Advice], most: int = MOST_ADVICE) -> Table:
    """Return what to do next, with the commands for it."""
    table = Table.grid(padding=(0, 1))
    for number, one in enumerate(advice[:most]):
        text = Text(one.what, style=FAR_OFF_STYLE if one.urgent else "bold")
        text.append(f": {one.why}" if one.why else "", "not bold")
        table.add_row(Text("Next:" if number == 0 else "", style="bold"), text)
        if one.command:
            table.add_row("", Text(one.command, style="cyan", overflow="fold"))
    return table


def render_classes(figures: RunFigures, width: int) -> Table:
    """Return a table with a row for each GPU type, with the columns that fit."""
    classes = dict.fromkeys(worker.device_class for worker in figures.plan.workers)
    rows = [dict(_cells(figures, name)) for name in classes]
    columns = _choose_columns(rows, width)
    table = Table(box=None, padding=(0, GAP, 0, 0), header_style="dim")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    table.columns[0].overflow = "ellipsis"
    for row in rows:
        table.add_row(*(row[name] for name in columns))
    return table


def _choose_columns(rows: Sequence[Mapping[str, str]], width: int) -> list[str]:
    """Return the columns that are known and fit."""
    columns = list(rows[0])
    if all(row["allocator"] == words.UNKNOWN for row in rows):
        columns.remove("allocator")  # no device reserves memory
    for name in DISPENSABLE:
        if name in columns and sum(_measure(name, rows) for name in columns) > width:
            columns.remove(name)
    return columns


def _measure(name: str, rows: Sequence[Mapping[str, str]]) -> int:
    """Return the width of a column, with the gap behind it."""
    texts = [*name.split("\n"), *(row[name] for row in rows)]
    return min(max(map(len, texts)), LONGEST_NAME) + GAP


def _cells(figures: RunFigures, name: str) -> Iterator[tuple[str, str]]:
    """Yield the cells of a GPU type by column."""
    plan = figures.plan
    seen = {one.device_class: one for one in figures.classes}.get(name)
    fullest = fullest_by_class(plan).get(name)
    shares = None if seen is None else seen.shares
    planned = None if fullest is None else fullest.peak_bytes
    if seen is not None and seen.planned_memory:
        planned = sum(seen.planned_memory.values())  # of the splits in effect at the peak
    limit = None if fullest is None else fullest.memory_limit_bytes
    peak = None if seen is None else seen.peak_bytes
    count = sum(worker.device_class == name for worker in plan.workers)
    yield "GPUs", f"{count} × {name}"
    yield "samples", _count_samples(figures.plan_now, name)
    yield "busy", words.format_fraction(None if seen is None else seen.busy_share)
    yield (
        "waits for\nother GPUs",
        words.format_fraction(None if shares is None else shares.communication),
    )
    yield "waits for\ndata", words.format_fraction(None if shares is None else shares.input)
    yield "MFU", words.format_fraction(None if seen is None else seen.mfu)
    yield "HFU", words.format_fraction(None if seen is None else seen.hfu)
    yield "tokens/s\neach", words.format_number(None if seen is None else seen.tokens_per_s)
    yield "memory", words.format_bytes(peak)
    yield "allocator", words.format_bytes(None if seen is None else seen.reserved_bytes)
    yield "memory\nplanned", words.format_bytes(planned)
    yield "limit", words.format_bytes(limit)
    yield "of the\nlimit", words.draw_gauge(peak, planned, limit)


def _count_samples(plan: Plan, name: str) -> str:
    """Return the samples of a GPU type per step, in each stage that has some."""
    found = []
    for stage in plan.stages:
        own = [one for one in stage.leaders if one.device_class == name]
        if any(worker.device_class == name for worker in stage.workers):
            found.append(str(sum(worker.samples for worker in own)))
    return ", ".join(dict.fromkeys(found))


def render_summary(figures: RunFigures, advice: Sequence[Advice], width: int) -> RenderableType:
    """Return the end of a run: its speed, what to do next, and how each GPU type did."""
    head, last = render_speed(figures), figures.history.steps[-1]
    head.append(f"{SEPARATOR}loss {last.loss:.4f} after {last.step:,} steps", "not bold")
    parts: list[RenderableType] = [head, render_advice(advice), Text()]
    table = render_classes(figures, width)
    parts.append(table)
    shown = [str(column.header) for column in table.columns]
    parts += [Text(line, style="dim") for line in _iterate_notes(figures.classes, shown)]
    return Group(*parts)


def _iterate_notes(classes: Sequence[ClassRecord], columns: Sequence[str]) -> Iterator[str]:
    """Yield what columns mean, and memory as far as its causes are measured."""
    known = [one for one in classes if one.mfu is not None]
    if known and "MFU" in columns:
        sources = ", ".join(f"{one.device_class} {one.peak_source}" for one in known)
        more = "; HFU also counts recomputing" if "HFU" in columns else ""
        yield f"MFU: the part of the peak FLOP/s ({sources}){more}"
    for one in classes:
        planned = group_by_part(one.planned_memory) if one.planned_memory else {}
        parts = [
            f"{words.name_memory(name)} {show_bytes(size)}"
            + (f" (planned {show_bytes(planned[name])})" if name in planned else "")
            for name, size in one.measured_memory.items()
        ]
        if parts:
            yield f"memory of {one.device_class}: {', '.join(parts)}"
