"""Terminals for people. Only printable text reaches a terminal, whoever wrote it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Timer
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.text import Text

from gpumix.schema.untrusted_text import escape_invisible

NO_WRAP_COLUMNS = 10_000  # columns; wider than any table
PATIENCE_S = 0.5  # of silence that nobody takes for a hang
_spinning: ContextVar[Console | None] = ContextVar("spinning", default=None)


def get_stderr_console() -> Console:
    """Return the console for people; stdout is for data. A run continues when nobody reads any
    more."""
    console = _LiteralConsole(stderr=True)
    # Files and pipes have no width to fit into.
    return console if console.is_terminal else _LiteralConsole(stderr=True, width=NO_WRAP_COLUMNS)


def get_stdout_console() -> Console:
    """Return the console for redrawn views of a run."""
    return _LiteralConsole(stderr=False)


def get_result_console() -> Console:
    """Return the console for results, on stdout."""
    console = get_stdout_console()
    return console if console.is_terminal else _LiteralConsole(stderr=False, width=NO_WRAP_COLUMNS)


@contextmanager
def show_waiting(what: str) -> Iterator[None]:
    """Show a spinner on a terminal, with the seconds so far, while the body runs for longer than
    `PATIENCE_S`; elsewhere show nothing. Lines printed meanwhile appear above it. Other processes
    must not print there. Inside another spinner there is no second one."""
    console = get_stderr_console()
    if not console.is_terminal or _spinning.get() is not None:
        yield
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    progress = Progress(*columns, console=console, transient=True)
    progress.add_task(what)
    timer = Timer(PATIENCE_S, progress.start)
    timer.daemon = True
    timer.start()
    before = _spinning.set(console)
    try:
        yield
    finally:
        _spinning.reset(before)
        timer.cancel()
        timer.join()
        progress.stop()


class _LiteralConsole(Console):
    """Console printing strings literally: no markup in brackets, control characters escaped."""

    def __init__(self, *, stderr: bool, width: int | None = None) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False, width=width)

    def print(self, *objects: Any, **how: Any) -> None:
        spinning = _spinning.get()
        if spinning is None or not self.stderr:
            super().print(*objects, **how)
        else:
            Console.print(spinning, *objects, **how)

    def render_str(self, text: str, **how: Any) -> Text:
        """Escape text before measuring, for tables."""
        return super().render_str(escape_invisible(text), **how)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # Control segments are rich's own: to clear a line, to move the cursor.
            yield (
                segment
                if segment.control
                else segment._replace(text=escape_invisible(segment.text))
            )

    def on_broken_pipe(self) -> None:
        """Become quiet; by default the process ends."""
        self.quiet = True
