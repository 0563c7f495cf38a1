"""Imports run one way through the package, and what decides never imports torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "gpumix"

PURE = {"schema", "cost", "planner", "simulate"}
BELOW_TRAIN = PURE | {"hardware", "engine", "data", "profiler"}
BELOW_CLI = BELOW_TRAIN | {"train", "launch", "doctor", "check", "report", "integrations"}
MAY_IMPORT = {
    "schema": set(),
    "cost": {"schema"},
    "planner": {"schema", "cost"},
    "simulate": {"schema", "cost"},
    "hardware": PURE,
    "engine": PURE | {"hardware"},
    "data": PURE | {"hardware"},
    "profiler": PURE | {"hardware", "engine", "data"},
    "train": BELOW_TRAIN,
    "launch": BELOW_TRAIN | {"train"},
    "check": BELOW_TRAIN | {"train"},
    "doctor": BELOW_TRAIN | {"train"},
    "report": BELOW_TRAIN | {"train"},
    "integrations": BELOW_TRAIN | {"train", "testing"},
    "testing": BELOW_TRAIN,
    "cli": BELOW_CLI,
    "__init__": BELOW_CLI,
    "__main__": {"cli"},
}


def imported_modules(source: str, module: tuple[str, ...], is_package: bool) -> Iterator[str]:
    """Dotted names of all that `source` imports, wherever in it; `module` is its own name."""
    return imported_by(ast.walk(ast.parse(source)), module, is_package)


def imported_by(
    nodes: Iterable[ast.AST], module: tuple[str, ...], is_package: bool
) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            depth = len(module) - node.level + is_package
            above = module[:depth] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def parts_imported(source: str, module: tuple[str, ...], is_package: bool) -> set[str]:
    """The parts of gpumix that `source` imports, such as 'schema'."""
    names = (name.split(".") for name in imported_modules(source, module, is_package))
    return {name[1] for name in names if name[0] == "gpumix" and len(name) > 1} & set(MAY_IMPORT)


def part_of(file: Path) -> str:
    relative = file.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def wrong_imports(file: Path) -> set[str]:
    relative = file.relative_to(PACKAGE.parent).with_suffix("")
    is_package = file.name == "__init__.py"
    module = relative.parts[:-1] if is_package else relative.parts
    own = part_of(file)
    return parts_imported(file.read_text(), module, is_package) - MAY_IMPORT[own] - {own}


def test_every_part_has_its_place():
    folders = {p.parent.name for p in PACKAGE.glob("*/*.py")}
    assert folders | {p.stem for p in PACKAGE.glob("*.py")} <= set(MAY_IMPORT)


ACCELERATORS = ("cuda", "xpu", "accelerator")


def accelerators_named(source: str) -> set[str]:
    """The modules of torch for accelerators that `source` names, whatever it calls torch."""
    if not any(name in source for name in ACCELERATORS):  # most need not be parsed
        return set()
    tree = ast.parse(source)
    torches = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "torch"
    } | {"torch"}
    named = {f"torch.{name}" for name in ACCELERATORS}
    reached = {
        f"torch.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in torches
    }
    imported = {
        ".".join(name.split(".")[:2]) for name in imported_modules(source, ("gpumix",), False)
    }
    return named & (reached | imported)


@pytest.mark.parametrize(
    "source",
    ["torch.cuda.synchronize()", "import torch as t\nt.cuda.Stream()", "from torch import cuda",
     "from torch.cuda import Event", "import torch.cuda", "x: torch.cuda.Event | None = None"],
)  # fmt: skip
def test_a_name_of_torch_cuda_is_found(source):
    assert accelerators_named(source) == {"torch.cuda"}
    assert accelerators_named('"""`torch.cuda.set_device` chose."""') == set()


def test_one_file_names_the_modules_of_torch_for_accelerators():
    naming = {
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        if accelerators_named(file.read_text())
    }
    assert naming == {"hardware/runtime.py"}


def test_imports_run_one_way():
    files = [file for file in sorted(PACKAGE.rglob("*.py")) if part_of(file) in MAY_IMPORT]
    wrong = {str(file): found for file in files if (found := wrong_imports(file))}
    assert wrong == {}


def test_the_order_has_no_circle():
    left: set[str] = set()
    while ready := {part for part, others in MAY_IMPORT.items() if others <= left} - left:
        left |= ready
    assert left == set(MAY_IMPORT)


def test_no_module_counts_the_folders_above_it():
    """It would find another one once it is moved."""
    counting = [f for f in PACKAGE.rglob("*.py") if "__file__).parents" in f.read_text()]
    assert counting == []


MOST_MODULES = 15  # of a folder


def test_no_folder_is_crowded():
    folders = [file.parent for file in PACKAGE.rglob("*.py") if file.name != "__init__.py"]
    assert {str(one) for one in folders if folders.count(one) > MOST_MODULES} == set()


def module_imports() -> dict[Path, set[Path]]:
    """The files that each file imports at module level, those for type checking included."""
    known = {}
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        known[".".join(parts).removesuffix(".__init__")] = file
    found: dict[Path, set[Path]] = {}
    for name, file in known.items():
        nodes, module = outside_functions(ast.parse(file.read_text())), tuple(name.split("."))
        names = imported_by(nodes, module, file.name == "__init__.py")
        targets = {known.get(n) or known.get(n.rpartition(".")[0]) for n in names} - {None, file}
        found[file] = {one for one in targets if one.name != "__init__.py"}
    return found


def outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from outside_functions(child)


def circle(graph: dict[Path, set[Path]]) -> set[Path]:
    """What is left of a graph without all that leads out of it."""
    left = dict(graph)
    while ends := [one for one, others in left.items() if not others & left.keys()]:
        for one in ends:
            del left[one]
    return set(left)


def test_no_files_and_no_folders_import_in_a_circle():
    files = module_imports()
    assert circle(files) == set()
    folders: dict[Path, set[Path]] = {}
    for file, others in files.items():
        for here, there in {(file.parent, other.parent) for other in others}:
            if here not in (there, *there.parents) and there not in here.parents:
                folders.setdefault(here, set()).add(there)
    assert circle(folders) == set()


def test_a_circle_is_seen():
    a, b, c = Path("a"), Path("b"), Path("c")
    assert circle({a: {b}, b: {a}, c: {a}}) == {a, b, c}
    assert circle({a: {b}, b: {c}, c: set()}) == set()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import gpumix.engine.comm.communicator", {"engine"}),
        ("from gpumix import train", {"train"}),
        ("from gpumix.cost.step_time import step", {"cost"}),
        ("def f():\n    from ..train import loop", {"train"}),
        ("from .base import Value", {"schema"}),
        ("if TYPE_CHECKING:\n    import gpumix.data as d, torch", {"data"}),
        ("import gpumix\nfrom torch import engine", set()),
    ],
)
def test_all_forms_of_import_are_seen(source, expected):
    assert parts_imported(source, ("gpumix", "schema", "read"), False) == expected


def test_relative_imports_of_a_package_start_at_itself():
    source = "from . import comm\nfrom ..schema import plan"
    found = list(imported_modules(source, ("gpumix", "engine"), True))
    assert found == ["gpumix.engine.comm", "gpumix.schema.plan"]


@pytest.mark.parametrize("part", sorted(PURE))
def test_what_decides_does_not_import_torch(part):
    names = [
        ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
        for file in sorted((PACKAGE / part).rglob("*.py"))
        if file.name != "__init__.py"
    ]
    code = "import importlib, sys\n"
    code += f"for name in {names!r}: importlib.import_module(name)\n"
    code += "sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or "torch was imported"


def test_the_engine_leaves_slow_imports_to_those_who_need_them():
    slow = {"torch.distributed.tensor", "sympy", "triton", "transformers"}
    code = "import sys, gpumix.engine.prepare\n"
    code += f"sys.exit(' '.join({slow!r} & sys.modules.keys()) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_rooms_of_tests_are_those_of_the_package():
    """The tests of a module are in the folder of its name, or in one above."""
    tests = Path(__file__).parent
    rooms = [
        file.parent.relative_to(tests)
        for part in PACKAGE.iterdir()
        for file in (tests / part.name).rglob("test_*.py")
    ]
    assert len(set(rooms)) > 60
    assert sorted({str(room) for room in rooms if not (PACKAGE / room).is_dir()}) == []


def test_modules_of_tests_have_names_of_their_own():
    """pytest knows them by these, whatever folder they are in."""
    names = [file.name for file in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []
