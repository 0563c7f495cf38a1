"""Folders written by `datasets.save_to_disk`, as sources.

Text, and token lists of other lengths than a sample's, are packed once into a token file; token
lists of exactly that length are read as they are. `datasets` is imported lazily: it takes a second.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpumix.data.core.source import PackedSource, Source, hash_parts, with_labels
from gpumix.data.core.token_file import (
    PackedText,
    SourceFile,
    TokenFileRecipe,
    TokenWriter,
    open_token_file,
)
from gpumix.data.core.tokenizer import Tokenizer
from gpumix.data.sources.documents import TokenFileDocuments
from gpumix.data.sources.pretokenized import OwnSamples
from gpumix.data.sources.tokenize_on_read import TokenizedTexts
from gpumix.data.text.files import Piece, write_documents
from gpumix.data.workers.padding import (
    LABELS,
    MASK,
    PER_TOKEN_KEYS,
    TOKENS,
    RaggedSource,
    get_declared_lengths,
)
from gpumix.schema.errors import InputError, MachineError, format_install_command
from gpumix.schema.file_errors import explain_unreadable
from gpumix.schema.files import MARK_BYTES, open_for_reading, read_bytes, read_text

_READ_ROWS = 2000
_SPLITS, _STATE, _INFO = "dataset_dict.json", "state.json", "dataset_info.json"
_NAMED_FILES = ("_data_files", "_indices_data_files")  # of a state


def open_saved(
    folder: Path, column: str, tokenizer: Tokenizer, sequence_length: int, cache: Path
) -> Source:
    """Open the dataset in `folder`: `column` of text or of tokens, or by default `input_ids`.

    Raises:
        InputError: no such dataset, no such column, or both text and tokens; a row is null or has
            tokens unknown to the tokenizer.
        MachineError: the package `datasets` is missing, or the cache cannot be written.
    """
    dataset = _load(folder)
    name = _choose_column(dataset, column, folder)
    if name == TOKENS and _has_length(dataset, sequence_length, folder):
        return SavedRows(dataset, _hash_dataset(folder))
    return PackedSource(_pack_column(dataset, name, folder, tokenizer, sequence_length, cache))


def open_saved_documents(
    folder: Path, column: str, tokenizer: Tokenizer, sequence_length: int, cache: Path
) -> RaggedSource:
    """Open the rows as separate samples: texts of `column`, or else unchanged `input_ids` with
    per-token columns. Errors as in `open_saved`."""
    dataset = _load(folder)
    name = _choose_column(dataset, column, folder)
    if name != TOKENS:
        text = _pack_column(dataset, name, folder, tokenizer, sequence_length, cache, at_least=1)
        return TokenFileDocuments(text, pad_token=tokenizer.end_of_text)
    names = [name for name in PER_TOKEN_KEYS if name in dataset.column_names]
    rows = dataset.select_columns(names).with_format("numpy")
    rows.lengths = _row_lengths(dataset, names, folder)  # see `get_declared_lengths`
    return OwnSamples(
        rows,
        str(folder),
        longest=sequence_length,
        pad_token=tokenizer.end_of_text,
        content=_hash_dataset(folder),
    )


def open_saved_texts(
    folder: Path, column: str, tokenizer: Tokenizer, sequence_length: int
) -> TokenizedTexts:
    """Open the texts of `column`, to be tokenized while read. Errors as in `open_saved`."""
    dataset = _load(folder)
    if _choose_column(dataset, column, folder) != column or column == TOKENS:
        raise InputError(
            "the dataset holds tokens, there is nothing to tokenise on the fly",
            code="tokens-not-tokenizable",
            where=str(folder),
            fix="leave out `tokenize: on-the-fly`, or set data.column to a column of text",
        )
    texts = TokenizedTexts(
        dataset.select_columns([column]).with_format(None),
        tokenizer,
        column=column,
        longest=sequence_length,
        name=str(folder),
        content=_hash_dataset(folder),
    )
    texts.set_lengths(get_declared_lengths(dataset, len(dataset), str(folder)))
    return texts


def count_saved_rows(folder: Path, column: str) -> int:
    """Return the number of rows of a dataset with a readable column. Errors as in `open_saved`."""
    dataset = _load(folder)
    _choose_column(dataset, column, folder)
    return len(dataset)


def fingerprint_saved(folder: Path) -> str:
    """Return the fingerprint of a dataset, after opening it. Errors as in `open_saved`."""
    _load(folder)
    return _hash_dataset(folder)


def _pack_column(
    dataset: Any,
    name: str,
    folder: Path,
    tokenizer: Tokenizer,
    length: int,
    cache: Path,
    *,
    at_least: int | None = None,
) -> PackedText:
    recipe = TokenFileRecipe(
        _files(folder), tokenizer.fingerprint, tokenizer.vocab_size, how=f"column {name}"
    )

    def fill(writer: TokenWriter) -> None:
        if name == TOKENS:
            _write_tokens(dataset, tokenizer, writer, folder)
        else:
            write_documents(_documents(dataset, name, folder), tokenizer, writer)

    return open_token_file(cache, recipe, length, fill, at_least=at_least)


class SavedRows(Source):
    """Rows of one length, unchanged: all columns present from `PER_TOKEN_KEYS`, int64[k, L].

    Without a column `labels` the labels are the tokens, -100 where the attention mask is 0.
    """

    def __init__(self, dataset: Any, fingerprint: str) -> None:
        names = [name for name in PER_TOKEN_KEYS if name in dataset.column_names]
        self._rows = dataset.with_format("numpy", columns=names)
        self._fingerprint = fingerprint

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, indices: np.ndarray) -> dict[str, Tensor]:
        wanted = [int(i) for i in indices]
        columns = self._rows[wanted or [0]]  # with no rows requested, a row gives the shape
        return with_labels(
            {
                name: torch.from_numpy(np.array(column, dtype=np.int64))[: len(wanted)]
                for name, column in columns.items()
            }
        )


def _load(folder: Path) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise MachineError(
            "data.dataset needs the package 'datasets', which is not installed",
            code="package-missing",
            fix=format_install_command("datasets"),
        ) from error
    try:
        _check_files(folder)
        loaded = datasets.load_from_disk(str(folder))
    # IndexError: it was saved without rows. The others are of descriptions of another form.
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            "cannot load the dataset",
            code="dataset-not-loadable",
            where=str(folder),
            why="it is empty" if isinstance(error, IndexError) else explain_unreadable(error),
            fix=f"write it with `dataset.save_to_disk('{folder}')`",
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        splits = sorted(loaded)
        raise InputError(
            f"the folder holds several datasets: {', '.join(splits)}",
            code="dataset-of-splits",
            where=str(folder),
            fix=f"set data.dataset to one of them, for example {folder / splits[0]}",
        )
    return loaded


def _check_files(folder: Path) -> None:
    """Check that what the library opens by name are files of the folder, and not too large.

    Raises:
        OSError, ValueError, TypeError, LookupError: one is not, or a description has another form.
    """
    if (folder / _SPLITS).exists():
        for split in json.loads(read_text(folder / _SPLITS, MARK_BYTES))["splits"]:
            _check_files(folder / _in_folder(split))
        return
    for name in (_STATE, _INFO):
        if not (folder / name).exists():
            return  # the library says what is missing
        told = json.loads(read_text(folder / name))
        for key in _NAMED_FILES if name == _STATE else ():
            for one in told.get(key) or ():
                with open_for_reading(folder / _in_folder(one["filename"])):
                    pass


def _in_folder(name: str) -> str:
    if Path(name).name != name or "\0" in name:
        raise ValueError(f"{name!r} is no name of a file in the folder")
    return name


def _choose_column(dataset: Any, column: str, folder: Path) -> str:
    """Return the column to read: `column`, or `input_ids` if missing."""
    names = dataset.column_names
    if column not in names and TOKENS not in names:
        raise InputError(
            f"there is no column '{column}'",
            code="column-missing",
            where=str(folder),
            why=f"there is {', '.join(names)}",
            fix="set data.column to the column of text",
        )
    if column in names and column != TOKENS and TOKENS in names:
        raise InputError(
            f"the dataset has both text ('{column}') and tokens ('{TOKENS}')",
            code="dataset-text-and-tokens",
            where=str(folder),
            fix=f"set data.column to {TOKENS} to use the tokens, or save the dataset without them",
        )
    name = column if column in names else TOKENS
    kind = dataset.features.arrow_schema.field(name).type
    wanted = "lists of integers" if name == TOKENS else "text"
    if not (_is_tokens(kind) if name == TOKENS else _is_text(kind)):
        raise InputError(
            f"column '{name}' holds {kind}, not {wanted}",
            code="column-type-wrong",
            where=str(folder),
            fix="set data.column to another column",
        )
    return name


def _is_text(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_string(kind) or types.is_large_string(kind))


def _is_tokens(kind: Any) -> bool:
    import pyarrow.types as types

    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(lists and types.is_integer(kind.value_type))


def _has_length(dataset: Any, length: int, folder: Path) -> bool:
    """Return whether every row has `length` tokens; all per-token columns must agree."""
    names = [name for name in PER_TOKEN_KEYS if name in dataset.column_names]
    equal = True
    for first, columns in _iterate_lists(dataset, names, folder):
        lengths = columns[TOKENS][0]
        for name in names:
            if (columns[name][0] != lengths).any():
                raise InputError(
                    f"'{name}' and '{TOKENS}' differ in length at or after row {first}",
                    code="column-length-mismatch",
                    where=str(folder),
                )
        equal = equal and bool((lengths == length).all())
    return equal


def _row_lengths(dataset: Any, names: list[str], folder: Path) -> np.ndarray:
    """Return the number of tokens per row, without tokens hidden by the attention mask."""
    _has_length(dataset, 0, folder)
    wanted = MASK if MASK in names else TOKENS
    found = [np.empty(0, dtype=np.int32)]
    for _, columns in _iterate_lists(dataset, [wanted], folder):
        lengths, values = columns[wanted]
        if wanted == MASK:
            lengths = _count_visible(lengths, values)
        found.append(lengths.astype(np.int32))
    of_all = np.concatenate(found)
    if not of_all.all():
        raise InputError(
            f"row {int(np.argmin(of_all))} holds no tokens",
            code="row-without-tokens",
            where=str(folder),
            fix="drop such rows: dataset.filter(lambda row: any(row['input_ids']))",
        )
    return of_all


def _count_visible(lengths: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the visible tokens per row, given the row lengths and the concatenated masks."""
    before = np.concatenate([[0], np.cumsum(mask != 0)])
    ends = np.cumsum(lengths)
    seen: np.ndarray = before[ends] - before[ends - lengths]
    return seen


def _iterate_lists(
    dataset: Any, names: list[str], folder: Path
) -> Iterator[tuple[int, dict[str, tuple[np.ndarray, np.ndarray]]]]:
    """Yield for each run of rows (first row, per column the rows' lengths and all elements)."""
    import pyarrow.compute as compute

    tables = dataset.select_columns(names).with_format("arrow").iter(batch_size=_READ_ROWS)
    for number, table in enumerate(tables):
        columns = {}
        for name in names:
            column = table[name].combine_chunks()
            flat = column.flatten()
            if column.null_count or flat.null_count:
                raise _null_row(name, number * _READ_ROWS, folder)
            lengths = compute.list_value_length(column)
            columns[name] = lengths.to_numpy(zero_copy_only=False), flat.to_numpy()
        yield number * _READ_ROWS, columns


def _write_tokens(dataset: Any, tokenizer: Tokenizer, writer: TokenWriter, folder: Path) -> None:
    """Write the visible tokens of every row, each row ending with end-of-text."""
    if LABELS in dataset.column_names:
        raise InputError(
            "rows of other lengths than sequence_length cannot keep their column 'labels'",
            code="labels-not-packable",
            where=str(folder),
            fix="cut them to sequence_length, or save the dataset without 'labels'",
        )
    names = [name for name in (TOKENS, MASK) if name in dataset.column_names]
    for first, columns in _iterate_lists(dataset, names, folder):
        lengths, tokens = columns[TOKENS]
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < tokenizer.vocab_size:
            raise InputError(
                f"a token near row {first} is outside the tokenizer's {tokenizer.vocab_size}",
                code="token-outside-vocabulary",
                where=str(folder),
                fix="set tokenizer: to the tokenizer.json that the tokens were made with",
            )
        if MASK in columns:
            mask = columns[MASK][1]
            lengths, tokens = _count_visible(lengths, mask), tokens[mask != 0]
        ends = np.cumsum(lengths[lengths > 0])
        added = ends[tokens[ends - 1] != tokenizer.end_of_text]
        tokens = np.insert(tokens, added, tokenizer.end_of_text)
        ends += np.searchsorted(added, ends, side="right")  # tokens inserted up to each end
        writer.write(tokens, ends)


def _documents(dataset: Any, name: str, folder: Path) -> Iterator[Piece]:
    batches = dataset.select_columns([name]).with_format(None).iter(batch_size=_READ_ROWS)
    for number, batch in enumerate(batches):
        for offset, text in enumerate(batch[name]):
            if text is None:
                raise _null_row(name, number * _READ_ROWS + offset, folder)
            yield text, True


def _null_row(name: str, row: int, folder: Path) -> InputError:
    return InputError(
        f"column '{name}' holds a null at or after row {row}",
        code="column-has-null",
        where=str(folder),
        fix=f"drop such rows: dataset.filter(lambda row: row['{name}'] is not None)",
    )


def _files(folder: Path) -> tuple[SourceFile, ...]:
    """Return the files of the dataset; `datasets` adds caches of its own to the folder."""
    names = ["state.json", *(path.name for path in sorted(folder.glob("data-*.arrow")))]
    return tuple(SourceFile.of(folder / name, (folder / name).stat()) for name in names)


def _hash_dataset(folder: Path) -> str:
    """Return the dataset's fingerprint: of the history written by `datasets`, and of file sizes."""
    sizes = [(file.path.name, file.size) for file in _files(folder)]
    return hash_parts(read_bytes(folder / "state.json"), sizes)
