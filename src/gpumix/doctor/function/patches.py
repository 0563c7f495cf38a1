"""Puts functions in the place of others, for as long as a window lasts; and tells whose line of
code called one of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

_PACKAGE = str(Path(__file__).parents[2])
_STANDARD = (f"{sys.base_prefix}/lib/python", "<frozen", "<string>", "<eval_with_key>")
_PACKAGES = ("site-packages", "dist-packages")
_TORCH = tuple(f"{folder}/torch/" for folder in _PACKAGES)
UNKNOWN = "a library"


class Patches(ExitStack):
    """Undoes them all when it is left, the last one first."""

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> Any:
        """`owner.name` becomes `make(what it was)`; returns what it was."""
        own = name in vars(owner)
        before = getattr(owner, name)
        made = make(before)
        setattr(owner, name, made)

        def undo() -> None:
            if own:
                setattr(owner, name, before)
            else:
                delattr(owner, name)

        self.callback(undo)
        return before

    def replace_everywhere(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """As `replace`, and so in all modules that have imported it by name."""
        before = self.replace(owner, name, make)
        made = getattr(owner, name)
        for module in list(sys.modules.values()):
            for other, value in list(vars(module).items()) if hasattr(module, "__dict__") else ():
                if value is before and module is not owner:
                    self.replace(module, other, lambda _: made)


def calling_line() -> str:
    """file:line of the innermost frame of code that no library has."""
    return _line((*_STANDARD, *_PACKAGES), ())


def own_line() -> str:
    """The same, but for what another library than torch does by itself."""
    return _line((*_STANDARD, *_TORCH), _PACKAGES)


def _line(passed: tuple[str, ...], ends: tuple[str, ...]) -> str:
    """The innermost frame that is in no file that is `passed`, unless it is one that ends it."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_PACKAGE) and not any(part in name for part in passed):
            its = not any(part in name for part in ends)
            return f"{_short(name)}:{frame.f_lineno}" if its else UNKNOWN
        frame = frame.f_back  # type: ignore[assignment]
    return UNKNOWN


@cache
def _short(name: str) -> str:
    """As it is seen from here."""
    path = Path(name)
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else name
