"""One frame of a run's live view in a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gpumix.report import words
from gpumix.report.events import ShownEvent
from gpumix.report.facts import ClassFacts, RunFacts
from gpumix.report.page import SILENT_S, describe_state
from gpumix.train.run_log.tables import EMULATED, describe_estimates

EVENTS = 5
DEVICES, LEAST_DEVICES = 16, 2  # listed individually
FIXED_LINES = 22  # of a frame, without classes and devices
SEPARATOR = "  ·  "
NARROW_COLUMNS = 100  # terminal columns below which tables omit some columns
WIDE_ONLY_COLUMNS = ("HFU", "input", "planned", "of the limit")
STYLES = {"note": "", "change": "cyan", "trouble": "bold red"}
STATE_STYLES = {"failed": "bold red", "restarting": "red", "interrupted": "cyan"}


def render_frame(facts: RunFacts, *, width: int, height: int | None = None) -> RenderableType:
    """Return the content fitting `width` columns, and `height` lines if given."""
    devices = DEVICES
    if height is not None:
        devices = max(LEAST_DEVICES, min(DEVICES, height - FIXED_LINES - len(facts.classes)))
    parts: list[RenderableType] = [_title(facts), _render_progress(facts, width), *_speed(facts)]
    parts += [*_render_course(facts), _plan(facts)]
    parts += [Text(), _classes(facts, wide=width >= NARROW_COLUMNS)]
    if facts.run.history.ranks:
        parts += [Text(), _devices(facts, devices, wide=width >= NARROW_COLUMNS)]
    events = facts.events[-EVENTS:]
    if events:
        parts += [Text(), _events(events)]
    labels = list(_render_labels(facts))
    return Group(*parts, *([Text(), *labels] if labels else []))


def _title(facts: RunFacts) -> Text:
    run, progress = facts.run, facts.run.progress
    line = Text(run.folder.resolve().name, style="bold")
    line.append("  ").append(describe_state(progress), STATE_STYLES.get(progress.state, "green"))
    if progress.live and progress.silent_s() > SILENT_S:
        line.append(f"  nothing heard for {words.format_seconds(progress.silent_s())}", "yellow")
    if progress.why:
        line.append(f"\n{progress.why}", STATE_STYLES.get(progress.state, ""))
    return line


def _render_progress(facts: RunFacts, width: int) -> RenderableType:
    progress = facts.run.progress
    told = words.format_progress(progress.step, progress.steps)
    if not progress.steps:
        return Text(told, style="" if progress.step else "dim")
    if progress.live and progress.remaining_s:
        told += f", {words.format_seconds(progress.remaining_s)} left"
    row = Table.grid(padding=(0, 2))
    row.add_row(ProgressBar(progress.steps, progress.step, width=max(10, width - 48)), told)
    return row


def _speed(facts: RunFacts) -> Iterator[Text]:
    progress, answer = facts.run.progress, facts.answer
    losses = []
    if progress.loss is not None:
        losses.append(f"loss {progress.loss:.4f}")
    if facts.run.history.evaluations:
        last = facts.run.history.evaluations[-1]
        losses.append(f"held-out {last.loss:.4f} at step {last.step:,}")
    if losses:
        yield Text(SEPARATOR.join(losses))
    now = progress.tokens_per_s or answer.predicted.tokens_per_s
    source = "measured" if progress.tokens_per_s else "predicted"
    parts = [f"{words.format_token_rate(now)} {source}"]
    if answer.speedup_over_even is not None:
        parts.append(
            f"{words.format_factor(answer.speedup_over_even)} an even split ({answer.even.source})"
        )
    if answer.fraction_of_ideal is not None:
        parts.append(f"{answer.fraction_of_ideal:.0%} of ideal")
    yield Text(SEPARATOR.join(parts))


def _render_course(facts: RunFacts) -> Iterator[Text]:
    """Yield loss and speed over the steps so far."""
    steps = facts.run.history.steps
    if len(steps) > 1:
        line = Text("loss ", "dim").append(
            words.draw_sparkline([one.loss for one in steps]), "cyan"
        )
        line.append("  tokens/s ", "dim")
        counted = facts.run.history.counted()
        yield line.append(words.draw_sparkline([one.tokens_per_s for one in counted]), "cyan")


def _plan(facts: RunFacts) -> Text:
    plan = facts.run.plan
    stages = f", {len(plan.stages)} stages ({plan.schedule})" if len(plan.stages) > 1 else ""
    teams = ", teams" if plan.in_teams else ""
    expected = plan.prediction
    took = "" if expected is None else f", planned {words.format_seconds(expected.step_s)} a step"
    now = facts.run.progress.step_s
    took += f", takes {words.format_seconds(now)}" if now else ""
    if expected is not None and now:
        took += f" (predicted {words.format_error(expected.step_s, now)})"
    told = f"plan {plan.strategy}, ZeRO stage {plan.zero_stage}{stages}{teams}{took}"
    return Text(told, style="dim")


def _new_table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def _classes(facts: RunFacts, *, wide: bool) -> Table:
    rows = [dict(_class(facts, one)) for one in facts.classes_now]
    columns = [name for name in rows[0] if wide or name not in WIDE_ONLY_COLUMNS]
    table = _new_table(*columns)
    table.columns[0].overflow = "ellipsis"
    for row in rows:
        table.add_row(*(row[name] for name in columns))
    return table


def _class(facts: RunFacts, one: ClassFacts) -> Iterator[tuple[str, str]]:
    """Yield cells by column."""
    samples = [str(g.samples) for g in facts.groups if g.device_class == one.device_class]
    yield "class", one.device_class
    yield "devices", str(one.devices)
    yield "samples", ", ".join(dict.fromkeys(samples))  # of each stage
    yield "busy", words.format_fraction(one.busy_share)
    yield "MFU", words.format_fraction(one.mfu)
    yield "HFU", words.format_fraction(one.hfu)
    yield "input", words.format_fraction(one.shares.input if one.shares else None)
    yield "tokens/s", words.format_number(one.tokens_per_s)
    yield "memory", words.format_bytes(one.peak_bytes)
    yield "planned", words.format_bytes(one.planned_peak_bytes)
    yield "limit", words.format_bytes(one.memory_limit_bytes)
    bar = words.draw_gauge(one.peak_bytes, one.planned_peak_bytes, one.memory_limit_bytes)
    yield "of the limit", bar


def _devices(facts: RunFacts, most: int, *, wide: bool) -> RenderableType:
    ranks = facts.run.history.ranks
    columns = ["device", "busy", "MFU", "tokens/s", "memory"]
    table = _new_table(*columns, *(["sent a step", "others", "input"] if wide else []))
    for one in ranks[:most]:
        cells = [
            one.device,
            words.format_fraction(one.busy_share),
            words.format_fraction(one.mfu),
            words.format_number(one.tokens_per_s),
            words.format_bytes(one.peak_bytes),
        ]
        if wide:
            shares = one.shares
            cells.append(words.format_bytes(one.sent_bytes))
            cells.append(words.format_fraction(shares.communication if shares else None))
            cells.append(words.format_fraction(shares.input if shares else None))
        table.add_row(*cells)
    if len(ranks) <= most:
        return table
    return Group(table, Text(f"and {len(ranks) - most:,} more devices", style="dim"))


def _events(events: tuple[ShownEvent, ...]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("last events", overflow="fold")
    for one in events:
        said = Text().append(one.what, STYLES[one.weight])
        if one.why:
            said.append(f": {one.why}", style="dim")
        table.add_row(f"{one.step:,}", said)
    return table


def _render_labels(facts: RunFacts) -> Iterator[Text]:
    if facts.emulated:
        yield Text(EMULATED, style="yellow")
    if facts.estimated:
        yield Text(describe_estimates(facts.estimated), style="yellow")
