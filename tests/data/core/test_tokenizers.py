"""Bytes and tokenizer files behind one face."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gpumix.data.core.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    choose_token_dtype,
    make_byte_tokenizer_files,
    open_tokenizer,
)
from gpumix.schema.errors import InputError, MachineError
from helpers.errors import raises
from helpers.samples.sources import write_tokenizer


@given(raw=st.binary())
def test_bytes_are_themselves(raw):
    tokens = ByteTokenizer().encode(raw)
    assert tokens.astype(np.uint8).tobytes() == raw


def test_bytes_take_text_too():
    tokenizer = open_tokenizer("bytes")
    assert tokenizer.encode("é").tolist() == [0xC3, 0xA9]
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (257, 256)


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory) -> Path:
    """The folder with the files that stand for bytes."""
    folder = tmp_path_factory.mktemp("bytes")
    file, config = make_byte_tokenizer_files()
    (folder / "tokenizer.json").write_text(json.dumps(file), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@given(text=st.text(st.characters(exclude_categories=("Cs",))))
def test_bytes_as_a_file_are_the_same_tokens(of_bytes, text):
    """Line ends, spaces and letters of every kind, for whoever reads the file."""
    read, own = FileTokenizer(of_bytes), ByteTokenizer()
    text = text.replace("<|endoftext|>", "")
    assert read.encode(text).tolist() == own.encode(text).tolist()
    assert (read.vocab_size, read.end_of_text) == (own.vocab_size, own.end_of_text)
    plain = Tokenizer.from_file(str(of_bytes / "tokenizer.json"))
    assert plain.decode(own.encode(text).tolist()) == text


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(257, np.uint16), (65536, np.uint16), (65537, np.uint32)]
)
def test_ids_take_the_smaller_dtype(vocab_size, dtype):
    assert choose_token_dtype(vocab_size) == dtype


def test_a_file_encodes_without_special_tokens(tmp_path):
    tokenizer = open_tokenizer(write_tokenizer(tmp_path / "tokenizer.json", "</s>"))
    assert tokenizer.encode("the cat flew").tolist() == [2, 3, 0]
    assert tokenizer.encode(b"the \xff cat").tolist() == [2, 0, 3]
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (7, 1)
    assert [t.tolist() for t in tokenizer.encode_batch(["mat", "", "on mat"])] == [[6], [], [5, 6]]


def test_a_folder_stands_for_its_file(tmp_path):
    file = write_tokenizer(tmp_path / "tokenizer.json", "</s>")
    assert FileTokenizer(tmp_path).fingerprint == FileTokenizer(file).fingerprint


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    from tokenizers import Tokenizer

    file = write_tokenizer(tmp_path / "tokenizer.json", "</s>")
    cutting = Tokenizer.from_file(str(file))
    cutting.enable_truncation(2)
    cutting.enable_padding(length=8)
    cutting.save(str(file))
    assert FileTokenizer(file).encode("the cat sat on").tolist() == [2, 3, 4, 5]


def test_fingerprints_tell_vocabularies_apart(tmp_path):
    one = FileTokenizer(write_tokenizer(tmp_path / "1.json", "</s>"))
    other = FileTokenizer(write_tokenizer(tmp_path / "2.json", "</s>", words="a b"))
    assert len({one.fingerprint, other.fingerprint, ByteTokenizer().fingerprint}) == 3


@pytest.mark.parametrize("token", ["cat", {"content": "cat"}])
def test_the_configuration_names_the_end_of_text(tmp_path, token):
    file = write_tokenizer(tmp_path / "tokenizer.json", "</s>", "<|endoftext|>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    assert FileTokenizer(file).end_of_text == 4


@pytest.mark.parametrize("special", [(), ("</s>", "<|endoftext|>")])
def test_an_end_of_text_is_never_guessed(tmp_path, special):
    file = write_tokenizer(tmp_path / "tokenizer.json", *special)
    with raises(InputError, code="end-of-text-unclear") as caught:
        FileTokenizer(file)
    assert "tokenizer_config.json" in caught.value.fix


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"eos_token": "nope"}', {"code": "end-of-text-unknown", "what": "nope"}),
        ("{", {"code": "tokenizer-config-unreadable"}),
    ],
)
def test_a_wrong_configuration_is_refused(tmp_path, content, says):
    file = write_tokenizer(tmp_path / "tokenizer.json", "</s>")
    (tmp_path / "tokenizer_config.json").write_text(content)
    with raises(InputError, **says):
        FileTokenizer(file)


@pytest.mark.parametrize("content", [b"{}", b"\xff\xfe", b"not json"])
def test_a_broken_file_is_refused(tmp_path, content):
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content)
    with raises(InputError, code="tokenizer-file-invalid") as caught:
        FileTokenizer(file)
    assert caught.value.where == str(file)


def test_a_missing_file_is_refused(tmp_path):
    with raises(InputError, code="tokenizer-unreadable", what="No such file"):
        FileTokenizer(tmp_path)


def test_a_missing_package_says_how_to_get_it(tmp_path, monkeypatch):
    file = write_tokenizer(tmp_path / "tokenizer.json", "</s>")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MachineError) as caught:
        FileTokenizer(file)
    assert caught.value.fix.startswith('pip install ".[transformers]"')
