"""One frame of a run's live view in a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gpumix.report.events import ShownEvent
from gpumix.report.facts import RunFacts
from gpumix.report.page import SILENT_S, describe_state
from gpumix.train.console.tables import EMULATED, describe_estimates
from gpumix.train.run_figures import words
from gpumix.train.run_figures.advice import is_nothing
from gpumix.train.run_figures.terminal_parts import (
    SEPARATOR,
    render_advice,
    render_classes,
    render_speed,
)

EVENTS = 5
DEVICES, LEAST_DEVICES = 16, 2  # listed individually
FIXED_LINES = 26  # of a frame, without classes and devices
NARROW_COLUMNS = 100  # terminal columns below which the table of devices omits some columns
STYLES = {"note": "", "change": "cyan", "trouble": "bold red"}
STATE_STYLES = {"failed": "bold red", "restarting": "red", "interrupted": "cyan"}


def render_frame(facts: RunFacts, *, width: int, height: int | None = None) -> RenderableType:
    """Return the content fitting `width` columns, and `height` lines if given."""
    devices = DEVICES
    if height is not None:
        devices = max(LEAST_DEVICES, min(DEVICES, height - FIXED_LINES - len(facts.classes)))
    parts: list[RenderableType] = [_title(facts), _render_progress(facts, width), *_speed(facts)]
    if not is_nothing(facts.run.advice):
        parts.append(render_advice(facts.run.advice))
    parts += [*_render_course(facts), _plan(facts)]
    parts += [Text(), render_classes(facts.figures, width)]
    if facts.run.history.ranks:
        parts += [Text(), _devices(facts, devices, wide=width >= NARROW_COLUMNS)]
    events = facts.events[-EVENTS:]
    if events:
        parts += [Text(), _events(events)]
    labels = list(_render_labels(facts))
    return Group(*parts, *([Text(), *labels] if labels else []))


def _title(facts: RunFacts) -> Text:
    run, progress = facts.run, facts.run.progress
    line = Text(run.name, style="bold")
    line.append(f"{SEPARATOR}{run.model}" if run.model else "", "not bold").append("  ")
    line.append(describe_state(progress), STATE_STYLES.get(progress.state, "green"))
    if progress.live and progress.silent_s() > SILENT_S:
        line.append(f"  no news for {words.format_seconds(progress.silent_s())}", "yellow")
    if progress.why and progress.state == "restarting":  # else it is part of what to do
        line.append(f"\n{progress.why}", STATE_STYLES.get(progress.state, ""))
    return line


def _render_progress(facts: RunFacts, width: int) -> RenderableType:
    progress = facts.run.progress
    told = words.format_progress(progress.step, progress.steps)
    if not progress.steps:
        return Text(told, style="" if progress.step else "dim")
    left = words.format_remaining(facts.figures.remaining_s) if progress.live else ""
    told = ", ".join(filter(None, (told, left)))
    row = Table.grid(padding=(0, 2))
    row.add_row(ProgressBar(progress.steps, progress.step, width=max(10, width - 48)), told)
    return row


def _speed(facts: RunFacts) -> Iterator[Text]:
    progress, answer = facts.run.progress, facts.answer
    line = render_speed(facts.figures)
    if answer.speedup_over_even is not None:
        factor = words.format_factor(answer.speedup_over_even)
        line.append(f"{SEPARATOR}{factor} an even split ({answer.even.source})", "not bold")
    yield line
    losses = []
    if progress.loss is not None:
        losses.append(f"loss {progress.loss:.4f}")
    if facts.run.history.evaluations:
        last = facts.run.history.evaluations[-1]
        losses.append(words.format_validation_loss(last.loss, last.step))
    if losses:
        yield Text(SEPARATOR.join(losses))


def _render_course(facts: RunFacts) -> Iterator[Text]:
    """Yield loss and step time over the steps so far."""
    steps = facts.run.history.steps
    if len(steps) > 1:
        line = Text("loss ", "dim").append(
            words.draw_sparkline([one.loss for one in steps]), "cyan"
        )
        line.append("  tokens/s ", "dim")
        yield line.append(words.draw_sparkline([one.tokens_per_s for one in steps]), "cyan")


def _plan(facts: RunFacts) -> Text:
    plan = facts.run.plan
    stages = f", {len(plan.stages)} pipeline stages ({plan.schedule})" if plan.stages[1:] else ""
    groups = ", tensor-parallel groups" if plan.uses_tensor_parallel else ""
    planned = "" if plan.prediction is None else words.format_seconds(plan.prediction.step_s)
    took = f", planned {planned} a step" if planned and facts.figures.step_s else ""
    told = f"plan {plan.strategy}, ZeRO stage {plan.zero_stage}{stages}{groups}{took}"
    return Text(told, style="dim")


def _devices(facts: RunFacts, most: int, *, wide: bool) -> RenderableType:
    """Return a table of each GPU in the last window of steps."""
    history = facts.run.history
    steps = words.format_steps(history.last_window_steps)
    columns = [f"GPU, last {steps}" if steps else "GPU", "busy", "MFU", "tokens/s", "memory"]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for number, column in enumerate([*columns, *(["sent a step", "waits"] if wide else [])]):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for one in history.ranks[:most]:
        cells = [
            one.device,
            words.format_fraction(one.busy_share),
            words.format_fraction(one.mfu),
            words.format_number(one.tokens_per_s),
            words.format_bytes(one.peak_bytes),
        ]
        if wide:
            cells.append(words.format_bytes(one.sent_bytes))
            shares = one.shares
            waits = None if shares is None else shares.communication + shares.input
            cells.append(words.format_fraction(waits))
        table.add_row(*cells)
    if len(history.ranks) <= most:
        return table
    return Group(table, Text(f"and {len(history.ranks) - most:,} more GPUs", style="dim"))


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
