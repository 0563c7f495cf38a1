"""Packing: every error on the way names its file and leaves nothing behind."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import resource
import tempfile
from pathlib import Path

import pytest

from gpumix.data.core import token_file
from gpumix.data.core.tokenizer import FileTokenizer
from gpumix.data.text.files import pack_text
from gpumix.schema.errors import InputError, MachineError
from helpers.errors import raises
from helpers.samples.sources import pack, spec, write, write_tokenizer


def only_locks(cache: Path) -> bool:
    return all(path.suffix == ".lock" for path in cache.iterdir())


ZSTD = bytes.fromhex("28b52ffd200821000074686520636174") + b"\n"  # of "the cat", without a NUL


@pytest.mark.parametrize(
    ("content", "fix"),
    [
        (gzip.compress(b"the cat", mtime=1), "gunzip -k"),
        (bz2.compress(b"the cat"), "bunzip2 -k"),
        (lzma.compress(b"the cat"), "unxz -k"),
        (ZSTD.replace(b"\0", b""), "unzstd"),
    ],
)
def test_a_tokenizer_refuses_compressed_files(tmp_path, content, fix):
    """Some have no NUL bytes at their beginning, and were taken for text."""
    words = FileTokenizer(write_tokenizer(tmp_path / "tokenizer.json", "</s>"))
    file = write(tmp_path / "a b.gz", content)
    with raises(InputError, code="text-compressed") as caught:
        pack_text(spec(file), words, 4, tmp_path / "cache")
    assert caught.value.fix.startswith(f"unpack it: {fix} '{file}'")


def test_a_tokenizer_refuses_binary_files(tmp_path):
    words = FileTokenizer(write_tokenizer(tmp_path / "tokenizer.json", "</s>"))
    file = write(tmp_path / "a", b"one\0two")
    with raises(InputError, code="text-not-utf8") as caught:
        pack_text(spec(file), words, 2, tmp_path / "cache")
    assert caught.value.where == str(file)
    assert only_locks(tmp_path / "cache")


def test_missing_files_are_named(tmp_path):
    with raises(InputError, code="text-unreadable", what="No such file") as caught:
        pack(tmp_path, tmp_path / "nowhere")
    assert caught.value.where == str(tmp_path / "nowhere")


def test_an_empty_file_that_is_named_is_an_error(tmp_path):
    file = write(tmp_path / "a", b"")
    with raises(InputError, code="text-empty") as caught:
        pack(tmp_path, file)
    assert caught.value.where == str(file)


@pytest.mark.parametrize("content", [None, b""])
def test_a_folder_without_text_is_an_error(tmp_path, content):
    (tmp_path / "in").mkdir()
    if content is not None:
        write(tmp_path / "in" / "a.txt", content)
    with raises(InputError, code="pattern-matches-nothing") as caught:
        pack(tmp_path, tmp_path / "in")
    assert str(tmp_path / "in") in caught.value.what and caught.value.where == "data.pattern"


def test_a_pattern_that_matches_nothing_is_an_error(tmp_path):
    write(tmp_path / "in" / "a.md", b"text")
    with raises(InputError, code="pattern-matches-nothing", what="*.txt"):
        pack(tmp_path, tmp_path / "in", pattern="*.txt")


def test_a_pattern_without_a_folder_has_no_effect_and_is_refused(tmp_path):
    with raises(InputError, code="pattern-without-text"):
        pack(tmp_path, write(tmp_path / "a", b"text"), pattern="*.txt")


def test_an_empty_pattern_is_refused(tmp_path):
    write(tmp_path / "in" / "a.md", b"text")
    with raises(InputError, code="pattern-invalid"):
        pack(tmp_path, tmp_path / "in", pattern="")


def test_a_file_that_is_reached_twice_is_an_error(tmp_path):
    file = write(tmp_path / "in" / "a", b"text")
    with raises(InputError, code="text-file-twice") as caught:
        pack(tmp_path, file, tmp_path / "in")
    assert caught.value.where == str(file)


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with raises(InputError, code="text-not-file-or-folder"):
        pack(tmp_path, tmp_path / "pipe")


@pytest.fixture
def somebody():
    """A folder that everybody may enter; as root, the test goes on as a user without rights."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        root = os.geteuid() == 0
        yield Path(name), (lambda: os.seteuid(65534)) if root else (lambda: None)
        if root:
            os.seteuid(0)


@pytest.mark.parametrize("closed", ["file", "folder", "above"])
def test_what_may_not_be_read_is_named(somebody, closed):
    place, step_down = somebody
    file = write(place / "in" / "a", b"text")
    named = {"file": file, "folder": file.parent, "above": file}[closed]
    (file if closed == "file" else file.parent).chmod(0)
    (place / "cache").mkdir(mode=0o777)
    (place / "cache").chmod(0o777)
    step_down()
    with raises(InputError, code="text-unreadable", what="Permission denied") as caught:
        pack(place, named)
    assert caught.value.where == str(named)
    assert only_locks(place / "cache")


@pytest.fixture
def small_files():
    """No file may grow beyond 64 KiB: the write fails as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path, small_files):
    files = [write(tmp_path / name, bytes(60_000)) for name in "ab"]
    with raises(MachineError, code="packed-text-not-writable", what="File too large") as caught:
        pack(tmp_path, *files)
    assert "free space" in caught.value.fix
    assert only_locks(tmp_path / "cache")


def test_a_full_disk_at_the_sidecar_leaves_nothing_either(tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    file = write(tmp_path / "a", b"some text")
    monkeypatch.setattr(token_file, "write_text_atomically", full)
    with raises(MachineError, code="packed-text-not-writable", what="No space left"):
        pack(tmp_path, file)
    assert only_locks(tmp_path / "cache")
