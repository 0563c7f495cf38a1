"""One attack: what a second user leaves for the first one, what that one does, what must not be.

Each runs in a process of its own, in a place with the home of the user and a folder of the
stranger. It succeeds if anything in the home has changed or has come out, if code of the stranger
ran, or if a terminal was given an order. Whether it hung, or was told to be a bug, is said too.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from helpers.attacks.mutant_runs import run as run_command
from helpers.attacks.strangers import NOBODY, give_away

SECRET = "s3cr3t-of-the-user"
PWNED = "PWNED"  # the file that code of a stranger makes
ALLOWED = {"\n", "\t", "\r"}
LIMIT_S = 180.0  # this machine may have more to do
MEMORY_BYTES = 6 * 2**30


@dataclass
class Place:
    """Where an attack happens.

    Attributes:
        home: of the user, who alone can enter it.
        run: a run's folder, which is the stranger's.
    """

    root: Path
    home: Path = field(init=False)
    run: Path = field(init=False)

    def __post_init__(self) -> None:
        self.home, self.run = self.root / "home", self.root / "run"
        (self.home / "folder" / "run-1").mkdir(parents=True)
        self.home.chmod(0o700)
        self.run.mkdir(mode=0o777)
        for name in ("thesis", "folder/notes", "folder/run-1/rank_0000.slot_0.seal"):
            (self.home / name).write_text(f"{SECRET} {name}\n")
            (self.home / name).chmod(0o600)
        self.before = self.state()

    def state(self) -> list[tuple[str, bytes, int]]:
        """All that is in the home."""
        found = []
        for path in sorted(self.home.rglob("*")):
            content = path.read_bytes() if path.is_file() else b""
            found.append((str(path), content, path.lstat().st_mode))
        return found

    @property
    def secret(self) -> Path:
        return self.home / "thesis"

    def leave(self, name: str, content: str | bytes = b"") -> Path:
        """A file of the stranger in the run's folder."""
        path = self.run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return give_away(path)

    def link(self, name: str, target: Path) -> Path:
        path = self.run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(target)
        return give_away(path)

    def harm(self) -> str:
        """What has happened that must not."""
        if self.state() != self.before:
            return "the user's home has changed"
        if any(path.name.startswith(PWNED) for path in self.root.rglob(f"{PWNED}*")):
            return "code of the stranger ran"
        for path in self.run.rglob("*"):
            small = path.is_file() and not path.is_symlink() and path.stat().st_size < 2**24
            if small and SECRET.encode() in path.read_bytes():
                return f"the user's secret is in {path.name}"
        return ""


@dataclass(frozen=True)
class Attack:
    """`act` prepares it and does what the user would do; the text that it returns is what the user
    sees. It raises AssertionError where something happened that must not."""

    kind: str
    name: str
    act: Callable[[Place], str]

    @property
    def id(self) -> str:
        return f"{self.kind}: {self.name}"


@dataclass(frozen=True)
class Outcome:
    attack: Attack
    harm: str = ""
    hung: bool = False
    bug: str = ""
    seconds: float = 0.0


def gpumix(place: Place, *words: str | Path) -> str:
    """The command line, as the user types it: all that it prints."""
    done = run_command([str(word) for word in words], place.root)
    return f"exit {done.code}\n{done.out}{done.err}"


def attempt(attack: Attack, root: Path, limit_s: float = LIMIT_S) -> Outcome:
    """Try it in a child of this process, which has imported what is needed."""
    place = Place(root)
    read, write = os.pipe()
    began = time.monotonic()
    child = os.fork()
    if not child:
        os.close(read)
        _in_child(attack, place, write)
    os.close(write)
    said, ended = _heard(read, began + limit_s)
    if not ended:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    seconds = time.monotonic() - began
    kind, _, text = said.partition(":")
    harm = text if kind == "harm" else ""
    orders = sorted({c for c in text if not c.isprintable() and c not in ALLOWED})
    if kind == "seen" and orders and not harm:
        harm = f"the terminal was given {orders[:4]!r}"
    if kind == "seen" and SECRET in text and not harm:
        harm = "the user's secret was shown"
    bug = text if kind not in ("seen", "harm") and ended else ""
    if ended and status:
        bug = f"the process died: {status}"
    if "a bug in gpumix" in text or "Traceback" in text:
        bug = text[-400:]
    return Outcome(attack, harm, not ended, bug, seconds)


def _in_child(attack: Attack, place: Place, write: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES + _taken(), resource.RLIM_INFINITY))
    os.chdir(place.root)
    try:
        said = f"seen:{attack.act(place)}"
    except AssertionError as error:
        said = f"harm:{error or 'it succeeded'}"
    except BaseException as error:
        said = f"raised:{type(error).__name__}: {error}"
    if harm := place.harm():
        said = f"harm:{harm}"
    with suppress(OSError):
        data = said.encode(errors="backslashreplace")
        while data:
            data = data[os.write(write, data) :]
    sys.stdout.flush()
    os._exit(0)


def _taken() -> int:
    """Addresses that this process has: torch maps many."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _heard(read: int, deadline: float) -> tuple[str, bool]:
    parts: list[bytes] = []
    try:
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([read], [], [], left)[0]:
                break
            part = os.read(read, 2**16)
            if not part:
                return b"".join(parts).decode(errors="replace"), True
            parts.append(part)
        return b"".join(parts).decode(errors="replace"), False
    finally:
        os.close(read)


class Swapping:
    """A process of another user that makes a name one thing and then another, as fast as it can."""

    def __init__(self, *makers: Callable[[], object]) -> None:
        self._makers = makers
        self._process = 0

    def __enter__(self) -> Swapping:
        self._process = os.fork()
        if not self._process:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            while True:
                for make in self._makers:
                    with suppress(OSError):
                        make()
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)


def turns(seconds: float) -> Iterator[int]:
    """As many as fit into so much time."""
    began, number = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        yield number
        number += 1
