"""Hashes of the source code behind a measurement: a changed model must be measured again."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from gpumix.schema.files import read_bytes


def hash_factory_code(factory: str | None, folder: Path) -> str:
    """Hash the source of a factory's module and of all modules imported from the same folder: code
    may change while names stay."""
    if factory is None:
        return ""
    module = factory.partition(":")[0]
    top = module.partition(".")[0]
    if not (folder / top).is_dir() and not (folder / f"{top}.py").is_file():
        spec = importlib.util.find_spec(top)
        if spec is None or spec.origin is None:
            return ""
        installed = Path(spec.origin)
        folder = installed.parent.parent if spec.submodule_search_locations else installed.parent
        return hash_files(_find_imported_files(module, folder, within=top))
    return hash_files(_find_imported_files(module, folder))


def _find_imported_files(module: str, folder: Path, within: str = "") -> set[Path]:
    """Return the files of `module` and of all modules in `folder` imported directly or indirectly.

    Args:
        within: only files of this package; the whole folder if empty.
    """
    found: set[Path] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if not name or (within and name.partition(".")[0] != within):
            continue
        stem = folder.joinpath(*name.split("."))
        for file in (stem.with_suffix(".py"), stem / "__init__.py"):
            if file.is_file() and file not in found:
                found.add(file)
                waiting += _list_imports(
                    file, name if file.name == "__init__.py" else _get_parent_package(name)
                )
        if "." in name:
            waiting.append(_get_parent_package(name))
    return found


def _list_imports(file: Path, package: str) -> Iterator[str]:
    """Yield names of modules that a file may import; an imported name may be a module too."""
    with suppress(SyntaxError):  # reported when the module is run
        for node in ast.walk(ast.parse(read_bytes(file))):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                parts = package.split(".")[: -(node.level - 1) or None] if node.level else []
                base = ".".join([*parts, *([node.module] if node.module else [])])
                yield base
                yield from (f"{base}.{alias.name}" if base else alias.name for alias in node.names)


def _get_parent_package(name: str) -> str:
    return name.rpartition(".")[0]


def hash_files(files: Iterable[Path]) -> str:
    """Hash the contents of files in the order of their names."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(read_bytes(file))
    return digest.hexdigest()
