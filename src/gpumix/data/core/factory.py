"""Calls of factories that a job names as `module:function`, with errors that point at the name."""

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

from gpumix.schema.errors import InputError


def call_factory(
    reference: str, arguments: Mapping[str, Any], folder: Path, *, key: str = ""
) -> Any:
    """Return the result of `reference` ("module:function") called with `arguments` as keywords.
    `key` is the section of the job that contains `factory` and `arguments`.

    `folder`, of the job or of the started script, goes to the front of sys.path and stays: the
    module may import its neighbors at any later time. Exceptions of the factory itself pass
    through, with traceback.

    Raises:
        InputError: the module, the function or an argument of it does not exist.
    """
    module_name, _, name = reference.partition(":")
    place = str(folder.absolute())
    if place not in sys.path:
        sys.path.insert(0, place)
    named_by = f"{key}.factory" if key else ""
    function = _find_function(_import_named(module_name, folder, named_by), name, named_by)
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise InputError(
            f"'{reference}' cannot be called with the given arguments: {error}",
            code="factory-arguments-invalid",
            where=f"{key}.arguments" if key else "",
            why=f"it takes {inspect.signature(function)}",
            fix=f"--set {key}.arguments={{name: value}}" if key else "",
        ) from error
    return function(**arguments)


def _import_named(name: str, folder: Path, named_by: str) -> ModuleType:
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise InputError(
                f"module '{name}' cannot be imported: {error}", code="factory-import-failed"
            ) from error
        there = [module.name for module in pkgutil.iter_modules([str(folder)])]
        raise InputError(
            f"there is no module '{error.name}'",
            code="factory-module-missing",
            where=named_by or str(folder),
            why=_suggest_names(name, there),
            fix=f"modules are looked for in {folder} and among the installed packages",
        ) from error
    except (ImportError, SyntaxError) as error:
        raise InputError(
            f"module '{name}' cannot be imported: {error}", code="factory-import-failed"
        ) from error


def _find_function(module: ModuleType, name: str, named_by: str) -> Callable[..., Any]:
    found: Callable[..., Any] | None = getattr(module, name, None)
    if callable(found):
        return found
    callables = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
    file = str(module.__file__ or module.__name__)
    raise InputError(
        f"module '{module.__name__}' has no function '{name}'",
        code="factory-function-missing",
        where=named_by or file,
        why=_suggest_names(name, callables),
        fix=f"name one that {file} has, as module:function",
    )


def _suggest_names(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=3) or sorted(names)[:5]
    return f"there is {', '.join(close)}" if close else "there is nothing of that kind"
