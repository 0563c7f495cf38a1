"""Checks of untrusted text on the way to terminals, scripts and commands.

A file from anybody may name a host `-oProxyCommand=...`, or a device with a terminal escape
sequence. Terminals get printable text only, scripts a single word, commands no option. Host and
device names are checked when files become values (`schema.cluster.cluster`), so later code needs no
checks. Pages are escaped separately (`report.html`).
"""

from __future__ import annotations

import re
from typing import Any

# Words valid for ssh, schedulers and shells; a leading - would make an option.
_HOST = re.compile(r"(?!-)[A-Za-z0-9_.-]{1,253}")
MOST_LETTERS = 200
_DIRECTIVE = re.compile(r"[A-Za-z0-9_.,:@%=+/\[\]-]+")


def escape_invisible(text: str, *, lines: bool = True) -> str:
    """Escape invisible characters: control characters, which command a terminal, and characters
    changing the order of letters or without width.

    Args:
        lines: allow line breaks and indentation.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text)


def check_displayed_name(text: str) -> str:
    """Return a displayed name; raise ValueError if it has invisible characters, or is too long."""
    if not text.isprintable():
        raise ValueError(
            f"'{escape_invisible(text, lines=False)}' holds what cannot be seen: leave it out"
        )
    if len(text) > MOST_LETTERS:
        raise ValueError(f"a name may have {MOST_LETTERS} letters, this has {len(text)}")
    return text


def check_host_name(name: str) -> str:
    """Return a host name for ssh and schedulers; raise ValueError if it is none."""
    if not _HOST.fullmatch(name):
        raise ValueError(
            f"'{escape_invisible(name, lines=False)}' names no host: letters, digits, '.', '_' and "
            "'-' make a name, which does not begin with '-'"
        )
    return name


def format_sbatch_option(name: str, value: Any) -> str:
    """Return an `sbatch` option for a script comment, where neither shell nor quotes protect
    values.

    Raises:
        ValueError: the value is not a single word.
    """
    text = str(value)
    if not _DIRECTIVE.fullmatch(text) or text.startswith("-"):
        raise ValueError(f"{name} cannot be '{escape_invisible(text, lines=False)}'")
    return f"#SBATCH --{name}={text}"
