"""Token files: a flat memory-mapped stream of tokens per corpus, built once per machine.

A JSON sidecar records the inputs of the stream; while they are unchanged, the stream is reused. One
process builds it, atomically; the others wait. Numpy only.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpumix.data.core.build_lock import hold_build_lock
from gpumix.data.core.tokenizer import choose_token_dtype
from gpumix.schema.errors import InputError, MachineError
from gpumix.schema.files import (
    MARK_BYTES,
    create_private_file,
    move,
    open_for_reading,
    read_text,
    remove,
    remove_quietly,
    replace_atomically,
    write_text_atomically,
)

_FORMAT_VERSION = 4  # new with each change in making tokens: old caches are built again
_HASHED_BYTES = 2**14  # hashed at the beginning, middle and end of a source
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class SourceFile:
    """A source file of a corpus, as found before reading. `sample` hashes beginning, middle and
    end, for copying tools may keep times, and editors sizes."""

    path: Path
    size: int
    mtime_ns: int
    sample: str

    @classmethod
    def of(cls, path: Path, status: os.stat_result) -> SourceFile:
        size = status.st_size
        digest = hashlib.sha256()
        with open_for_reading(path) as stream:
            for begin in (0, size // 2, size - _HASHED_BYTES):
                stream.seek(max(0, begin))
                digest.update(stream.read(_HASHED_BYTES))
        return cls(path.absolute(), size, status.st_mtime_ns, digest.hexdigest()[:16])


@dataclass(frozen=True)
class TokenFileRecipe:
    """Inputs of a token file; `how` distinguishes ways to read the same files."""

    sources: tuple[SourceFile, ...]
    tokenizer: str
    vocab_size: int
    how: str = "text"

    @property
    def key(self) -> str:
        """The name of the token file in the cache, independent of the sources' content."""
        return _digest(self.tokenizer, self.how, [str(s.path) for s in self.sources])[:16]

    @property
    def sources_digest(self) -> str:
        """A digest that changes with the size, the time stamp or the sample of any source."""
        return _digest([(str(s.path), s.size, s.mtime_ns, s.sample) for s in self.sources])


@dataclass(frozen=True)
class _Sidecar:
    """Contents of the JSON file next to a token file; `sha256` is the hash of the tokens."""

    format: int
    recipe: str
    sources: int
    source_bytes: int
    tokenizer: str
    file: str
    dtype: str
    tokens: int
    documents: int
    sha256: str


@dataclass(frozen=True)
class PackedText:
    """A stream of tokens, cut into samples of `sequence_length`; the tail is dropped.

    `stream` is memory-mapped, one dimension; `ends` are the offsets after the last token of each
    document, memory-mapped too; `sha256` is the hash of the stream's content, equal on every
    machine that packs the same corpus.
    """

    stream: np.ndarray
    ends: np.ndarray
    sequence_length: int
    sha256: str

    def __len__(self) -> int:
        return len(self.stream) // self.sequence_length

    def tokens(self, samples: np.ndarray) -> np.ndarray:
        """Return int64[len(samples), sequence_length]: sample k is tokens [k*L, (k+1)*L)."""
        table = self.stream[: len(self) * self.sequence_length].reshape(-1, self.sequence_length)
        rows: np.ndarray = table[samples].astype(np.int64)
        return rows


class TokenWriter:
    """A writer that appends tokens to a part file; as a context, it leaves no part file behind."""

    def __init__(self, part: Path, vocab_size: int, heartbeat: Callable[[], None]) -> None:
        self.dtype = choose_token_dtype(vocab_size)
        self.count = 0
        self.ends: list[np.ndarray] = []
        self._part = part
        self._heartbeat = heartbeat
        self._sha = hashlib.sha256()
        try:
            self._file = os.fdopen(create_private_file(part), "wb", buffering=0)
        except OSError as error:
            raise make_write_error(part, error) from error

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        remove(self._part)

    def write(self, tokens: np.ndarray, ends: np.ndarray) -> None:
        """Append `tokens`, one dimension of ids below the vocabulary's size; `ends` are the numbers
        of tokens after which documents end.

        Raises:
            MachineError: the disk is full or fails.
        """
        raw = np.ascontiguousarray(tokens, dtype=self.dtype).view(np.uint8).data
        self._sha.update(raw)
        self.ends.append(self.count + ends.astype(np.int64))
        self.count += len(tokens)
        try:
            while raw.nbytes:  # an unbuffered write may take only a part
                raw = raw[self._file.write(raw) :]
        except OSError as error:
            raise make_write_error(self._part, error) from error
        self._heartbeat()

    def finish(self, folder: Path, key: str) -> tuple[str, str]:
        """Name the part file by its hash, and write the document ends next to it; return (name,
        sha256)."""
        sha = self._sha.hexdigest()
        name = f"{key}-{sha[:12]}.tokens"
        try:
            with replace_atomically(folder / _name_ends_file(name), durable=True) as file:
                np.concatenate([np.empty(0, dtype=np.int64), *self.ends]).tofile(file)
            os.fsync(self._file.fileno())  # before the name is valid, so a crash loses no data
            move(self._part, name)
        except OSError as error:
            raise make_write_error(self._part, error) from error
        return name, sha


def open_token_file(
    cache: Path,
    recipe: TokenFileRecipe,
    sequence_length: int,
    fill: Callable[[TokenWriter], None],
    *,
    at_least: int | None = None,
) -> PackedText:
    """Return the token file of `recipe` in the folder `cache`; `fill` writes it if missing or
    outdated. It must have `at_least` tokens, by default enough for one sample.

    Any number of processes may call this at once: one builds, the others wait as long as it makes
    progress; see `hold_build_lock`.

    Raises:
        InputError: there are fewer tokens; whatever `fill` raises.
        MachineError: the cache cannot be written, or its builder hangs.
    """
    found = _load_current(cache, recipe)
    if found is None:
        with hold_build_lock(cache / f"{recipe.key}.lock") as heartbeat:
            found = _load_current(cache, recipe)
            if found is None:
                _build(cache, recipe, fill, heartbeat)
                found = _load_current(cache, recipe)
    if found is None:
        raise MachineError(
            "the packed text vanished while it was opened",
            code="packed-text-vanished",
            where=str(cache),
        )
    stream, ends, sha = found
    if len(stream) < (sequence_length if at_least is None else at_least):
        first, others = recipe.sources[0].path, len(recipe.sources) - 1
        raise InputError(
            f"the text has {len(stream)} tokens, one sample takes {sequence_length}",
            code="text-shorter-than-sample",
            where=f"{first} and {others} more" if others else str(first),
            fix="give more text, or lower sequence_length",
        )
    return PackedText(stream, ends, sequence_length, sha)


def _load_current(
    cache: Path, recipe: TokenFileRecipe
) -> tuple[np.ndarray, np.ndarray, str] | None:
    """Return (stream, ends, sha256) cached for `recipe`, or None if missing or outdated."""
    try:
        card = _Sidecar(**json.loads(read_text(cache / f"{recipe.key}.json", MARK_BYTES)))
        if (card.format, card.recipe) != (_FORMAT_VERSION, recipe.sources_digest):
            return None
        if not card.tokens:
            return np.empty(0, dtype=card.dtype), np.empty(0, dtype=np.int64), card.sha256
        stream = np.memmap(cache / card.file, dtype=card.dtype, mode="r")
        ends = np.memmap(cache / _name_ends_file(card.file), dtype=np.int64, mode="r")
    except (OSError, ValueError, TypeError):  # missing, or damaged by a crash: build again
        return None
    whole = (len(stream), len(ends)) == (card.tokens, card.documents)
    return (stream, ends, card.sha256) if whole else None


def _name_ends_file(name: str) -> str:
    """Return the name of the file with the document ends of a token file."""
    return f"{name.removesuffix('.tokens')}.ends"


def _build(
    cache: Path,
    recipe: TokenFileRecipe,
    fill: Callable[[TokenWriter], None],
    heartbeat: Callable[[], None],
) -> None:
    """Write the token file, and last the sidecar validating it; remove older files."""
    with TokenWriter(cache / f".{recipe.key}.part", recipe.vocab_size, heartbeat) as writer:
        fill(writer)
        name, sha = writer.finish(cache, recipe.key)
    card = _Sidecar(
        format=_FORMAT_VERSION,
        recipe=recipe.sources_digest,
        sources=len(recipe.sources),
        source_bytes=sum(s.size for s in recipe.sources),
        tokenizer=recipe.tokenizer,
        file=name,
        dtype=writer.dtype.str,
        tokens=writer.count,
        documents=sum(map(len, writer.ends)),
        sha256=sha,
    )
    path, files = cache / f"{recipe.key}.json", (name, _name_ends_file(name))
    try:
        write_text_atomically(path, json.dumps(asdict(card), indent=1) + "\n")
    except OSError as error:
        for file in files:
            remove_quietly(cache / file)
        raise make_write_error(path, error) from error
    for old in [*cache.glob(f"{recipe.key}-*.tokens"), *cache.glob(f"{recipe.key}-*.ends")]:
        if old.name not in files:  # processes that have it mapped keep it until they unmap it
            remove_quietly(old)
    _LOG.info("packed %d tokens from %d files into %s", card.tokens, card.sources, cache / name)


def make_write_error(path: Path, error: OSError, what: str = "the packed text") -> MachineError:
    """Return the error for a file in the cache that cannot be written."""
    return MachineError(
        f"cannot write {what}: {error.strerror}",
        code="packed-text-not-writable",
        where=str(path),
        fix=f"free space on the disk of {path.parent}, or use another cache folder",
    )


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps([_FORMAT_VERSION, *parts]).encode()).hexdigest()
