"""Plain text as samples: files are found, tokenized once, and packed.

Every file, or every line, is one document and ends with the tokenizer's end-of-text token. Files
are streamed, so a corpus may be larger than memory. Numpy only.
"""

from __future__ import annotations

import codecs
import os
import re
import shlex
import stat
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from gpumix.data.core.token_file import (
    PackedText,
    SourceFile,
    TokenFileRecipe,
    TokenWriter,
    open_token_file,
)
from gpumix.data.core.tokenizer import Tokenizer
from gpumix.schema.errors import InputError
from gpumix.schema.files import open_for_reading
from gpumix.schema.job.job import DataSpec

# Bytes read at once. Part of the format: text is tokenized piece by piece, cut at ends of lines, so
# another size may give other tokens at the cuts.
_CHUNK_BYTES = 2**20
_BATCH_CHARACTERS = 8 * _CHUNK_BYTES
_PIECE_CHARACTERS = 256  # memory overhead of a piece, in characters
_BINARY_PROBE_BYTES = 8192
_COMPRESSED = re.compile(
    rb"(\x1f\x8b\x08)|(\x28\xb5\x2f\xfd)|(BZh[1-9]1AY&SY)|(\xfd7zXZ\0)", re.DOTALL
)
_UNPACK_COMMANDS = {1: "gunzip -k", 2: "unzstd", 3: "bunzip2 -k", 4: "unxz -k"}  # by regex group

Piece = tuple[bytes | str, bool]  # a part of a document, and whether the document ends with it


def pack_text(
    spec: DataSpec, tokenizer: Tokenizer, sequence_length: int, cache: Path
) -> PackedText:
    """Pack the text named by `spec` into samples of `sequence_length` tokens.

    Files come in the order of `spec.text`, those of a folder sorted by path. Empty files of a
    folder add nothing; hidden files and folders are skipped. The byte tokenizer accepts any file;
    others take UTF-8 and refuse binary files.

    Raises:
        InputError: a file is missing, unreadable, named twice, or empty though named; nothing
            matches `spec.pattern`; too few tokens for one sample of concatenated text, or none.
        MachineError: the cache cannot be written.
    """
    files = find_files(spec)
    by_line = spec.document == "line"
    how = "lines" if by_line else "text"
    recipe = TokenFileRecipe(tuple(files), tokenizer.fingerprint, tokenizer.vocab_size, how)

    def fill(writer: TokenWriter) -> None:
        of_file = _read_lines if by_line else _read_pieces
        pieces = chain.from_iterable(of_file(file.path, tokenizer) for file in files)
        write_documents(pieces, tokenizer, writer)

    at_least = None if spec.packing == "concatenate" else 1
    return open_token_file(cache, recipe, sequence_length, fill, at_least=at_least)


def write_documents(pieces: Iterable[Piece], tokenizer: Tokenizer, writer: TokenWriter) -> None:
    """Tokenize `pieces`, many at a time, and end each document with the end-of-text token."""
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece[0]) + _PIECE_CHARACTERS
        if characters >= _BATCH_CHARACTERS:
            _write_batch(batch, tokenizer, writer)
            batch, characters = [], 0
    _write_batch(batch, tokenizer, writer)


def find_files(spec: DataSpec) -> list[SourceFile]:
    """Return the files named by `spec.text` and `spec.pattern`, none of them empty, in order."""
    folders = [path for path in spec.text if stat.S_ISDIR(_status(path).st_mode)]
    if spec.pattern != "*" and not folders:
        raise InputError(
            "data.pattern chooses files of a folder, and data.text names none",
            code="pattern-without-text",
            fix="take data.pattern away, or name a folder",
        )
    files = [file for path in spec.text for file in _files_of(path, spec.pattern)]
    if not files:
        raise InputError(
            f"no file with text in it matches the pattern '{spec.pattern}' below "
            + ", ".join(str(path) for path in folders),
            code="pattern-matches-nothing",
            where="data.pattern",
            fix="put some there, or change data.pattern, which is matched against the end of a "
            "file's path",
        )
    seen: set[Path] = set()
    for file in files:
        if file.path in seen:
            raise InputError(
                "data.text reaches this file twice",
                code="text-file-twice",
                where=str(file.path),
                fix="name the file or its folder, not both",
            )
        seen.add(file.path)
    return files


def probe_text(spec: DataSpec, tokenizer: Tokenizer) -> list[SourceFile]:
    """Return the files as `find_files` does, once the beginning of each is known to be text that
    the tokenizer takes. Errors as in `pack_text`."""
    files = find_files(spec)
    for file in files:
        chunks = _chunks(file.path)
        next(chunks if tokenizer.reads_bytes else _refuse_binary(file.path, chunks), None)
    return files


def _files_of(path: Path, pattern: str) -> Iterator[SourceFile]:
    """Yield the file `path`, or the files with content below the folder `path` matching
    `pattern`."""
    status = _status(path)
    if stat.S_ISDIR(status.st_mode):
        for inner in _list_files(path):
            relative = PurePosixPath(inner.relative_to(path).as_posix())
            if _matches(relative, pattern):
                status = _status(inner)
                if stat.S_ISREG(status.st_mode) and status.st_size:
                    yield _describe_file(inner, status)
    elif not stat.S_ISREG(status.st_mode):
        raise InputError(
            "this is neither a file nor a folder",
            code="text-not-file-or-folder",
            where=str(path),
            fix="take it off data.text",
        )
    elif not status.st_size:
        raise InputError(
            "the file is empty", code="text-empty", where=str(path), fix="take it off data.text"
        )
    else:
        yield _describe_file(path, status)


def _describe_file(path: Path, status: os.stat_result) -> SourceFile:
    try:
        return SourceFile.of(path, status)
    except OSError as error:
        raise _make_read_error(path, error) from error


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise _make_read_error(path, error) from error


def _list_files(folder: Path) -> list[Path]:
    """Return all visible files below `folder`, sorted by path; linked folders are followed once."""

    def fail(error: OSError) -> None:
        raise _make_read_error(Path(error.filename), error) from error

    found: list[Path] = []
    seen: set[Path] = set()
    for here, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        real = Path(here).resolve()
        folders[:] = [] if real in seen else [f for f in folders if not f.startswith(".")]
        if real not in seen:
            found += [Path(here, name) for name in names if not name.startswith(".")]
        seen.add(real)
    return sorted(found)


def _matches(relative: PurePosixPath, pattern: str) -> bool:
    try:
        return relative.match(pattern)
    except ValueError as error:
        raise InputError(
            f"data.pattern: '{pattern}' is no pattern",
            code="pattern-invalid",
            why=str(error),
            fix="write a pattern such as *.txt",
        ) from error


def _read_pieces(path: Path, tokenizer: Tokenizer) -> Iterator[Piece]:
    """Yield the document in the file `path`, in pieces as the tokenizer takes them."""
    chunks = _chunks(path)
    if tokenizer.reads_bytes:
        for chunk in chunks:
            yield chunk, False
        yield b"", True
    else:
        yield from _decode_chunks(_refuse_binary(path, chunks))


def _read_lines(path: Path, tokenizer: Tokenizer) -> Iterator[Piece]:
    """Yield every non-blank line of the file `path`, without its end, as a document."""
    newline: Any = b"\n" if tokenizer.reads_bytes else "\n"
    carriage: Any = b"\r" if tokenizer.reads_bytes else "\r"
    begun: list[Any] = []  # parts of the current line, which may be long
    for piece, last in _read_pieces(path, tokenizer):
        *ended, rest = piece.split(newline)
        for line in [*ended, rest] if last else ended:
            whole = newline[:0].join([*begun, line]).removesuffix(carriage)
            begun = []
            if whole.strip():
                yield whole, True
        begun.append(rest)


def _chunks(path: Path) -> Iterator[bytes]:
    try:
        with open_for_reading(path) as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise _make_read_error(path, error) from error


def _refuse_binary(path: Path, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield `chunks`, unless the first is compressed or has NUL bytes: raise an InputError."""
    for number, chunk in enumerate(chunks):
        packer = _COMPRESSED.match(chunk) if number == 0 else None
        if packer is not None:
            raise InputError(
                "this file is compressed",
                code="text-compressed",
                where=str(path),
                fix=f"unpack it: {_UNPACK_COMMANDS[packer.lastindex or 0]} {shlex.quote(str(path))}"
                "; or leave it out with data.pattern",
            )
        if number == 0 and b"\0" in chunk[:_BINARY_PROBE_BYTES]:
            raise InputError(
                "this file is binary, or not in UTF-8",
                code="text-not-utf8",
                where=str(path),
                why="it holds NUL bytes",
                fix="leave it out with data.pattern, save it as UTF-8, or set tokenizer: bytes",
            )
        yield chunk


def _decode_chunks(chunks: Iterator[bytes]) -> Iterator[Piece]:
    """Yield text of about one chunk each, cut after the last end of line, or else before a
    space."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
    rest = ""
    for chunk in chunks:
        text = rest + decoder.decode(chunk)
        cut = text.rfind("\n") + 1 or max(text.rfind(" "), 0) or len(text)
        yield text[:cut], False
        rest = text[cut:]
    yield rest + decoder.decode(b"", final=True), True


def _write_batch(batch: list[Piece], tokenizer: Tokenizer, writer: TokenWriter) -> None:
    """Tokenize one batch. Empty pieces bypass the tokenizer, which might add a prefix."""
    encoded = iter(tokenizer.encode_batch([text for text, _ in batch if text]))
    end = np.array([tokenizer.end_of_text], dtype=writer.dtype)
    parts: list[np.ndarray] = []
    last: list[int] = []  # parts that end a document
    for text, ends in batch:
        if text:
            parts.append(next(encoded).astype(writer.dtype, copy=False))
        if ends:
            last.append(len(parts))
            parts.append(end)
    if parts:
        offsets = np.cumsum([len(part) for part in parts])
        writer.write(np.concatenate(parts), offsets[last])


def _make_read_error(path: Path, error: OSError) -> InputError:
    missing = isinstance(error, FileNotFoundError)
    return InputError(
        f"cannot read the text: {error.strerror}",
        code="text-unreadable",
        where=str(path),
        fix="correct data.text; its paths start from the job's folder" if missing else "",
    )
