"""Files that users name: written at once, read without waiting for what may never come.

Opening a pipe waits for somebody to write into it, and reading a device may have no end. So a name
must be that of a file, unless it means what this process was handed open: `/dev/stdin`, and
`/dev/fd/63`, which is how a shell writes `<(command)`. What follows is up to who handed it over.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path

from gpumix.spec.errors import MachineError

# Of these names, what is behind them is not asked.
_HANDED = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_WRITABLE = {
    errno.ENOSPC: "make room on that disk",
    errno.EDQUOT: "make room in that quota",
    errno.EFBIG: "make room there: files may not grow so large (ulimit -f)",
    errno.ENOENT: "see that the folder is there, by this name",
    errno.ENOTDIR: "see that the folder is there, by this name",
    errno.EACCES: "make the folder accessible to this user",
    errno.EPERM: "make the folder accessible to this user",
    errno.EROFS: "let that disk be written: it is mounted read-only",
}


class NotAFileError(OSError):
    """A pipe, a socket or a device, by its name."""


def not_a_file(path: Path) -> str | None:
    """What a name is of that may have no end or never begin, as "a pipe"; None if it is a file, a
    folder, or not there."""
    try:
        return _KINDS.get(stat.S_IFMT(path.stat().st_mode))
    except OSError:
        return None


def check_is_file(path: Path) -> None:
    """Raise NotAFileError where reading may have no end: for who hands the name to a library."""
    kind = not_a_file(path)
    if kind is not None and not str(path).startswith(_HANDED):
        raise NotAFileError(errno.EINVAL, f"it is {kind}, not a file", str(path))


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """A file, open to be read.

    Raises:
        NotAFileError: reading it may have no end.
        OSError: it cannot be read.
    """
    check_is_file(path)

    def without_waiting(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)

    with open(path, "rb", opener=without_waiting) as stream:
        os.set_blocking(stream.fileno(), True)
        yield stream


def read_bytes(path: Path) -> bytes:
    """All that is in a file; raises as `opened`."""
    with opened(path) as stream:
        return stream.read()


def read_text(path: Path) -> str:
    """The text in a file; raises as `opened`, and UnicodeDecodeError if it is not UTF-8."""
    return read_bytes(path).decode("utf-8")


def how_to_write(error: OSError) -> str:
    """What to do about an error that writing into a folder raised."""
    return _WRITABLE.get(error.errno or 0, "look at that disk and at `dmesg | tail`")


def replace_text(path: Path, text: str, *, cannot: str, fix: str = "") -> None:
    """Write a file in one atomic step, and its folder if there is none.

    Args:
        cannot: what is not possible where that fails, as "cannot write the report".
        fix: what to do then; by default it depends on the cause.

    Raises:
        MachineError: it cannot be written; nothing was changed.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        why = error.strerror or str(error)
        fix = fix or f"{how_to_write(error)}, or write elsewhere"
        raise MachineError(cannot, where=str(path), why=why, fix=fix) from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def why_unreadable(error: OSError | ValueError) -> str:
    """What an error says that reading raised, without the name that stands beside it anyway."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
