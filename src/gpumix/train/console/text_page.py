"""Pages of text in 80 columns: an answer, aligned rows without a frame, labelled lines.

They look the same on a terminal and in a file.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from math import floor, log10

from rich.text import Text

from gpumix.schema.units import show_seconds

COLUMNS = 80
INDENT = 11  # of the text behind a label such as "Needs"
GAP = 3  # between columns

Line = tuple[str, str]
"""Text of a line, and its style."""


def join_lines(lines: Iterable[Line]) -> Text:
    return Text("\n").join(Text(text, style=style) for text, style in lines)


def round_estimate(value: float, digits: int = 2) -> str:
    """Format a value with so many significant digits: with two, 6877 as '6,900', 38.12 as '38',
    0.512 as '0.51'."""
    if value <= 0 or value == float("inf"):
        return f"{value:g}"
    last = floor(log10(value)) + 1 - digits
    return f"{round(value, -last):,.{max(0, -last)}f}"


def round_seconds(seconds: float, digits: int = 2) -> str:
    """Format seconds with so many significant digits."""
    if seconds >= 100:
        return show_seconds(round(seconds, -1))
    if seconds >= 1:
        return f"{round_estimate(seconds, digits)} s"
    return f"{round_estimate(seconds * 1e3, digits)} ms"


def round_duration(seconds: float) -> str:
    """Format the estimated time of a run: '45 s', '12 min', '1 h 50 min', '5 d 3 h'."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return round_seconds(seconds)
    if minutes < 60:
        return f"{minutes} min"
    tens = round(minutes / 10)
    if tens < 24 * 6:
        return f"{tens // 6} h {tens % 6 * 10} min"
    hours = round(minutes / 60)
    return f"{hours // 24} d {hours % 24} h"


def place_at_ends(left: str, right: str) -> list[str]:
    """Return a line with two texts, the second at the right margin; two lines if there is no
    room."""
    gap = COLUMNS - len(left) - len(right)
    return [f"{left}{' ' * gap}{right}"] if gap >= 2 else [*wrap_line(left), right]


def align_rows(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Align cells in columns: those of the columns `left` to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        (" " * GAP)
        .join(
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        .rstrip()
        for row in rows
    ]


def wrap_line(text: str, indent: int = 0) -> list[str]:
    """Break a text into lines of at most `COLUMNS`, later ones indented."""
    return textwrap.wrap(
        text, COLUMNS, subsequent_indent=" " * indent, break_long_words=True, break_on_hyphens=False
    )


def iterate_labelled(
    label: str, text: str, style: str = "", *, indent: int = INDENT
) -> Iterator[Line]:
    """Yield a label and its text, wrapped behind the label."""
    yield from ((line, style) for line in wrap_line(f"{label.ljust(indent)}{text}", indent))


def iterate_commands(pairs: Sequence[tuple[str, str]]) -> Iterator[Line]:
    """Yield commands, each with its purpose: in columns, or where they are long, above it.
    Commands are not broken, to be copied."""
    width = max(len(command) for command, _ in pairs)
    if width + max(len(told) for _, told in pairs) + 4 <= COLUMNS:
        yield from ((f"  {command.ljust(width)}  {told}", "") for command, told in pairs)
        return
    for command, told in pairs:
        yield f"  {told}:", ""
        yield f"    {command}", ""
