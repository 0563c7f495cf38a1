"""Temporary patches of functions during a window, and lookup of the user's calling line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import gpumix
from gpumix.hardware.host.replaced_attributes import replace_attributes

_PACKAGE = str(Path(gpumix.__file__).parent)
_STANDARD_LIBRARY_FILES = (
    f"{sys.base_prefix}/lib/python",
    "<frozen",
    "<string>",
    "<eval_with_key>",
)
_PACKAGES = ("site-packages", "dist-packages")
_TORCH = tuple(f"{folder}/torch/" for folder in _PACKAGES)
LIBRARY_LINE = "a library"


class Patches(ExitStack):
    """A stack of patches, undone on exit in reverse order."""

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> Any:
        """Set `owner.name` to `make(previous value)`; return the previous value."""
        before = getattr(owner, name)
        self.enter_context(replace_attributes(owner, **{name: make(before)}))
        return before

    def replace_everywhere(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace like `replace`, also in all modules with the function imported by name."""
        before = self.replace(owner, name, make)
        made = getattr(owner, name)
        for module in list(sys.modules.values()):
            for other, value in list(vars(module).items()) if hasattr(module, "__dict__") else ():
                if value is before and module is not owner:
                    self.replace(module, other, lambda _: made)


def find_user_line() -> str:
    """Return file:line of the innermost frame outside of libraries."""
    return _find_line((*_STANDARD_LIBRARY_FILES, *_PACKAGES), ())


def find_direct_user_line() -> str:
    """Return file:line as `find_user_line`, or `LIBRARY_LINE` in a library other than torch."""
    return _find_line((*_STANDARD_LIBRARY_FILES, *_TORCH), _PACKAGES)


def _find_line(passed: tuple[str, ...], ends: tuple[str, ...]) -> str:
    """Return the innermost frame outside of `passed` files, or `LIBRARY_LINE` for a file in
    `ends`."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_PACKAGE) and not any(part in name for part in passed):
            its = not any(part in name for part in ends)
            return format_line(name, frame.f_lineno) if its else LIBRARY_LINE
        frame = frame.f_back  # type: ignore[assignment]
    return LIBRARY_LINE


def is_user_file(name: str) -> bool:
    """Return whether a file is neither of a library nor of gpumix."""
    foreign = (*_STANDARD_LIBRARY_FILES, *_PACKAGES)
    return not name.startswith(_PACKAGE) and not any(part in name for part in foreign)


def format_line(name: str, number: int) -> str:
    """Return file:line, with a path relative to the working directory, if inside."""
    return f"{_shorten_path(name)}:{number}"


@cache
def _shorten_path(name: str) -> str:
    """Return a path relative to the working directory, if inside."""
    path = Path(name)
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else name
