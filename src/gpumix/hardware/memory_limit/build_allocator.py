"""Build of the capped allocator, once per torch, Python and machine, in the user's cache folder.

Concurrent builds do not disturb each other: each rank compiles in its own folder and moves the
result into place atomically. The first build takes about 2 s, later calls only look it up. A
library runs code when loaded, so the folder must be accessible to this user only.
"""

from __future__ import annotations

import hashlib
import platform
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch

from gpumix.hardware.host.environment import COMPILERS, cache_folder, chosen_compiler
from gpumix.schema import files

SOURCE = Path(__file__).with_name("capped_alloc.cpp")
BUILD_TIMEOUT_S = 120
LIBRARY_FOLDER = "libraries"  # subfolder of the cache


class BuildError(Exception):
    """The allocator cannot be built here. The caller falls back; users never see this error."""


def build_capped_allocator() -> Path:
    """Return the compiled allocator for this torch, built if not cached.

    Raises:
        BuildError: there is no compiler, the build fails, or the cache folder is not writable.
    """
    try:
        folder = files.make_private_folder(cache_folder() / LIBRARY_FOLDER)
        library = folder / f"capped_alloc-{_hash_build()}.so"
        if not _is_own_file(library):
            files.remove(library)
            compiler = _find_compiler()
            with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
                built = Path(scratch) / library.name
                _compile(compiler, built)
                built.chmod(0o700)
                built.replace(library)
    except OSError as error:
        raise BuildError(f"cannot write to {cache_folder()}: {error}") from error
    return library


def _is_own_file(library: Path) -> bool:
    try:
        with files.open_trusted(library):
            return True
    except OSError:
        return False


def _hash_build() -> str:
    """Return a hash of all dependencies of the binary."""
    parts = (
        torch.__version__,
        str(torch.compiled_with_cxx11_abi()),
        str(sysconfig.get_config_var("SOABI")),
        platform.machine(),
        files.read_text(SOURCE),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _find_compiler() -> list[str]:
    chosen = chosen_compiler()
    if chosen is not None:
        return shlex.split(chosen)
    for name in COMPILERS:
        found = shutil.which(name)
        if found is not None:
            return [found]
    raise BuildError(f"no C++ compiler on PATH (looked for {', '.join(COMPILERS)})")


def _compile(compiler: list[str], output: Path) -> None:
    root = Path(torch.__file__).parent
    command = [
        *compiler,
        *("-O2", "-std=c++20", "-shared", "-fPIC"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{root / 'include'}",
        str(SOURCE),
        *(f"-L{root / 'lib'}", "-lc10", f"-Wl,-rpath,{root / 'lib'}"),
        *("-o", str(output)),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler[0]}: {error}") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise BuildError(f"{compiler[0]}: {lines[0]}")
