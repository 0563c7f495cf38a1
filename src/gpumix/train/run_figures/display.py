"""Display of training: a live table on a terminal, a line every few steps elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gpumix.data.workers.autotune import Limit
from gpumix.schema.units import show_seconds
from gpumix.train.console.tables import EMULATED
from gpumix.train.console.terminal import get_stderr_console
from gpumix.train.run_figures import words
from gpumix.train.run_figures.advice import AdvisedRun, advise, is_nothing
from gpumix.train.run_figures.figures import RunFigures
from gpumix.train.run_figures.terminal_parts import render_advice, render_classes, render_speed
from gpumix.train.run_figures.writer import RunLog
from gpumix.train.run_log.metrics import RankRecord, StepRecord

ROWS = 8
MOST_ADVICE = 2
UNKNOWN_JOB = "JOB.yaml"  # ranks do not know where the job was read


class Display:
    """Display of a run, on the first rank only.

    Args:
        log: the run's records and figures.
        every_steps: steps between printed lines without a terminal.
        title: names the run and its model.
    """

    def __init__(
        self, log: RunLog, every_steps: int, title: str, console: Console | None = None
    ) -> None:
        self._log = log
        self._every = every_steps
        self._title = title
        self._console = console or get_stderr_console()
        self._rows: list[StepRecord] = []
        self._figures: RunFigures = log.figures
        self._validation = ""
        self._live: Live | None = None

    def __enter__(self) -> Display:
        if self._console.is_interactive:
            self._live = Live(
                console=self._console, refresh_per_second=4, get_renderable=self._render
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def step(self, record: StepRecord) -> None:
        """Show a step that is in the log, and the figures with it."""
        self._figures = self._log.figures
        due = record.step % self._every == 0 or record.step in (1, self._log.steps)
        if due:
            self._rows = [*self._rows[-(ROWS - 1) :], record]
        if self._live is None and due:
            self._console.print(self._line(record))

    def evaluation(self, step: int, loss: float) -> None:
        self._validation = words.format_validation_loss(loss, step)
        self.say(self._validation)

    def say(self, line: str) -> None:
        """Print a permanent line."""
        self._console.print(line)

    def _line(self, record: StepRecord) -> str:
        figures = self._figures
        busy = ", ".join(
            f"{one.device_class} {words.format_fraction(one.busy_share)}" for one in figures.classes
        )
        left = words.format_remaining(figures.remaining_s)
        return (
            f"step {record.step}/{self._log.steps}  loss {record.loss:.4f}  "
            f"lr {record.learning_rate:.2e}  {words.format_token_rate(figures.tokens_per_s)}"
            + (f"  {left}" if left else "")
            + (f"  busy: {busy}" if busy else "")
        )

    def _render(self) -> RenderableType:
        figures = self._figures
        steps = Table(box=None)
        for column in ("step", "loss", "lr", "grad norm", "step time"):
            steps.add_column(column, justify="right", min_width=7)
        for r in self._rows:
            steps.add_row(
                f"{r.step}/{self._log.steps}", f"{r.loss:.4f}", f"{r.learning_rate:.2e}",
                f"{r.gradient_norm:.3f}", show_seconds(r.step_s),
            )  # fmt: skip
        title = Text(self._title, style="bold").append("\n")
        headline = title.append_text(render_speed(self._figures))
        parts: list[RenderableType] = [headline, steps, self._progress()]
        if self._validation:
            parts.append(Text(self._validation))
        advice = advise(AdvisedRun(figures, job=UNKNOWN_JOB))
        parts += [] if is_nothing(advice) else [render_advice(advice, MOST_ADVICE)]
        if figures.classes:
            parts.append(render_classes(figures, self._console.width))
        if self._log.plan.emulated:
            parts.append(Text(EMULATED, style="yellow"))
        return Group(*parts)

    def _progress(self) -> Table:
        done, row = self._log.done, Table.grid(padding=(0, 2))
        told = words.format_progress(done, self._log.steps)
        left = words.format_remaining(self._figures.remaining_s)
        row.add_row(
            ProgressBar(self._log.steps, done, width=50),
            ", ".join(filter(None, (told, left))),
        )
        return row


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
    return f"the run is input-bound: GPUs wait for data, in parts of each step: {', '.join(told)}"


def describe_first_reason(names: Sequence[str], whys: Iterable[str]) -> str:
    """Return the first rank with a reason against something, given reasons by rank, empty where
    there is none. Empty if no rank has one."""
    told = [f"{name}: {why}" for name, why in zip(names, whys) if why]
    more = f" (and {len(told) - 1} more)" if len(told) > 1 else ""
    return told[0] + more if told else ""


def describe_skipped_samples(names: Sequence[str], skipped: Sequence[int]) -> str:
    """Return a text on skipped unreadable samples by rank. Empty if there are none."""
    told = [f"{count} of {name}" for name, count in zip(names, skipped) if count]
    if not told:
        return ""
    return f"samples that could not be read, and were skipped: {', '.join(told)}"
