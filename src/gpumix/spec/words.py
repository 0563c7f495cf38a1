"""The one door for words of others: on their way to terminals, scripts and commands.

A file that anybody wrote may name a host `-oProxyCommand=...`, or a device with an order to the
terminal in its name. To a terminal goes printable text only, to a script one word, to a command no
option. Names of hosts and devices are checked where files become values (`spec.cluster`), so that
what follows needs no rule of its own. Pages have their own door, which escapes (`report.html`).
"""

from __future__ import annotations

import re
from typing import Any

# Words for ssh, schedulers and shells alike; with - first it would be an option.
_HOST = re.compile(r"(?!-)[A-Za-z0-9_.-]{1,253}")
MOST_LETTERS = 200
_DIRECTIVE = re.compile(r"[A-Za-z0-9_.,:@%=+/\[\]-]+")


def printable(text: str, *, lines: bool = True) -> str:
    """A text with all that is not seen written out: control characters, which are orders to a
    terminal, and those that change the order of letters, or have no width.

    Args:
        lines: whether lines may break and be indented.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text)


def check_seen(text: str) -> str:
    """A name that people read.

    Raises:
        ValueError: some of it is not seen, or it is too long.
    """
    if not text.isprintable():
        raise ValueError(
            f"'{printable(text, lines=False)}' holds what cannot be seen: leave it out"
        )
    if len(text) > MOST_LETTERS:
        raise ValueError(f"a name may have {MOST_LETTERS} letters, this has {len(text)}")
    return text


def check_host(name: str) -> str:
    """A host as ssh and schedulers are told it.

    Raises:
        ValueError: it is none.
    """
    if not _HOST.fullmatch(name):
        raise ValueError(
            f"'{printable(name, lines=False)}' names no host: letters, digits, '.', '_' and '-' "
            "make a name, which does not begin with '-'"
        )
    return name


def directive(name: str, value: Any) -> str:
    """An option of `sbatch` in a script's comment, which no shell and no quotes keep together.

    Raises:
        ValueError: the value is no single word.
    """
    text = str(value)
    if not _DIRECTIVE.fullmatch(text) or text.startswith("-"):
        raise ValueError(f"{name} cannot be '{printable(text, lines=False)}'")
    return f"#SBATCH --{name}={text}"
