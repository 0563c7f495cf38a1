"""The only access to files that other users can reach: all reads, writes and removals happen here.

A folder may belong to another user, who can swap a file for a link, a pipe or a device at any time.
So files are checked by open descriptor, never by name; new files get random names that must not
exist; folders are opened once and then used through that descriptor. Reads never block on input
that may never come, and never read more than a file of its kind can contain.

A name may also refer to an already open descriptor: `/dev/stdin`, and `/dev/fd/63`, which a shell
creates for `<(command)`. The parent process is responsible for these.
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
from contextlib import ExitStack, contextmanager, suppress
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from gpumix.schema.errors import MachineError
from gpumix.schema.file_errors import describe_write_fix

# Maximum size of a kind of file: a marker file of gpumix; a document, such as a plan of 65,536
# devices; the index of a checkpoint; a line of a log.
MARK_BYTES = 2**20
DOCUMENT_BYTES = 2**28
INDEX_BYTES = 2**31
LINE_BYTES = 2**24
# Bytes of a log searched for the end of a line longer than `LINE_BYTES`.
LOST_BYTES = 2**28

# Names of descriptors passed in by the parent process; not checked.
_HANDED = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_BLOCK_BYTES = 2**20
_LINKS = 40  # the kernel's limit of consecutive links
_PART = ".gpumix-", ".part"  # start and end of the names of unfinished files
_SCRATCH, _LOCKING, _HELD = "gpumix-scratch-", ".locking", ".held"
_LEFT_S = 600.0  # anything not written for this long belongs to a dead process


class NotAFileError(OSError):
    """The name refers to a pipe, a socket or a device, or to a link of another user."""


class TooLargeError(OSError):
    """A file larger than the limit of its kind."""


# -- what a name is of -----------------------------------------------------------------------------


def find_special_kind(path: Path) -> str | None:
    """Return the kind of a special file whose reads may block or never end, such as "a pipe"; None
    for a file, a folder or a missing name."""
    try:
        return _KINDS.get(stat.S_IFMT(path.stat().st_mode))
    except OSError:
        return None


def check_is_file(path: Path) -> None:
    """Raise NotAFileError if reads may never end, before a library receives the name."""
    kind = find_special_kind(path)
    if kind is not None and not str(path).startswith(_HANDED):
        raise NotAFileError(errno.EINVAL, f"it is {kind}, not a file", str(path))


def is_private(path: Path) -> bool:
    """Return True for a folder, not a link, of this user and accessible to nobody else."""
    try:
        info = path.lstat()
    except OSError:
        return False
    closed = not info.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and closed


# -- reading ---------------------------------------------------------------------------------------


@contextmanager
def open_for_reading(path: Path) -> Iterator[BufferedReader[Any]]:
    """Open a file for reading.

    A link of another user is followed only to a file of the same user or a world-readable file:
    otherwise the link's owner would read with the rights of this process.

    Raises:
        NotAFileError: reads may never end, or the link leads to a file not owned by its owner.
        OSError: the file cannot be read.
    """
    if str(path).startswith(_HANDED):
        with path.open("rb") as stream:
            yield stream
        return
    check_is_file(path)  # before opening, which triggers actions on some devices
    descriptor = _open_following(path)
    try:
        info = os.fstat(descriptor)
        _refuse_others(info, path)
        reader = io.FileIO if info.st_size else _NonblockingFile
        with BufferedReader(reader(descriptor, "rb", closefd=False)) as stream:
            yield stream
    finally:
        os.close(descriptor)


class _NonblockingFile(io.FileIO):
    """A file of size 0, as in `/proc`. Reads raise an error instead of blocking."""

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
    """Open the target of a name without blocking; see `open_for_reading` about links."""
    descriptor, owners = _resolved(path, os.O_RDONLY | os.O_NOCTTY)
    info = os.fstat(descriptor)
    if owners - {0, os.geteuid(), info.st_uid} and not info.st_mode & stat.S_IROTH:
        os.close(descriptor)
        raise NotAFileError(
            errno.EACCES, "it is a link of another user to a file that is not theirs"
        )
    return descriptor


def _resolved(path: Path, flags: int) -> tuple[int, set[int]]:
    """Return a descriptor of the target of a name, and the owners of the links followed. Links
    replaced in the meantime do not count."""
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
def open_trusted(path: Path) -> Iterator[int]:
    """Open a file to be executed, writable only by this user or root. Neither a link nor a file in
    a folder writable by others is accepted.

    Raises:
        NotAFileError: another user may have written the file.
        OSError: the file cannot be read.
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


def make_descriptor_path(descriptor: int, path: Path) -> str:
    """Return a name for an open file that survives changes to `path`, if the system supports it."""
    name = Path(f"/proc/self/fd/{descriptor}")
    return str(name if name.exists() else path)


def _is_trusted(info: os.stat_result) -> bool:
    """Return True if only this user or root can write to the file or folder."""
    mine = info.st_uid in (0, os.geteuid())
    return mine and not info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def read_bytes(path: Path, most_bytes: int = DOCUMENT_BYTES) -> bytes:
    """Read a file of at most `most_bytes`; never read more.

    Raises:
        TooLargeError: the file is larger. Also raises the errors of `open_for_reading`.
    """
    with open_for_reading(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        found = stream.read(most_bytes + 1) if size <= most_bytes else b""
    if max(size, len(found)) > most_bytes:
        has = f"{size:,}" if size > most_bytes else "more"
        raise TooLargeError(
            errno.EFBIG, f"it has {has} bytes, {most_bytes:,} are the most", str(path)
        )
    return found


def read_text(path: Path, most_bytes: int = DOCUMENT_BYTES) -> str:
    """Read a UTF-8 file; raise as `read_bytes`, and UnicodeDecodeError for invalid UTF-8."""
    return read_bytes(path, most_bytes).decode("utf-8")


def read_log(path: Path) -> str:
    """Read a text file for people or from the kernel, replacing invalid UTF-8. Raises as
    `read_bytes`."""
    return read_bytes(path, DOCUMENT_BYTES).decode("utf-8", errors="replace")


def iterate_lines(stream: BufferedReader) -> Iterator[bytes]:
    """Yield the lines from the current position, with line ends. Lines longer than `LINE_BYTES` are
    cut. Iteration ends if the end of a long line is not found within `LOST_BYTES`."""
    while line := stream.readline(LINE_BYTES):
        yield line
        lost = 0
        while len(line) == LINE_BYTES and not line.endswith(b"\n"):
            line, lost = stream.readline(LINE_BYTES), lost + LINE_BYTES
            if lost >= LOST_BYTES:
                return


def iterate_lines_from_end(stream: BufferedReader) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file from last to first, each with its offset. Lines longer than
    `LINE_BYTES` are skipped. Iteration ends if the start of a long line is not within
    `LOST_BYTES`."""
    end = stream.seek(0, os.SEEK_END)
    rest, lost = b"", 0  # from `end`: the tail of a line starting before it
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
    """Copy `count` bytes from the current position."""
    while count > 0 and (block := stream.read(min(count, _BLOCK_BYTES))):
        into.write(block)
        count -= len(block)


# -- writing ---------------------------------------------------------------------------------------


@contextmanager
def _folder(path: Path) -> Iterator[int]:
    """Open a folder to write into. A link to the folder must belong to this user or root."""
    descriptor, owners = _resolved(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if owners - {0, os.geteuid()}:
            raise NotAFileError(errno.ELOOP, "it is a link of another user", str(path))
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def replace_atomically(
    path: Path, *, mode: int = 0o666, durable: bool = False
) -> Iterator[BufferedWriter]:
    """Open a new file for writing that atomically replaces `path` at the end of the block. On an
    error, `path` stays unchanged. An existing file or link is never written into.

    Args:
        mode: permissions of the new file before the umask.
        durable: make the file survive a crash of the machine.

    Raises:
        OSError: the file cannot be written.
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
    """Write a file atomically: readers never see a partial file; see `replace_atomically`."""
    with replace_atomically(path, mode=mode, durable=durable) as stream:
        stream.write(content)


def write_text_atomically(
    path: Path, text: str, *, mode: int = 0o666, durable: bool = False
) -> None:
    """Write UTF-8 text atomically; see `write_bytes`."""
    write_bytes(path, text.encode("utf-8"), mode=mode, durable=durable)


def write_in_place(path: Path, text: str) -> None:
    """Write into an existing file, used when there is no room for a second file."""
    with os.fdopen(_regular(path, os.O_WRONLY), "wb") as stream:
        stream.write(text.encode("utf-8"))
        stream.truncate()


def replace_text(path: Path, text: str, *, cannot: str, fix: str = "") -> None:
    """Write a file atomically, creating the folder if needed.

    Args:
        cannot: the error message on failure, such as "cannot write the report".
        fix: the fix reported on failure; by default it depends on the cause.

    Raises:
        MachineError: the file cannot be written; nothing was changed.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, text)
    except OSError as error:
        why = error.strerror or str(error)
        fix = fix or f"{describe_write_fix(error)}, or write elsewhere"
        raise MachineError(
            cannot, code="file-not-writable", where=str(path), why=why, fix=fix
        ) from error


def _regular(path: Path, flags: int) -> int:
    """Open a regular file for writing, and create the file if `flags` contain `O_CREAT`. Links are
    refused: link targets are never written. Nor is a hard link in a folder of another user.

    Raises:
        NotAFileError: not a regular file.
        OSError: the file cannot be opened.
    """
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    with _folder(path.parent) as folder:
        try:
            descriptor = os.open(path.name, flags, 0o666, dir_fd=folder)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                kind = "a link" if error.errno == errno.ELOOP else "a pipe"
                raise NotAFileError(error.errno, f"it is {kind}, not a file", str(path)) from error
            raise
        try:
            info = os.fstat(descriptor)
            _refuse_others(info, path)
            theirs = os.fstat(folder).st_uid not in (0, os.geteuid())
            if info.st_nlink > 1 and theirs:  # the other name may be of a file of this user
                raise NotAFileError(errno.EMLINK, "it has another name as well", str(path))
        except OSError:
            os.close(descriptor)
            raise
    return descriptor


def open_log(path: Path) -> TextIO:
    """Open a text file for appending, creating the file if needed.

    Raises:
        NotAFileError: the file is a link, a pipe or a device.
        OSError: the file cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.fdopen(_regular(path, flags), "a", encoding="utf-8")


def open_lock_file(path: Path, *, make: bool = True) -> int:
    """Open a file for locking (`flock`) without changing its content; create the file if `make` is
    set. Raises as `open_log`."""
    return _regular(path, os.O_RDWR | (os.O_CREAT if make else 0))


def create_private_file(path: Path) -> int:
    """Create a new file readable only by this user, replacing an existing file. Not atomic.

    Raises:
        OSError: the file cannot be created.
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
    """Create a folder in an existing folder.

    Raises:
        OSError: the folder cannot be created.
    """
    with _folder(path.parent) as folder:
        os.mkdir(path.name, dir_fd=folder)


def make_private(path: Path) -> None:
    """Create a folder accessible only to this user, or check the permissions of an existing folder.

    Raises:
        NotAFileError: another user owns or can enter the folder, or `path` is a link.
        OSError: the folder cannot be created.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if not is_private(path):
        raise NotAFileError(errno.EACCES, "it is not this user's alone", str(path))


def make_library_folder(path: Path, names: str = "*") -> Path:
    """Create or reuse a folder in which a library opens files by name, without the checks made
    here. Whatever another user put there to redirect it is refused; who can write the folder
    meanwhile is trusted.

    Args:
        names: pattern of the names that the library uses.

    Raises:
        NotAFileError: the folder or a name in it is a link or a special file of another user.
        OSError: the folder cannot be created.
    """
    if not path.is_symlink():  # else it is not made, but looked at
        path.mkdir(parents=True, exist_ok=True)
    for one in (path, *path.glob(names)):
        info = one.lstat()
        plain = stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)
        if not plain and info.st_uid not in (0, os.geteuid()):
            kind = _KINDS.get(stat.S_IFMT(info.st_mode), "a link")
            raise NotAFileError(errno.ELOOP, f"it is {kind} of another user", str(one))
    return path


def make_private_folder(path: Path) -> Path:
    """Create or reuse a folder accessible only to this user. If another user can enter the folder,
    return a scratch folder instead, until this process exits.

    Raises:
        OSError: neither folder can be created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        make_private(path)
    except NotAFileError:
        path = make_process_scratch()
    return path


def make_process_scratch(root: Path | None = None) -> Path:
    """Create a scratch folder that stays until this process exits; see `make_scratch_folder`."""
    stack, owner = ExitStack(), os.getpid()
    path = stack.enter_context(make_scratch_folder(root))
    atexit.register(lambda: stack.close() if os.getpid() == owner else None)
    return path


@contextmanager
def make_scratch_folder(root: Path | None = None, prefix: str = _SCRATCH) -> Iterator[Path]:
    """Create a folder for files of this process, accessible only to this user; remove the folder at
    the end of the block. Folders left by killed processes are removed by the next process.

    Args:
        root: folder to create it in; default: that of temporary files.
        prefix: of the folder's name.

    Raises:
        OSError: the folder cannot be created.
    """
    root = root or Path(tempfile.gettempdir())
    for former in root.glob(f"{prefix}*"):
        if is_private(former) and _is_left(former):
            remove_quietly(former)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
    held = open_lock_file(folder / _LOCKING)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        # Under its name nobody finds it unlocked: that would be a folder of an ended process.
        move(folder / _LOCKING, _HELD)
        yield folder
    finally:
        os.close(held)
        remove_quietly(folder)


def _is_left(folder: Path) -> bool:
    """Return True if the folder's process has ended: nobody holds the lock."""
    try:
        held = open_lock_file(folder / _HELD, make=False)
    except OSError:  # the folder may have been created just now
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
    """Rename the file, folder or link at `path` within its folder."""
    with _folder(path.parent) as folder:
        os.rename(path.name, name, src_dir_fd=folder, dst_dir_fd=folder)
    return path.with_name(name)


def remove(path: Path) -> None:
    """Remove a file, or a folder with its content, if present. Links are removed, never followed,
    also anywhere below.

    Raises:
        OSError: the file or folder cannot be removed.
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
    """Remove as much as possible of a file or folder no longer needed, ignoring errors."""
    with suppress(OSError):
        remove(path)


def remove_partial_files(folder: Path) -> None:
    """Remove partial files left in a folder by dead processes of this user."""
    with suppress(OSError):
        for path in list(folder.iterdir()):
            if path.name.startswith(_PART[0]) and path.name.endswith(_PART[1]):
                with suppress(OSError):
                    info = path.lstat()
                    if _is_old(info) and info.st_uid == os.geteuid():
                        remove(path)
