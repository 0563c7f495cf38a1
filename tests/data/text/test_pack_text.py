"""Packing: what the samples hold, and when the cache is used again."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpumix.data.core.tokenizer import ByteTokenizer, FileTokenizer
from gpumix.data.text import files as text_module
from gpumix.data.text.files import pack_text
from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.samples.sources import pack, spec, write

END = 256


def stream_of(*documents: bytes) -> list[int]:
    return [token for document in documents for token in [*document, END]]


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(documents=st.lists(st.binary(min_size=1, max_size=60), min_size=1), length=st.integers(2, 9))
def test_samples_are_the_stream_cut_and_the_tail_is_dropped(tmp_path, documents, length):
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    for number, document in enumerate(documents):
        write(folder / "in" / f"{number:03}", document)
    stream = stream_of(*documents)
    if len(stream) < length:
        with raises(InputError, code="text-shorter-than-sample", what=len(stream)):
            pack(folder, folder / "in", length=length)
        return
    packed = pack(folder, folder / "in", length=length)
    assert len(packed) == len(stream) // length
    rows = packed.tokens(np.arange(len(packed)))
    assert rows.dtype == np.int64 and rows.shape == (len(packed), length)
    assert rows.reshape(-1).tolist() == stream[: len(packed) * length]


def test_chunks_do_not_change_the_tokens(tmp_path, monkeypatch):
    file = write(tmp_path / "a", bytes(range(256)) * 40)
    whole = pack(tmp_path, file).sha256
    monkeypatch.setattr(text_module, "_CHUNK_BYTES", 7)
    monkeypatch.setattr(text_module, "_BATCH_CHARACTERS", 100)
    assert pack_text(spec(file), ByteTokenizer(), 4, tmp_path / "other").sha256 == whole


def test_folders_are_read_sorted_without_hidden_and_empty_files(tmp_path):
    root = tmp_path / "in"
    write(root / "b.txt", b"bb")
    write(root / "a" / "z.txt", b"az")
    write(root / "a" / "deep" / "y.txt", b"ay")
    write(root / "empty.txt", b"")
    write(root / ".hidden.txt", b"no")
    write(root / ".git" / "x.txt", b"no")
    (root / "a" / "loop").symlink_to(root)
    assert pack(tmp_path, root).stream.tolist() == stream_of(b"ay", b"az", b"bb")


def test_patterns_match_the_end_of_the_path(tmp_path):
    root = tmp_path / "in"
    for name in ("wiki/a.txt", "wiki/b.md", "news/c.txt"):
        write(root / name, name.encode())
    names = {"*.txt": ["news/c.txt", "wiki/a.txt"], "wiki/*": ["wiki/a.txt", "wiki/b.md"]}
    for pattern, matching in names.items():
        packed = pack(tmp_path, root, pattern=pattern)
        assert packed.stream.tolist() == stream_of(*(name.encode() for name in matching))


def test_the_order_of_named_paths_is_kept(tmp_path):
    b, a = write(tmp_path / "b", b"bbb"), write(tmp_path / "a", b"aaa")
    assert pack(tmp_path, b, a).stream.tolist() == stream_of(b"bbb", b"aaa")


def test_a_corpus_has_the_same_hash_wherever_it_lies(tmp_path):
    shas = {
        pack(tmp_path / place, write(tmp_path / place / "f", b"the same")).sha256
        for place in ("here", "there")
    }
    assert len(shas) == 1


def test_bytes_take_binary_files(tmp_path):
    assert pack(tmp_path, write(tmp_path / "a", b"\0\1\2\xff")).stream.tolist()[:4] == [
        0,
        1,
        2,
        255,
    ]


@pytest.fixture
def words(tmp_path) -> FileTokenizer:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<unk>": 0, "</s>": 1, "one": 2, "two": 3, "zwölf": 4, "\ufffd": 5}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return FileTokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("chunk", [9, 2**20])
def test_text_is_decoded_and_cut_at_lines(tmp_path, words, monkeypatch, chunk):
    monkeypatch.setattr(text_module, "_CHUNK_BYTES", chunk)
    lines = "one two\nzwölf one\n\ntwo".encode()
    file = write(tmp_path / "a", b"\xef\xbb\xbf" + lines + b" \xff\n")
    packed = pack_text(spec(file), words, 2, tmp_path / "cache")
    assert packed.stream.tolist() == [2, 3, 4, 2, 3, 5, 1]


def files_in(cache: Path, ending: str) -> list[Path]:
    return sorted(cache.glob(f"*.{ending}"))


@pytest.mark.parametrize("chunk", [1, 2, 5, 2**20])
@pytest.mark.parametrize("tokenizer", ["bytes", "words"])
def test_lines_are_those_that_python_reads(tmp_path, words, monkeypatch, tokenizer, chunk):
    monkeypatch.setattr("gpumix.data.text.files._CHUNK_BYTES", chunk)
    file = write(tmp_path / "a", b"one two\r\n\r\ntwo\n \none one\r\n" + b"two " * 9 + b"one")
    lines = [line for line in file.read_text().splitlines() if line.strip()]
    opened = ByteTokenizer() if tokenizer == "bytes" else words
    found = pack_text(spec(file, document="line"), opened, 2, tmp_path / "cache")
    wanted = [[*opened.encode(line).tolist(), opened.end_of_text] for line in lines]
    assert [part.tolist() for part in np.split(found.stream, found.ends[:-1])] == wanted


def test_the_cache_is_used_again(tmp_path):
    file = write(tmp_path / "a", b"some text")
    pack(tmp_path, file)
    (made,) = files_in(tmp_path / "cache", "tokens")
    before = made.stat()
    pack(tmp_path, file, length=2)  # another length is another cut of the same tokens
    assert made.stat() == before


def test_the_cache_may_be_read_only_once_it_is_built(tmp_path, monkeypatch):
    file = write(tmp_path / "a", b"some text")
    pack(tmp_path, file)
    monkeypatch.setattr("gpumix.data.core.token_file.hold_build_lock", None)
    assert len(pack(tmp_path, file)) == 2


def test_a_changed_file_is_packed_again_and_replaces_the_old(tmp_path):
    file = write(tmp_path / "a", b"some text")
    old = pack(tmp_path, file)
    write(file, b"other text, longer")
    new = pack(tmp_path, file)
    assert new.stream.tolist() == stream_of(b"other text, longer")
    assert old.stream.tolist() == stream_of(b"some text")  # a mapping outlives its file
    assert len(files_in(tmp_path / "cache", "tokens")) == 1


def test_a_touched_file_of_the_same_size_is_packed_again(tmp_path):
    file = write(tmp_path / "a", b"some text")
    pack(tmp_path, file)
    write(file, b"SOME TEXT")
    os.utime(file, ns=(1, 1))
    assert pack(tmp_path, file).stream.tolist() == stream_of(b"SOME TEXT")


@pytest.mark.parametrize("place", [0, 50_000, 99_999])
def test_a_file_of_the_same_size_and_time_is_packed_again_if_its_text_is_another(tmp_path, place):
    """As copies keep the time; of a large file its begin, its middle and its end are looked at."""
    content = bytearray(b"x" * 100_000)
    file = write(tmp_path / "a", bytes(content))
    time_ns = file.stat().st_mtime_ns
    pack(tmp_path, file)
    content[place] = ord("y")
    write(file, bytes(content))
    os.utime(file, ns=(time_ns, time_ns))
    assert pack(tmp_path, file).stream.tolist() == stream_of(bytes(content))


def test_many_short_lines_take_little_memory(tmp_path, monkeypatch):
    """2.1 GB for five million, of which a batch held all that came to some text. Here batches are a
    tenth."""
    monkeypatch.setattr(text_module, "_BATCH_CHARACTERS", text_module._BATCH_CHARACTERS // 10)
    file = write(tmp_path / "a", b"a\n" * 30_000)
    tracemalloc.start()
    try:
        pack_text(spec(file, document="line"), ByteTokenizer(), 4, tmp_path / "cache")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 6e6


def test_another_tokenizer_has_a_file_of_its_own(tmp_path, words):
    file = write(tmp_path / "a", b"one two one two")
    pack(tmp_path, file)
    pack_text(spec(file), words, 4, tmp_path / "cache")
    assert len(files_in(tmp_path / "cache", "tokens")) == 2


@pytest.mark.parametrize("harm", ["truncate", "delete", "sidecar"])
def test_a_damaged_cache_is_built_again(tmp_path, harm):
    file = write(tmp_path / "a", b"some text")
    pack(tmp_path, file)
    (tokens,) = files_in(tmp_path / "cache", "tokens")
    (sidecar,) = files_in(tmp_path / "cache", "json")
    if harm == "truncate":
        os.truncate(tokens, 8)
    elif harm == "delete":
        tokens.unlink()
    else:
        sidecar.write_text('{"format": 1')
    assert pack(tmp_path, file).stream.tolist() == stream_of(b"some text")


PACK = """
import logging, sys
from pathlib import Path
from gpumix.data.text.files import pack_text
from gpumix.data.core.tokenizer import ByteTokenizer
from gpumix.schema.job.job import DataSpec
logging.basicConfig(level=logging.INFO)
text = pack_text(DataSpec(text=(Path(sys.argv[1]),)), ByteTokenizer(), 64, Path(sys.argv[2]))
print(text.sha256, len(text), "torch" in sys.modules)
"""


def test_three_processes_at_once_build_one_file(tmp_path):
    for number in range(50):
        write(tmp_path / "in" / f"{number}", os.urandom(100_000))
    command = [sys.executable, "-c", PACK, str(tmp_path / "in"), str(tmp_path / "cache")]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    ends = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0] * 3
    assert len({out for out, _ in ends}) == 1
    assert ends[0][0].split()[1:] == [str(50 * 100_001 // 64), "False"]  # packing needs no torch
    assert sum(err.count("packed 5000050 tokens") for _, err in ends) == 1
    assert len(files_in(tmp_path / "cache", "tokens")) == 1
