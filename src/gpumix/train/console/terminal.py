"""Terminals for people. Only printable text reaches a terminal, whoever wrote it."""

from __future__ import annotations

import re
import sys
import textwrap
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
_LABEL = re.compile(r"^ *(?:(?:why|fix): )?")  # of a line of an error
_KEPT_SPACE = "\0"  # in text that is not broken; escaped in errors
# A text in backticks; or a command, or an option, with the words that belong to it: options and
# their values, and words with characters that prose does not have.
_COPIED = re.compile(
    r"`[^`]*`"
    r"|\b(?:torchrun|(?:gpumix|pip) [a-z]+)\b(?: (?:--?[a-z][\w-]*(?: [^\s,;-][^\s,;]*)?"
    r"|gpumix [a-z]+|train|[^\s,;]*[A-Z0-9./=\[\"'…][^\s,;]*))*"
    r"|(?<!\S)--[a-z][\w-]* [^\s,;]+"
)
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
    if not console.is_interactive or _spinning.get() is not None:
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


def print_error(text: str) -> None:
    """Print an error on stderr; on a terminal, wrapped at its width.

    Raises:
        OSError: the reader is gone.
    """
    console = get_stderr_console()
    shown = wrap_error(text, console.width) if console.is_terminal else text
    sys.stderr.write(f"{shown}\n")


def wrap_error(text: str, columns: int) -> str:
    """Wrap the lines of an error, later ones indented. Commands, options with their values and
    texts in backticks are not broken, to be copied."""
    lines = (_wrap_error_line(line, columns) for line in text.split("\n"))
    return "\n".join(lines)


def _wrap_error_line(line: str, columns: int) -> str:
    label = _LABEL.match(line)
    assert label is not None, "it matches all lines"
    wrapped = textwrap.wrap(
        _COPIED.sub(lambda found: found[0].replace(" ", _KEPT_SPACE), line),
        columns,
        subsequent_indent=" " * max(2, len(label[0])),
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )
    return "\n".join(wrapped).replace(_KEPT_SPACE, " ")


class _LiteralConsole(Console):
    """Console printing strings literally: no markup in brackets, control characters escaped."""

    def __init__(self, *, stderr: bool, width: int | None = None) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False, width=width)
        # Logs of CI force colours; lines that are drawn again and again would pile up there.
        self.is_interactive = self.is_interactive and self.file.isatty()

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
