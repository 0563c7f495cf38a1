"""By their syntax: files are opened, written and removed by one module, terminals by another."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "gpumix"
FILES = "schema/files.py"

# Methods and functions that open, write, move or remove, by names that nothing else has.
ANYWHERE = {
    "rmtree", "unlink", "rename", "renames", "removedirs", "rmdir", "copyfile", "copytree",
    "symlink", "symlink_to", "hardlink_to", "touch", "write_text", "write_bytes", "read_text",
    "read_bytes", "mkstemp", "mkdtemp", "NamedTemporaryFile", "TemporaryDirectory", "CDLL", "PyDLL",
    "from_file", "fromfile", "memmap", "safe_open", "load_library", "load_file", "save_file",
    "load_from_disk", "write_to_textfile", "mkfifo", "ZipFile", "run_path",
}  # fmt: skip
OF_MODULES = {
    "os": {"open", "remove", "replace", "link", "truncate", "chmod", "chown"},
    "io": {"open"},
    "shutil": {"copy", "copy2", "move"},
    "torch": {"load"},
    "np": {"load"},
    "sqlite3": {"connect"},
    "gzip": {"open"},
    "tarfile": {"open"},
    "pickle": {"load", "loads"},
}
# Who does so for itself, and why that is no file of others.
ALLOWED = {
    FILES: "the door",
    "launch/probes/probe.py": {"read_bytes"},  # on hosts without gpumix, by the standard library
    "hardware/memory_limit/build_allocator.py": {"TemporaryDirectory"},  # private, for a compiler
    "hardware/memory_limit/limit.py": {"CDLL"},  # by a descriptor that the door has checked
    "data/core/host_limits.py": {"CDLL", "open"},  # this process, and a file of the kernel
    "data/workers/fork_server.py": {"CDLL", "loads"},  # this process, and its parent's messages
    "data/core/token_file.py": {"memmap"},  # numbers, with a checked head
    "engine/model/extra_state.py": {"load"},  # weights_only, of a checkpoint's manifest
    "engine/weights/safetensors_files.py": {"safe_open"},  # by a descriptor of the door
    "hardware/host/resident_memory.py": {
        "read_text",
        "write_text",
    },  # the kernel's, of this process
    "hardware/host/shared_segment.py": {"open"},  # a rank's memory, known by its number
    "hardware/host/pinned.py": {"open"},  # in the private folder of copies
    "train/memory_checkpoint/mmap_file.py": {"from_file"},  # likewise
    "check/probes/worker.py": {"mkstemp"},
    "check/facts/host.py": {"NamedTemporaryFile"},  # whether a folder can be written
    "cli/common.py": {"open"},  # /dev/null
    "integrations/trackers/__main__.py": {"open"},  # /dev/null
    "train/processes/rendezvous_handler.py": {"loads"},  # of what this process made out of JSON
    "integrations/transformers/checkpoints.py": {"load"},  # weights_only
    "data/sources/saved_dataset.py": {"load_from_disk"},  # after a look at what it opens
    "data/sources/length_cache.py": {"load"},  # numbers, in the user's cache
    "train/checkpoint/export.py": {"save_file"},  # into a new folder of a random name
    "train/checkpoint/merged_model.py": {"save_file"},  # likewise
}


parsed = lru_cache(maxsize=1)(ast.parse)  # of one file, which may be looked through twice
# What a call for a door is written with: most files have none of it, and are not parsed.
NAMES = sorted(ANYWHERE.union({"open", "replace"}, *OF_MODULES.values()))
WRITTEN = re.compile(rf"\b({'|'.join(NAMES)})\b\s*[()\\#]")


def calls(source: str, own: set[str]) -> Iterator[tuple[str, int]]:
    """The calls that are for a door, each by its name and its line.

    Args:
        own: names that the module has from the door.
    """
    for node in ast.walk(parsed(source)):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name):
            if called.id == "open" or (called.id in ANYWHERE and called.id not in own):
                yield called.id, node.lineno
        elif isinstance(called, ast.Attribute):
            of = called.value.id if isinstance(called.value, ast.Name) else ""
            name = called.attr
            if of == "files":
                continue
            given = _arguments(node)
            path_open = name == "open" and (not given or any(map(_is_mode, given)))
            path_replace = name == "replace" and len(node.args) == 1 and not node.keywords
            path_replace = path_replace and isinstance(node.args[0], ast.BinOp)
            if name in ANYWHERE or name in OF_MODULES.get(of, ()) or path_open or path_replace:
                yield name, node.lineno


def _arguments(node: ast.Call) -> list[ast.expr]:
    return [*node.args, *(one.value for one in node.keywords)]


def _is_mode(node: ast.expr) -> bool:
    value = node.value if isinstance(node, ast.Constant) else ""
    return isinstance(value, str) and bool(value) and set(value) <= set("rwxabt+")


def from_the_door(source: str) -> set[str]:
    """Names that are imported from the door, and functions of the module's own."""
    found = set()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "gpumix.schema.files":
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
    return found


def test_files_are_opened_and_removed_by_the_door_alone():
    wrong = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        name = str(file.relative_to(PACKAGE))
        allowed = ALLOWED.get(name, set())
        if isinstance(allowed, str):
            continue
        source = file.read_text()
        if not WRITTEN.search(source) or all(one[0] in allowed for one in calls(source, set())):
            continue
        found = [one for one in calls(source, from_the_door(source)) if one[0] not in allowed]
        if found:
            wrong[name] = found
    assert wrong == {}


def test_nobody_is_allowed_what_he_does_not_do():
    for name, allowed in ALLOWED.items():
        if isinstance(allowed, set):
            done = {call for call, _ in calls((PACKAGE / name).read_text(), set())}
            assert allowed <= done, name


@pytest.mark.parametrize(
    "source",
    ["open('a')", "Path('a').open('rb')", "path.open(mode='w')", "path.open()",
     "np.load(path)", "load_file(path)", "prometheus_client.write_to_textfile(path, all)",
     "import os\nos.open('a', 0)",
     "shutil.rmtree(path)", "path.unlink()", "path.write_text('x')", "read_text('a')",
     "torch.load(file)", "part.replace(folder / 'a')", "ctypes.CDLL(name)", "os.remove(a)"],
)  # fmt: skip
def test_ways_around_the_door_are_seen(source):
    assert WRITTEN.search(source)
    assert list(calls(source, set()))


def test_what_has_another_meaning_is_none():
    source = (
        "text.replace('a', 'b')\nstack.open(x)\nfiles.remove(path)\nlist.remove(1)\nread_text(p)"
    )
    assert list(calls(source, {"read_text"})) == []


def test_one_module_makes_consoles_and_one_reads_orders_for_them():
    """Whoever prints uses `train.console.terminal`: it lets printable text through."""
    makes = {
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        if "Console" in (source := file.read_text())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and "Console" in ast.unparse(node.func).split(".")[-1]
    }
    assert makes == {"train/console/terminal.py"}
