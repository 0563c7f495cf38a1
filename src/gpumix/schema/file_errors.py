"""Errors of files in words: the cause, and the fix."""

from __future__ import annotations

import errno

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


def describe_write_fix(error: OSError) -> str:
    """Return the fix for an error raised while writing into a folder."""
    return _WRITABLE.get(error.errno or 0, "look at that disk and at `dmesg | tail`")


def explain_unreadable(error: Exception) -> str:
    """Return the reason of an error raised while reading, without the file name."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
