"""The one door to files: what others can reach is read, written and removed here, nowhere else.

A folder may belong to another user, who swaps a file for a link, a pipe or a device at any moment.
So a file is judged by its open descriptor, never by its name; new files get random names that must
not exist; folders are opened once, and what happens in them goes by that descriptor. Reading never
waits for what may never come, and never takes more than a file of its kind can hold.

A name may also mean what this process was handed open: `/dev/stdin`, and `/dev/fd/63`, which is how
a shell writes `<(command)`. What follows from there is up to who handed it over.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import io
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from gpumix.spec.errors import MachineError

# The most that a file of a kind holds: a mark that gpumix leaves for itself; a document, as a plan
# of 65,536 devices; the index of a checkpoint; a line of a log.
MARK_BYTES = 2**20
DOCUMENT_BYTES = 2**28
INDEX_BYTES = 2**31
LINE_BYTES = 2**24
# How much of a log is searched for the end of a line that is longer than that.
LOST_BYTES = 2**28

# Of these names, what is behind them is not asked.
_HANDED = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_BLOCK_BYTES = 2**20
_LINKS = 40  # in a row, as the kernel has it
_PART = ".gpumix-", ".part"  # the ends of the names of files that are being written
_SCRATCH, _HELD = "gpumix-scratch-", ".held"
_LEFT_S = 600.0  # what nobody has written to for so long is of a process that died

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
    errno.EMFILE: "allow this process more open files: ulimit -n 65536",
    errno.ENFILE: "allow this machine more open files: sysctl fs.file-max",
    errno.ELOOP: "remove that link, or write elsewhere",
}


class NotAFileError(OSError):
    """A pipe, a socket or a device, or a link of another user, by its name."""


class TooLargeError(OSError):
    """More than a file of its kind holds."""


# -- what a name is of -----------------------------------------------------------------------------


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


def is_private(path: Path) -> bool:
    """Whether this is a folder, no link, that its owner alone can enter: this user."""
    try:
        info = path.lstat()
    except OSError:
        return False
    closed = not info.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and closed


# -- reading ---------------------------------------------------------------------------------------


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader[Any]]:
    """A file, open to be read.

    A link of another user is followed only to a file that is that user's too, or that everybody may
    read: else its owner would read with the rights of this process.

    Raises:
        NotAFileError: reading it may have no end, or the link leads to what is not its owner's.
        OSError: it cannot be read.
    """
    if str(path).startswith(_HANDED):
        with path.open("rb") as stream:
            yield stream
        return
    check_is_file(path)  # before it is opened: some devices do something then
    descriptor = _open_following(path)
    try:
        info = os.fstat(descriptor)
        _refuse_others(info, path)
        reader = io.FileIO if info.st_size else _Ready
        with BufferedReader(reader(descriptor, "rb", closefd=False)) as stream:
            yield stream
    finally:
        os.close(descriptor)


class _Ready(io.FileIO):
    """A file of no size, as those of the kernel: what some have yet to say is not waited for."""

    def readinto(self, buffer: Any) -> int:
        return int(self._ended(super().readinto(buffer)))

    def readall(self) -> bytes:
        found: bytes = self._ended(super().readall())
        return found

    def _ended(self, read: Any) -> Any:
        if read is None:
            raise NotAFileError(errno.EINVAL, "it is no file: reading it has no end")
        return read


def _refuse_others(info: os.stat_result, path: Path) -> None:
    kind = _KINDS.get(stat.S_IFMT(info.st_mode))
    if kind is not None:
        raise NotAFileError(errno.EINVAL, f"it is {kind}, not a file", str(path))
    if stat.S_ISDIR(info.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))


def _open_following(path: Path) -> int:
    """A descriptor of what a name leads to; see `opened` on links. Never waits."""
    descriptor, owners = _resolved(path, os.O_RDONLY | os.O_NOCTTY)
    info = os.fstat(descriptor)
    if owners - {0, os.geteuid(), info.st_uid} and not info.st_mode & stat.S_IROTH:
        os.close(descriptor)
        raise NotAFileError(
            errno.EACCES, "it is a link of another user to a file that is not theirs"
        )
    return descriptor


def _resolved(path: Path, flags: int) -> tuple[int, set[int]]:
    """A descriptor of what a name leads to, and the owners of the links on the way: of those that
    were followed, not of others that were put there meanwhile."""
    owners: set[int] = set()
    for _ in range(_LINKS):
        try:
            descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            link = path.lstat()
            if not stat.S_ISLNK(link.st_mode):
                raise
            target = path.readlink()
            if not os.path.samestat(link, path.lstat()):
                raise NotAFileError(errno.ELOOP, "it changes while it is read") from error
            owners.add(link.st_uid)
            path = path.parent / target
            continue
        return descriptor, owners
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


@contextmanager
def opened_own(path: Path) -> Iterator[int]:
    """A descriptor of a file that nobody but this user, or root, can have written, for what is
    executed: no link, in no folder that others may write.

    Raises:
        NotAFileError: another user may have written it.
        OSError: it cannot be read.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    folder = os.open(path.parent, flags | os.O_DIRECTORY)
    try:
        descriptor = os.open(path.name, flags, dir_fd=folder)
        try:
            infos = os.fstat(folder), os.fstat(descriptor)
            if not all(map(_is_trusted, infos)) or not stat.S_ISREG(infos[1].st_mode):
                raise NotAFileError(errno.EACCES, "another user may have written it", str(path))
            yield descriptor
        finally:
            os.close(descriptor)
    finally:
        os.close(folder)


def name_of(descriptor: int, path: Path) -> str:
    """A name of an open file, whatever happens to `path` meanwhile, where the system has one."""
    name = Path(f"/proc/self/fd/{descriptor}")
    return str(name if name.exists() else path)


def _is_trusted(info: os.stat_result) -> bool:
    """Whether only this user, or root, decides what is in a file or folder."""
    mine = info.st_uid in (0, os.geteuid())
    return mine and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def read_bytes(path: Path, most_bytes: int = DOCUMENT_BYTES) -> bytes:
    """All that is in a file; raises as `opened`, and TooLargeError if that is more than the most.
    No more than that is ever read."""
    with opened(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        found = stream.read(most_bytes + 1) if size <= most_bytes else b""
    if max(size, len(found)) > most_bytes:
        has = f"{size:,}" if size > most_bytes else "more"
        raise TooLargeError(
            errno.EFBIG, f"it has {has} bytes, {most_bytes:,} are the most", str(path)
        )
    return found


def read_text(path: Path, most_bytes: int = DOCUMENT_BYTES) -> str:
    """The text in a file of values; raises as `read_bytes`, and UnicodeDecodeError if it is not
    UTF-8."""
    return read_bytes(path, most_bytes).decode("utf-8")


def read_log(path: Path, most_bytes: int = DOCUMENT_BYTES) -> str:
    """The text in a file for people, or of the kernel's; what is no UTF-8 is replaced. Raises as
    `read_bytes`."""
    return read_bytes(path, most_bytes).decode("utf-8", errors="replace")


def lines_in(stream: BufferedReader) -> Iterator[bytes]:
    """The lines from here on, with their ends. One that is longer than a line can be comes cut; if
    it has no end within `LOST_BYTES`, it is the last."""
    while line := stream.readline(LINE_BYTES):
        yield line
        lost = 0
        while len(line) == LINE_BYTES and not line.endswith(b"\n"):
            line, lost = stream.readline(LINE_BYTES), lost + LINE_BYTES
            if lost >= LOST_BYTES:
                return


def lines_from_end(stream: BufferedReader) -> Iterator[tuple[int, bytes]]:
    """The lines of a file from the last to the first, each with where it begins. One that is longer
    than a line can be is passed over; if it has no begin within `LOST_BYTES`, it is the last."""
    end = stream.seek(0, os.SEEK_END)
    rest, lost = b"", 0  # what begins at `end`: of a line whose begin is before that
    while end and lost <= LOST_BYTES:
        size = min(_BLOCK_BYTES, end)
        end -= size
        stream.seek(end)
        block = stream.read(size) + rest
        first = block.find(b"\n") + 1 if end else 0
        if end and not first:
            lost += size if lost or len(block) > LINE_BYTES else 0
            rest = b"" if lost else block
            continue
        begin = end + len(block)
        whole, lost = lost == 0, 0
        for line in reversed(block[first:].splitlines(keepends=True)):
            begin -= len(line)
            if whole or line.endswith(b"\n"):
                yield begin, line
        rest = block[:first]


def copy_bytes(stream: BufferedReader, into: BinaryIO, count: int) -> None:
    """Copy so many bytes from here on."""
    while count > 0 and (block := stream.read(min(count, _BLOCK_BYTES))):
        into.write(block)
        count -= len(block)


# -- writing ---------------------------------------------------------------------------------------


@contextmanager
def _folder(path: Path) -> Iterator[int]:
    """A descriptor of a folder that is written into: a link to it must be this user's, or root's.

    Raises:
        OSError: it is not there, or another user's link.
    """
    descriptor, owners = _resolved(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if owners - {0, os.geteuid()}:
            raise NotAFileError(errno.ELOOP, "it is a link of another user", str(path))
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path, *, mode: int = 0o666, durable: bool = False) -> Iterator[BufferedWriter]:
    """A new file, open to be written, that takes the place of `path` at the end of the block, in
    one step; an error leaves what is there. What lies there, a link too, is never written into.

    Args:
        mode: of the new file, less the umask.
        durable: it survives a crash of the machine.

    Raises:
        OSError: it cannot be written.
    """
    with _folder(path.parent) as folder:
        part = secrets.token_hex(8).join(_PART)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(part, flags, mode, dir_fd=folder)
        try:
            with os.fdopen(descriptor, "wb") as stream:
                yield stream
                if durable:
                    stream.flush()
                    os.fsync(stream.fileno())
            os.replace(part, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(part, dir_fd=folder)
            raise


def write_bytes(path: Path, content: bytes, *, mode: int = 0o666, durable: bool = False) -> None:
    """Write a file in one step, so that no reader finds half of it; see `replacing`."""
    with replacing(path, mode=mode, durable=durable) as stream:
        stream.write(content)


def write_at_once(path: Path, text: str, *, mode: int = 0o666, durable: bool = False) -> None:
    """As `write_bytes`, as UTF-8."""
    write_bytes(path, text.encode("utf-8"), mode=mode, durable=durable)


def write_in_place(path: Path, text: str) -> None:
    """Write into a file that is there, for want of room for another one."""
    with _opened_to_write(path, os.O_WRONLY) as stream:
        stream.write(text.encode("utf-8"))
        stream.truncate()


def replace_text(path: Path, text: str, *, cannot: str, fix: str = "") -> None:
    """Write a file in one atomic step, and its folder if there is none.

    Args:
        cannot: what is not possible where that fails, as "cannot write the report".
        fix: what to do then; by default it depends on the cause.

    Raises:
        MachineError: it cannot be written; nothing was changed.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_at_once(path, text)
    except OSError as error:
        why = error.strerror or str(error)
        fix = fix or f"{how_to_write(error)}, or write elsewhere"
        raise MachineError(cannot, where=str(path), why=why, fix=fix) from error


@contextmanager
def _opened_to_write(path: Path, flags: int) -> Iterator[BufferedWriter]:
    with os.fdopen(_regular(path, flags), "wb") as stream:
        yield stream


def _regular(path: Path, flags: int) -> int:
    """A descriptor of a regular file to be written, which is made where `flags` say so; a link is
    refused, so that nothing is written into what it leads to.

    Raises:
        NotAFileError: it is none.
        OSError: it cannot be opened.
    """
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            kind = "a link" if error.errno == errno.ELOOP else "a pipe"
            raise NotAFileError(error.errno, f"it is {kind}, not a file", str(path)) from error
        raise
    try:
        _refuse_others(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def opened_log(path: Path) -> TextIO:
    """A text file, open to be written behind its end; made where it is not there.

    Raises:
        NotAFileError: it is a link, a pipe or a device.
        OSError: it cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.fdopen(_regular(path, flags), "a", encoding="utf-8")


def opened_lock(path: Path, *, make: bool = True) -> int:
    """A descriptor of a file to be locked (`flock`), with what it holds; made where it is not
    there. Raises as `opened_log`."""
    return _regular(path, os.O_RDWR | (os.O_CREAT if make else 0))


def opened_anew(path: Path) -> int:
    """A descriptor of a new file, in the place of what lies there; not in one step. Only this user
    can read it.

    Raises:
        OSError: it cannot be made.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with _folder(path.parent) as folder:
        with suppress(FileNotFoundError):
            os.unlink(path.name, dir_fd=folder)
        return os.open(path.name, flags, 0o600, dir_fd=folder)


def sync_folder(folder: Path) -> None:
    """Make renames and new files in a folder survive a crash of the machine."""
    with _folder(folder) as descriptor:
        os.fsync(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder in one that is there.

    Raises:
        OSError: it cannot be made.
    """
    with _folder(path.parent) as folder:
        os.mkdir(path.name, dir_fd=folder)


def make_private(path: Path) -> None:
    """Make a folder that only this user can enter, or see that it is one.

    Raises:
        NotAFileError: another user made it, or can enter it; or it is a link.
        OSError: it cannot be made.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if not is_private(path):
        raise NotAFileError(errno.EACCES, "it is not this user's alone", str(path))


def private_folder(path: Path) -> Path:
    """A folder that only this user can enter, made where it is not there; where another user can,
    one in its stead that goes with this process.

    Raises:
        OSError: neither can be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        make_private(path)
    except NotAFileError:
        path = Path(tempfile.mkdtemp(prefix="gpumix-"))
        atexit.register(remove_quietly, path)
    return path


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for the files of this process, which only this user can enter; it is removed at the
    end of the block. A process that was killed cannot do that: the next one does it.
    """
    place = Path(tempfile.gettempdir())
    for former in place.glob(f"{_SCRATCH}*"):
        if is_private(former) and _is_left(former):
            remove_quietly(former)
    folder = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=place))
    held = opened_lock(folder / _HELD)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(held)
        remove_quietly(folder)


def _is_left(folder: Path) -> bool:
    """Whether the process whose folder it is has ended: nobody holds its lock."""
    try:
        held = opened_lock(folder / _HELD, make=False)
    except OSError:  # it may have been made just now
        return _is_old(folder.lstat())
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(held)
    return True


def _is_old(info: os.stat_result) -> bool:
    return abs(time.time() - info.st_mtime) > _LEFT_S


# -- moving and removing ---------------------------------------------------------------------------


def move(path: Path, name: str) -> Path:
    """Give what lies at `path`, a link too, another name in its folder."""
    with _folder(path.parent) as folder:
        os.rename(path.name, name, src_dir_fd=folder, dst_dir_fd=folder)
    return path.with_name(name)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, if it is there. Of a link the link goes,
    never what it leads to, there or anywhere below.

    Raises:
        OSError: it cannot be removed.
    """
    try:
        with _folder(path.parent) as folder:
            info = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISDIR(info.st_mode):
                shutil.rmtree(path.name, dir_fd=folder)
            else:
                os.unlink(path.name, dir_fd=folder)
    except FileNotFoundError:
        return


def remove_quietly(path: Path) -> None:
    """As `remove`, as far as it goes: for what would be there in vain."""
    with suppress(OSError):
        remove(path)


def forget_parts(folder: Path) -> None:
    """Remove what processes of this user left in a folder that died while they wrote into it."""
    with suppress(OSError):
        for path in list(folder.iterdir()):
            if path.name.startswith(_PART[0]) and path.name.endswith(_PART[1]):
                with suppress(OSError):
                    info = path.lstat()
                    if _is_old(info) and info.st_uid == os.geteuid():
                        remove(path)


# -- in words --------------------------------------------------------------------------------------


def how_to_write(error: OSError) -> str:
    """What to do about an error that writing into a folder raised."""
    return _WRITABLE.get(error.errno or 0, "look at that disk and at `dmesg | tail`")


def why_unreadable(error: OSError | ValueError) -> str:
    """What an error says that reading raised, without the name that stands beside it anyway."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
