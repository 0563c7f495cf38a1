"""Display of training: a live table on a terminal, a line every few steps elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gpumix.cost.layout.causes import group_by_part
from gpumix.data.workers.autotune import Limit
from gpumix.schema.units import show_bytes, show_seconds
from gpumix.train.run_log.metrics import ClassRecord, RankRecord, RunLog, StepRecord
from gpumix.train.run_log.tables import EMULATED, new_table
from gpumix.train.run_log.terminal import get_stderr_console

ROWS = 8
SHARES = ("compute", "input", "communication", "copies", "other")
# Rows of memory; the allocator's reserved memory includes the part free for reuse.
MEMORY_ROWS = (
    ("memory", "peak_bytes"),
    ("planned", "planned_peak_bytes"),
    ("allocator", "reserved_bytes"),
)


class Display:
    """Display of a run, on the first rank only.

    Args:
        log: the run's numbers.
        every_steps: steps between printed lines without a terminal.
    """

    def __init__(self, log: RunLog, every_steps: int, console: Console | None = None) -> None:
        self._log = log
        self._every = every_steps
        self._console = console or get_stderr_console()
        self._rows: list[StepRecord] = []
        self._classes: list[ClassRecord] = []
        self._evaluation = ""
        self._live: Live | None = None

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live = Live(
                console=self._console, refresh_per_second=4, get_renderable=self._render
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def step(self, record: StepRecord) -> None:
        due = record.step % self._every == 0 or record.step in (1, self._log.steps)
        if due:
            self._rows = [*self._rows[-(ROWS - 1) :], record]
        if self._live is None and due:
            self._console.print(self._line(record))

    def classes(self, records: list[ClassRecord]) -> None:
        self._classes = records

    def evaluation(self, step: int, loss: float) -> None:
        self._evaluation = f"held-out loss {loss:.4f} at step {step}"
        self.say(self._evaluation)

    def say(self, line: str) -> None:
        """Print a permanent line."""
        self._console.print(line)

    def _line(self, record: StepRecord) -> str:
        busy = ", ".join(f"{c.device_class} {c.busy_share:.0%}" for c in self._classes)
        return (
            f"step {record.step}/{self._log.steps}  loss {record.loss:.4f}  "
            f"lr {record.learning_rate:.2e}  {self._log.tokens_per_s():.0f} tokens/s"
            + (f"  busy: {busy}" if busy else "")
        )

    def _render(self) -> RenderableType:
        predicted = self._log.predicted_step_s
        title = f"training; planned: {show_seconds(predicted)} a step" if predicted else "training"
        steps = Table(title=title, title_justify="left", title_style="bold", box=None)
        for column in ("step", "loss", "lr", "grad norm", "step time", "tokens/s"):
            steps.add_column(column, justify="right", min_width=7)
        for r in self._rows:
            steps.add_row(
                f"{r.step}/{self._log.steps}", f"{r.loss:.4f}", f"{r.learning_rate:.2e}",
                f"{r.gradient_norm:.3f}", show_seconds(r.step_s), f"{r.tokens_per_s:.0f}",
            )  # fmt: skip
        done = self._rows[-1].step if self._rows else 0
        bar = Table.grid()  # a bar by itself ends no line
        bar.add_row(ProgressBar(self._log.steps, done, width=50))
        parts: list[RenderableType] = [steps, bar]
        if self._classes:
            parts.append(self._class_table())
        if self._log.plan.emulated:
            parts.append(Text(EMULATED, style="yellow"))
        return Group(*parts)

    def _class_table(self) -> Table:
        table = Table(box=None)
        for column in ("class", "samples", "busy", "input", "MFU", "HFU", "memory", "planned"):
            table.add_column(column, justify="left" if column == "class" else "right")
        for c in self._classes:
            table.add_row(
                c.device_class, str(c.samples), f"{c.busy_share:.0%}",
                format_share(c.shares.input if c.shares else None),
                format_share(c.mfu), format_share(c.hfu),
                _format_bytes(c.peak_bytes), _format_bytes(c.planned_peak_bytes),
            )  # fmt: skip
        return table


def classes_table(classes: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return the final table of a summary's `classes`: a column per device class, for there are
    few."""
    table = new_table("what steps were spent on", "class", *(c["device_class"] for c in classes))
    shares = [one["shares"] or {} for one in classes]
    table.add_row("devices", *(str(one["devices"]) for one in classes))
    table.add_row("tokens/s each", *(f"{one['tokens_per_s']:.0f}" for one in classes))
    for name in SHARES:
        table.add_row(name, *(format_share(of_class.get(name)) for of_class in shares))
    for name in ("mfu", "hfu"):
        table.add_row(name.upper(), *(format_share(one[name]) for one in classes))
    for name, key in MEMORY_ROWS:
        if key == "reserved_bytes" and all(one.get(key) is None for one in classes):
            continue  # no device reserves memory
        table.add_row(name, *(_format_bytes(one[key]) for one in classes))
    notes = [Text(line, style="dim") for line in _iterate_notes(classes)]
    return Group(table, *notes)


def _iterate_notes(classes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the sources of peaks and the purposes of planned memory."""
    sources = {c["device_class"]: c["peak_source"] or "not known" for c in classes}
    yield f"peaks: {', '.join(f'{name} {source}' for name, source in sources.items())}"
    for one in classes:
        parts = group_by_part(one["planned_memory"]) if one["planned_memory"] else {}
        if measured := one["measured_memory"]:
            found = (
                f"{name} {show_bytes(size)}"
                + (f" ({show_bytes(parts[name])} planned)" if name in parts else "")
                for name, size in measured.items()
            )
            yield f"memory of {one['device_class']}: {', '.join(found)}"
        causes = sorted(one["planned_memory"].items(), key=lambda item: -item[1])
        told = (f"{cause} {show_bytes(size)}" for cause, size in causes if size)
        if one.get("retries"):
            yield (
                f"allocator of {one['device_class']}: gave memory back {one['retries']} times to "
                "get some, which stops the device; a smaller `memory` of the class leaves room"
            )
        if causes:
            yield f"planned memory of {one['device_class']}: {', '.join(told)}"


def format_share(value: float | None) -> str:
    """Format a fraction as a percentage."""
    return "unknown" if value is None else f"{value:.1%}"


def _format_bytes(n: int | None) -> str:
    return "unknown" if n is None else show_bytes(n)


def describe_input_bound_ranks(names: Sequence[str], records: Sequence[RankRecord]) -> str:
    """Return a text naming input-bound ranks and known causes, given by rank. Empty if no rank
    waits for data."""
    told = []
    for name, one in zip(names, records, strict=True):
        if one.starved_share is not None:
            short = f" ({one.input_limit})" if one.input_limit == Limit.CORES else ""
            told.append(f"{name} {one.starved_share:.0%}{short}")
    if not told:
        return ""
    return f"the run is input-bound: of each step stand idle for their data {', '.join(told)}"


def describe_first_reason(names: Sequence[str], whys: Iterable[str]) -> str:
    """Return the first rank with a reason against something, given reasons by rank, empty where
    there is none. Empty if no rank has one."""
    told = [f"{name}: {why}" for name, why in zip(names, whys) if why]
    more = f" (and {len(told) - 1} more)" if len(told) > 1 else ""
    return told[0] + more if told else ""


def describe_skipped_samples(names: Sequence[str], records: Sequence[RankRecord]) -> str:
    """Return a text on skipped unreadable samples by rank. Empty if there are none."""
    told = [f"{one.skipped} of {name}" for name, one in zip(names, records) if one.skipped]
    if not told:
        return ""
    return f"samples that could not be read, and were skipped: {', '.join(told)}"
