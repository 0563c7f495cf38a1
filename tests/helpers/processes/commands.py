"""Runs commands as a user does, in a session of their own that leaves no process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gpumix.hardware.memory_limit.build_allocator import BuildError, build_capped_allocator
from helpers.processes.warm_commands import Command, is_warm

Process = Command | subprocess.Popen[str]


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """The one document on stdout."""
        return json.loads(self.out)


def run(
    command: Sequence[str | Path],
    *,
    folder: Path,
    env: Mapping[str, str],
    timeout_s: float,
    fresh: bool = False,
) -> Done:
    """Run a command in `folder`; signals to its group reach nobody else.

    Args:
        fresh: it imports all that it needs by itself, also where it `is_warm`.
    """
    words = [str(part) for part in command]
    with TemporaryDirectory() as streams:
        process = _started(words, folder, env, None if fresh else Path(streams))
        try:
            out, err = process.communicate(timeout=timeout_s)
            assert not _remain(process.pid), "processes are left behind"
        finally:
            _end(process)
    return Done(process.returncode or 0, out, err)


def begin(
    command: Sequence[str],
    *,
    folder: Path,
    env: Mapping[str, str],
    said: Path,
    enters: Callable[[], None] | None = None,
) -> Command:
    """Start a command that `is_warm`, in a session of its own; `said` gets what it says.

    Args:
        enters: is called first, where it runs: a function of a module, or what else can be pickled.
    """
    assert is_warm(command), command
    return Command(command, folder=folder, env=env, streams=(said, said), enters=enters)


def _started(
    words: Sequence[str], folder: Path, env: Mapping[str, str], streams: Path | None
) -> Process:
    if streams is not None and is_warm(words):
        files = (streams / "out", streams / "err")
        return Command(words, folder=folder, env=env, streams=files)
    return subprocess.Popen(
        words,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def environment(cache: Path) -> dict[str, str]:
    """This process's own, but caches are the test's, ranks talk on loopback, nothing is styled."""
    share_compiled(cache / "gpumix")
    kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "FORCE_COLOR")}
    return kept | {"XDG_CACHE_HOME": str(cache), "GLOO_SOCKET_IFNAME": "lo"}


def share_compiled(cache: Path) -> None:
    """What takes long to make: the compiler needs seconds for the counting allocator."""
    with suppress(BuildError):  # without a compiler commands find none either
        built = build_capped_allocator()
        libraries = cache / "libraries"  # which only this user may enter
        cache.mkdir(parents=True, exist_ok=True)
        libraries.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileExistsError):  # ranks may do so at once
            os.link(built, libraries / built.name)


def _remain(group: int, patience_s: float = 20.0) -> bool:
    """Whether processes of the group live on: the server of ranks needs a moment to notice."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.02)
    return True


def _end(process: Process) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.communicate()
