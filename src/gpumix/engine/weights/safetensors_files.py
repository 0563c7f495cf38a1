"""Tensors in safetensors files: one file, a folder, or a model's folder in the hub's cache.

Files are mapped into memory and never read as a whole: a read touches the pages of the rows that it
asks for, which ranks of a host share.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from gpumix.schema.errors import InputError, MachineError
from gpumix.schema.file_errors import explain_unreadable
from gpumix.schema.files import MARK_BYTES, make_descriptor_path, open_for_reading, read_text

SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
WHOLE_FILE = "give a whole file in the safetensors format that you may read"


FileVersion = tuple[int, int]


def find_version(file: Path) -> FileVersion:
    """Return the size and the time of the last change of a file."""
    found = file.stat()
    return found.st_size, found.st_mtime_ns


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file.

    Attributes:
        name: in the file.
        dtype: of what is read; the file may have another.
        version: of the file; what is read is of no other.
    """

    file: Path
    name: str
    shape: torch.Size
    dtype: torch.dtype
    version: FileVersion

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def cast(self, dtype: torch.dtype | None) -> FileTensor:
        """Return the tensor read in another dtype; None: in its own."""
        return self if dtype is None else replace(self, dtype=dtype)

    def read(self, start: int, end: int) -> torch.Tensor:
        """Return elements [start, end), flattened; reads the rows needed and no others."""
        with open_safetensors(self.file) as opened:
            self._check_version()
            tensor = opened.get_slice(self.name)
            if not self.shape:
                return tensor[...].reshape(-1)[start:end].to(self.dtype)
            row = max(1, self.shape[1:].numel())
            first, last = start // row, -(-end // row)
            rows = tensor[first:last].reshape(-1)
            return rows[start - first * row : end - first * row].to(self.dtype)

    def read_all(self) -> torch.Tensor:
        """Return the tensor."""
        return self.read(0, self.shape.numel()).view(self.shape)

    def _check_version(self) -> None:
        if find_version(self.file) != self.version:
            raise InputError(
                "the file has changed since the model was loaded from it",
                code="weights-file-changed",
                where=str(self.file),
                why="some weights would be of the old file, and some of the new one",
                fix="load the model again; write another model's weights into another folder",
            )


class SafetensorsFiles:
    """The tensors of safetensors files, by name.

    Args:
        path: a file, or a folder that `find_files` knows.
        files: the files, if they are known.

    Raises:
        InputError: a file is missing, or cannot be read.
    """

    def __init__(self, path: Path, files: Sequence[Path] | None = None) -> None:
        self.path = path
        self.tensors: dict[str, FileTensor] = {}
        for file in find_files(path) if files is None else files:
            with open_safetensors(file) as opened:
                version = find_version(file)
                for name in opened.keys():  # noqa: SIM118 - no mapping
                    part = opened.get_slice(name)
                    shape = torch.Size(part.get_shape())
                    dtype = (part[0:0] if shape else part[...]).dtype
                    self.tensors[name] = FileTensor(file, name, shape, dtype, version)
        self.shapes = {name: list(tensor.shape) for name, tensor in self.tensors.items()}


def find_files(path: Path) -> list[Path]:
    """Return the files of a model: `path` itself, or those in a folder that an index names, or all
    there. A model's folder in the hub's cache stands for its newest snapshot.

    Raises:
        InputError: there are none, or one that the index names is missing.
    """
    if not path.is_dir():
        return [path]
    folder = find_snapshot(path)
    indices = sorted(folder.glob(f"*{INDEX_SUFFIX}"))
    if indices:
        return _read_index(indices[0])
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if not files:
        pickle = next((file for one in PICKLES for file in sorted(folder.glob(one))), None)
        if pickle is not None:
            raise make_pickle_error(pickle)
        raise InputError(
            "there is no .safetensors file",
            code="safetensors-missing",
            where=str(path),
            fix="give the folder that `save_pretrained` wrote, or one .safetensors file",
        )
    return files


def make_pickle_error(file: Path) -> InputError:
    """Return the error for weights in another format."""
    folder = str(file.parent)
    return InputError(
        "the weights are in PyTorch's own format, which is not read",
        code="weights-not-safetensors",
        where=str(file),
        why="it is a pickle: opening it can run code, and no rank can read a part of it",
        fix='convert it: python -c "from transformers import AutoModelForCausalLM as M; '
        f'M.from_pretrained({folder!r}, use_safetensors=False).save_pretrained({folder!r})"',
    )


def find_snapshot(folder: Path) -> Path:
    """Return the newest snapshot of a model's folder in the hub's cache; other folders as given."""
    snapshots = folder / "snapshots"
    if not snapshots.is_dir():
        return folder
    reference = folder / "refs" / "main"
    if reference.is_file():
        with contextlib.suppress(OSError, ValueError):  # else the newest
            name = read_text(reference, MARK_BYTES).strip()
            if Path(name).name == name and (snapshots / name).is_dir():
                return snapshots / name
    found = sorted((one for one in snapshots.iterdir() if one.is_dir()), key=_modified)
    if not found:
        raise InputError(
            "the model is not in this cache",
            code="model-not-in-cache",
            where=str(folder),
            fix="download it: hf download NAME",
        )
    return found[-1]


def _modified(path: Path) -> float:
    return path.stat().st_mtime


def _read_index(index: Path) -> list[Path]:
    """Return the files that an index names."""
    try:
        names = sorted(set(json.loads(read_text(index))["weight_map"].values()))
        foreign = [name for name in names if Path(name).name != name or "\0" in name]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            "cannot read the index of the weights",
            code="weights-index-unreadable",
            where=str(index),
            why=f"it has no 'weight_map' of tensors and files ({type(error).__name__})",
            fix="copy or download it again; without an index all files of the folder are read",
        ) from error
    if foreign:
        raise InputError(
            f"the index of the weights names '{foreign[0]}', which is no file in its folder",
            code="weights-index-foreign-file",
            where=str(index),
            fix="copy or download it again; without an index all files of the folder are read",
        )
    files = [index.parent / name for name in names]
    check_are_there(files, index)
    return files


def check_are_there(files: Sequence[Path], index: Path) -> None:
    """Check that the files named by an index are there.

    Raises:
        InputError: one is missing.
    """
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise InputError(
            f"the index of the weights names '{missing[0]}', which is not there",
            code="weights-file-missing",
            where=str(index),
            why=f"{len(missing)} of {len(files)} files are missing",
            fix="copy or download the missing files into the same folder",
        )


@contextlib.contextmanager
def open_safetensors(file: Path) -> Iterator[Any]:
    """Open a file in the safetensors format.

    Raises:
        InputError: it cannot be read.
    """
    with contextlib.ExitStack() as stack:
        try:
            stream = stack.enter_context(open_for_reading(file))
            name = make_descriptor_path(stream.fileno(), file)
            opened = stack.enter_context(safe_open(name, framework="pt"))
        except MemoryError as error:  # of addresses: nothing is read yet
            raise MachineError(
                "the weights cannot be mapped into memory",
                code="weights-not-mappable",
                where=str(file),
                why=str(error),
                fix="allow this process more addresses: ulimit -v unlimited",
            ) from error
        except (OSError, SafetensorError) as error:
            raise _make_unreadable_error(file, error) from error
        try:
            yield opened
        except (OSError, SafetensorError) as error:
            raise _make_unreadable_error(file, error) from error


def _make_unreadable_error(file: Path, error: Exception) -> InputError:
    return InputError(
        "cannot read the weights",
        code="weights-unreadable",
        where=str(file),
        why=explain_unreadable(error) if isinstance(error, OSError) else str(error),
        fix=WHOLE_FILE,
    )
