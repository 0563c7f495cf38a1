"""Calls what a job names as `module:function`, with errors that point at the name."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from gpumix.spec.errors import InputError


def call_factory(
    reference: str, arguments: Mapping[str, Any], folder: Path, *, key: str = ""
) -> Any:
    """The result of `reference` ("module:function") called with `arguments` as keywords. `key` is
    where these stand in the job.

    `folder`, the job's, or where a script is started, goes to the front of sys.path and stays
    there: the module may import its neighbours at any later time. What the factory itself raises
    passes through, with its traceback.

    Raises:
        InputError: the module, the function or an argument of it does not exist.
    """
    module_name, _, name = reference.partition(":")
    place = str(folder.absolute())
    if place not in sys.path:
        sys.path.insert(0, place)
    function = _attribute(_module(module_name, folder), name)
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise InputError(
            f"'{reference}' cannot be called with the given arguments: {error}",
            where=key,
            why=f"it takes {inspect.signature(function)}",
            fix=f"--set {key}={{name: value}}" if key else "",
        ) from error
    return function(**arguments)


def _module(name: str, folder: Path) -> ModuleType:
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise InputError(f"module '{name}' cannot be imported: {error}") from error
        there = [module.name for module in pkgutil.iter_modules([str(folder)])]
        raise InputError(
            f"there is no module '{error.name}'",
            where=str(folder),
            why=_nearest(name, there),
            fix="modules are looked for in this folder and among the installed packages",
        ) from error
    except (ImportError, SyntaxError) as error:
        raise InputError(f"module '{name}' cannot be imported: {error}") from error


def _attribute(module: ModuleType, name: str) -> Callable[..., Any]:
    found: Callable[..., Any] | None = getattr(module, name, None)
    if callable(found):
        return found
    callables = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
    raise InputError(
        f"module '{module.__name__}' has no function '{name}'",
        where=str(module.__file__ or module.__name__),
        why=_nearest(name, callables),
        fix="name one that it has, as module:function",
    )


def _nearest(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=3) or sorted(names)[:5]
    return f"there is {', '.join(close)}" if close else "there is nothing of that kind"
