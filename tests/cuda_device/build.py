"""Compiles the library once per torch, machine and source, into the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).parent / "source"
COMPILERS = ("g++", "c++", "clang++")
TIMEOUT_S = 1200


class BuildError(Exception):
    """The library cannot be built here: tests that need it are skipped with this reason."""


def library() -> Path:
    """The compiled library for this torch; builds it if the cache has none.

    Raises:
        BuildError: torch is a build with CUDA, there is no compiler, or it fails.
    """
    torch = _torch()
    version = (torch / "version.py").read_text(encoding="utf-8")
    if (torch / "lib" / "libtorch_cuda.so").exists():
        raise BuildError("this build of torch has CUDA of its own")
    library = _cache() / f"cuda_device-{_key(version)}.so"
    if not library.exists():
        compiler = _compiler()
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as folder:
            _build(compiler, torch, Path(folder)).replace(library)
    return library


def _torch() -> Path:
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("torch is not installed")
    return Path(spec.submodule_search_locations[0])


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gpumix"


def _files() -> list[Path]:
    return sorted(SOURCE.glob("*.cpp"))


def _key(version: str) -> str:
    """Changes with everything that the binary depends on."""
    sources = [file.read_text(encoding="utf-8") for file in [*_files(), SOURCE / "device.h"]]
    parts = (version, platform.machine(), Path(__file__).read_text(encoding="utf-8"), *sources)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compiler() -> list[str]:
    chosen = os.environ.get("CXX")
    if chosen is not None:
        return shlex.split(chosen)
    for name in COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return [found]
    raise BuildError(f"no C++ compiler on PATH (looked for {', '.join(COMPILERS)})")


def _build(compiler: list[str], torch: Path, folder: Path) -> Path:
    def compiled(file: Path) -> str:
        output = str(folder / f"{file.stem}.o")
        _run([*compiler, *options, "-c", str(file), "-o", output])
        return output

    options = ["-O1", "-std=c++20", "-fPIC", "-DAT_PER_OPERATOR_HEADERS", f"-I{torch / 'include'}"]
    options.append(f"-I{torch / 'include' / 'torch' / 'csrc' / 'api' / 'include'}")
    with ThreadPoolExecutor(max_workers=2) as pool:
        objects = list(pool.map(compiled, _files()))
    built = folder / "built.so"
    links = [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}"]
    _run([*compiler, "-shared", *objects, *links, "-o", str(built)])
    return built


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise BuildError(f"{command[0]}: {(errors or [f'exit code {done.returncode}'])[0]}")
