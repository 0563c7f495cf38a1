"""Conversion of text to token ids: raw bytes, or a `tokenizer.json`.

Both have one interface, so packing and the model's vocabulary need not distinguish them. Numpy
only; the `tokenizers` package is imported on demand.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gpumix.schema.errors import InputError, MachineError, format_install_command
from gpumix.schema.files import read_bytes, read_text

# Names of the token that ends a document in well-known vocabularies.
_END_OF_TEXT_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>")


class ByteTokenizer:
    """A tokenizer with a token per byte, and 256 for the end of a text.

    Attributes:
        vocab_size: the largest id plus one, end-of-text included.
        fingerprint: changes when the ids of any text may.
        reads_bytes: whether files are passed as raw bytes; otherwise decoded as UTF-8.
    """

    vocab_size = 257
    end_of_text = 256
    fingerprint = "bytes-1"
    reads_bytes = True

    def encode(self, text: bytes | str) -> np.ndarray:
        """Return the ids of a text without special tokens: unsigned integers, one dimension."""
        raw = text.encode() if isinstance(text, str) else text
        return np.frombuffer(raw, dtype=np.uint8)

    def encode_batch(self, texts: Sequence[bytes | str]) -> list[np.ndarray]:
        """Return the ids of each text, as `encode` does, on all cores if possible."""
        return [self.encode(text) for text in texts]


def make_byte_tokenizer_files() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `ByteTokenizer` as a `tokenizer.json` and a `tokenizer_config.json`: each byte is the
    letter used by byte-level tokenizers like GPT-2's, without merges."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)}
    others = iter(range(256, 512))  # for bytes without a visible letter
    vocabulary = {chr(byte if byte in plain else next(others)): byte for byte in range(256)}
    end = {"id": ByteTokenizer.end_of_text, "content": _END_OF_TEXT_TOKENS[0], "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    level["use_regex"] = False
    file = {
        "version": "1.0",
        "added_tokens": [end],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    config = {"eos_token": _END_OF_TEXT_TOKENS[0], "clean_up_tokenization_spaces": False}
    return file, config


class FileTokenizer:
    """A tokenizer from a `tokenizer.json`. Invalid UTF-8 becomes U+FFFD; truncation and padding are
    off.

    Args:
        path: the file, or the folder that contains `tokenizer.json`.

    Raises:
        InputError: the file is missing or broken, or its end-of-text token is ambiguous.
        MachineError: the package `tokenizers` is not installed.
    """

    reads_bytes = False

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            content = read_bytes(file)
        except OSError as error:
            raise InputError(
                f"cannot read the tokenizer: {error.strerror}",
                code="tokenizer-unreadable",
                where=str(file),
                fix="set `tokenizer:` to 'bytes', a tokenizer.json or a folder that holds one",
            ) from error
        self._tokenizer = parse_tokenizer(content, file)
        vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise InputError(
                "the tokenizer has no tokens",
                code="tokenizer-empty",
                where=str(file),
                fix="give another tokenizer.json, or `tokenizer: bytes`",
            )
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_of_text = vocabulary[_find_end_of_text(vocabulary, file)]
        mark = hashlib.sha256(content + f"|{self.end_of_text}".encode())
        self.fingerprint = mark.hexdigest()[:16]

    def encode(self, text: bytes | str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[bytes | str]) -> list[np.ndarray]:
        decoded = [t.decode(errors="replace") if isinstance(t, bytes) else t for t in texts]
        encoded = self._tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
        return [np.array(one.ids, dtype=np.uint32) for one in encoded]


Tokenizer = ByteTokenizer | FileTokenizer


def open_tokenizer(tokenizer: Literal["bytes"] | Path) -> Tokenizer:
    """Open the tokenizer named by a job; errors as in `FileTokenizer`."""
    return FileTokenizer(tokenizer) if isinstance(tokenizer, Path) else ByteTokenizer()


def choose_token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the smaller of uint16 and uint32 with room for every id."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def parse_tokenizer(content: bytes, file: Path) -> Any:
    """Return the `tokenizers.Tokenizer` in `content`, without truncation and padding.

    Raises:
        InputError: it is no tokenizer.
        MachineError: the package `tokenizers` is not installed.
    """
    try:
        from tokenizers import Tokenizer as Parser
    except ImportError as error:
        raise MachineError(
            "a tokenizer file needs the package 'tokenizers', which is not installed",
            code="package-missing",
            where=str(file),
            fix=format_install_command("transformers"),
        ) from error
    try:
        parsed = Parser.from_str(content.decode())
    except Exception as error:  # the library raises bare Exception for a file it cannot read
        raise InputError(
            "this is not a tokenizer file",
            code="tokenizer-file-invalid",
            where=str(file),
            why=str(error),
            fix="save one with `tokenizer.save('tokenizer.json')`",
        ) from error
    parsed.no_truncation()
    parsed.no_padding()
    return parsed


def _find_end_of_text(vocabulary: dict[str, int], file: Path) -> str:
    """Return the end-of-text token: `eos_token` of tokenizer_config.json, or the only known
    name."""
    config = file.with_name("tokenizer_config.json")
    fix = f'write {{"eos_token": "..."}} into {config}'
    if config.is_file():
        named = _read_eos_token(config)
        if named is not None and named not in vocabulary:
            raise InputError(
                f"the end-of-text token {named!r} is not in the vocabulary",
                code="end-of-text-unknown",
                where=str(config),
                fix=fix,
            )
        if named is not None:
            return named
    known = [name for name in _END_OF_TEXT_TOKENS if name in vocabulary]
    if len(known) != 1:
        raise InputError(
            "which token ends a text is not plain",
            code="end-of-text-unclear",
            where=str(file),
            why=f"the vocabulary holds {', '.join(known) or 'none of the usual names'}",
            fix=fix,
        )
    return known[0]


def _read_eos_token(config: Path) -> str | None:
    """Return `eos_token` of a tokenizer_config.json, written as a string or as an object."""
    try:
        token = json.loads(read_text(config)).get("eos_token")
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(
            "cannot read the tokenizer's configuration",
            code="tokenizer-config-unreadable",
            where=str(config),
            why=str(error),
        ) from error
    return token.get("content") if isinstance(token, dict) else token
