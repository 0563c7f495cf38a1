"""Terminals, where gpumix talks to people. Only printable text reaches them, whoever wrote it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from gpumix.spec.words import printable

NO_WRAP = 10_000  # columns; wider than any table


def stderr() -> Console:
    """Where gpumix talks; stdout is for data. A run goes on when nobody listens any more."""
    console = _Console(stderr=True)
    # In a file or a pipe there is no width to fit into.
    return console if console.is_terminal else _Console(stderr=True, width=NO_WRAP)


def stdout() -> Console:
    """For pictures of how a run stands, which are redrawn."""
    return _Console(stderr=False)


class _Console(Console):
    """Strings are shown as they are: those of others may hold brackets, which are no markup, and
    what a terminal would obey, which is written out."""

    def __init__(self, *, stderr: bool, width: int | None = None) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False, width=width)

    def render_str(self, text: str, **how: Any) -> Text:
        """Written out before it is measured, for tables."""
        return super().render_str(printable(text), **how)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # Those of control are rich's own: to clear a line, to move the cursor.
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def on_broken_pipe(self) -> None:
        """By default this ends the process."""
        self.quiet = True
