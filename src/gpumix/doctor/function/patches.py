"""Temporary patches of functions during a window, and lookup of the user's calling line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import gpumix

_PACKAGE = str(Path(gpumix.__file__).parent)
_STANDARD = (f"{sys.base_prefix}/lib/python", "<frozen", "<string>", "<eval_with_key>")
_PACKAGES = ("site-packages", "dist-packages")
_TORCH = tuple(f"{folder}/torch/" for folder in _PACKAGES)
UNKNOWN = "a library"


class Patches(ExitStack):
    """A stack of patches, undone on exit in reverse order."""

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> Any:
        """Set `owner.name` to `make(previous value)`; return the previous value."""
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
        """Replace like `replace`, also in all modules with the function imported by name."""
        before = self.replace(owner, name, make)
        made = getattr(owner, name)
        for module in list(sys.modules.values()):
            for other, value in list(vars(module).items()) if hasattr(module, "__dict__") else ():
                if value is before and module is not owner:
                    self.replace(module, other, lambda _: made)


def calling_line() -> str:
    """Return file:line of the innermost frame outside of libraries."""
    return _line((*_STANDARD, *_PACKAGES), ())


def own_line() -> str:
    """Return file:line as `calling_line`, or `UNKNOWN` in a library other than torch."""
    return _line((*_STANDARD, *_TORCH), _PACKAGES)


def _line(passed: tuple[str, ...], ends: tuple[str, ...]) -> str:
    """Return the innermost frame outside of `passed` files, or `UNKNOWN` for a file in `ends`."""
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
    """Return a path relative to the working directory, if inside."""
    path = Path(name)
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else name
