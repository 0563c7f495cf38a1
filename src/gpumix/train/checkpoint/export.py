"""Export of a checkpoint as a folder for `transformers`: safetensors, configuration, tokenizer.

Tensors are read one by one from the checkpoint's files: no model with weights is built, no other
process takes part, and memory is needed for one file of the result. Adapters are merged into their
base, weight by weight (`merged_model`). A tied parameter is written only under its
name in the checkpoint; `transformers` ties the others to it.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

import gpumix
from gpumix.data.core.tokenizer import FileTokenizer, make_byte_tokenizer_files, parse_tokenizer
from gpumix.engine.model.adapters import find_base_name
from gpumix.schema import files
from gpumix.schema.errors import GpumixError, InputError, MachineError, get_first_line
from gpumix.schema.file_errors import describe_write_fix, explain_unreadable
from gpumix.train.checkpoint.checkpoint_folder import (
    find_script_files,
    list_checkpoints,
    take_first_intact,
)
from gpumix.train.checkpoint.checkpointer import open_checkpoint
from gpumix.train.checkpoint.collective_errors import CollectiveActions
from gpumix.train.checkpoint.content import MODEL
from gpumix.train.checkpoint.dcp_storage import BoxedTensor, Index, StoredTensor, read_boxes
from gpumix.train.checkpoint.manifest import MANIFEST, Manifest, make_damaged_error, verify
from gpumix.train.checkpoint.merged_model import MergedModel

# Size of weight files accepted by any file system and download.
FILE_BYTES = 5 * 10**9
MOST_CONCURRENT_EXPORTS = 100  # exports into one folder
# Marks a folder as an export, and lists its files.
RECORD = "gpumix.json"

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER = "tokenizer.json"
END_TOKEN_KEY = "eos_token_id"
TOKENIZER_CONFIG = "tokenizer_config.json"
# Files possibly next to the tokenizer, in a folder named by a job.
TOKENIZER_SIDE_FILES = (TOKENIZER_CONFIG, "special_tokens_map.json", "chat_template.jinja")
# Without a config, transformers would take the model's own tokenizer class, which reads the file
# differently.
PLAIN_TOKENIZER_CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast"}

# Not fp16: values beyond its range would become infinite.
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def export(
    source: Path,
    to: Path,
    *,
    model_config: Mapping[str, Any] | None = None,
    dtype: str = "fp32",
    file_bytes: int = FILE_BYTES,
    tell: Callable[[str], None] = lambda line: None,
    allowed: Sequence[str] = (),
    adapters: bool = False,
) -> Path:
    """Write the model of a checkpoint to the folder `to`.

    Args:
        source: a checkpoint, or a run's folder, of which the newest intact checkpoint is taken.
        to: is made; a former export there is replaced.
        model_config: of `transformers`; default: the configuration stored by the run. Without any
            (a model from a factory) there is no `config.json`.
        dtype: of all floating-point tensors: fp32 or bf16.
        file_bytes: maximum size of a file of weights, except with a single tensor.
        tell: receives lines for people: damaged newer checkpoints, and the origin of the tokenizer,
            or why there is none.
        allowed: code that the checkpoint's job may call, to make a base of adapters.
        adapters: write the adapters alone, as PEFT saves them; the base is not read.

    Raises:
        InputError: no checkpoint, a damaged checkpoint, another dtype, foreign files in `to`, or a
            base of adapters that cannot be read, or is another one.
        MachineError: the files cannot be written; the former content of `to` remains.
    """
    if dtype not in _DTYPES:
        raise InputError(
            f"cannot export as '{dtype}'",
            code="export-dtype-unknown",
            fix=f"give one of {', '.join(_DTYPES)}",
        )
    to = to.absolute()
    _check_replaceable(to)
    (path, manifest, index), passed = take_first_intact(list_checkpoints(source), _open_verified)
    for error in passed:
        tell(f"{error.where} is damaged: {error.why}")
    if passed:
        tell(f"the newest that is whole is written, {path}")
    script_files = find_script_files(path)
    config = model_config if model_config is not None else _stored_config(path, manifest)
    if config is None:
        config = _read_configuration(script_files, CONFIG)
    part = to.with_name(secrets.token_hex(8).join((".gpumix-", ".part")))
    if adapters and manifest.base is None:
        raise _make_no_adapters_error(path)
    try:
        files.remove_partial_files(to.parent)
        part.mkdir(parents=True)
        tensors = _open_tensors(path, manifest, index, _DTYPES[dtype], allowed)
        if adapters:
            assert tensors.merged is not None, "its base is elsewhere"
            tensors.merged.save_adapters(part)
        else:
            _write_weights(part, tensors, file_bytes)
            if tensors.merged is not None:
                tensors.merged.check_base(path)
        _copy_tokenizer(part, manifest, script_files, tell)
        if not adapters:
            _write_configurations(part, config, manifest, _DTYPES[dtype], script_files)
        _write_json(part / RECORD, _record(part, path, manifest))
        _replace(to, part)
    except (OSError, SafetensorError) as error:
        system = error if isinstance(error, OSError) else OSError()
        raise MachineError(
            "cannot write the exported model",
            code="export-not-writable",
            where=str(to),
            why=get_first_line(error),
            fix=f"{describe_write_fix(system)}, or choose another folder",
        ) from error
    finally:
        files.remove_quietly(part)
    return to


def _make_no_adapters_error(path: Path) -> InputError:
    return InputError(
        "the checkpoint has no adapters",
        code="checkpoint-without-adapters",
        where=str(path),
        fix="leave out --adapters",
    )


def _write_configurations(
    part: Path,
    config: Mapping[str, Any] | None,
    manifest: Manifest,
    dtype: torch.dtype,
    script_files: Path | None,
) -> None:
    """Write the configurations of the model and of its generation, as far as there are any."""
    ends = _end_of_text(part) if script_files is None else {}  # transformers has aligned a script's
    if config is not None:
        own = _configuration(config, dtype, merged=manifest.base is not None)
        _write_json(part / CONFIG, own | (ends if END_TOKEN_KEY in own else {}))
    generation = manifest.extra.get("generation_config")
    if generation is None:
        generation = _read_configuration(script_files, GENERATION_CONFIG)
    if isinstance(generation, dict):
        _write_json(part / GENERATION_CONFIG, generation | ends)


def _read_configuration(folder: Path | None, name: str) -> dict[str, Any] | None:
    """Return a configuration next to a script's checkpoint; None if there is none."""
    if folder is None or not (folder / name).is_file():
        return None
    _check_side_file(folder / name)
    return dict(json.loads(files.read_text(folder / name)))


def _open_verified(path: Path) -> tuple[Path, Manifest, Index]:
    manifest, index = open_checkpoint(path)
    verify(path, manifest.files.items())
    return path, manifest, index


def _stored_config(path: Path, manifest: Manifest) -> Mapping[str, Any] | None:
    stored = manifest.extra.get("model_config")
    if stored is None or isinstance(stored, dict):
        return stored
    raise make_damaged_error(path / MANIFEST, "its model_config is none")


def _copy_tokenizer(
    part: Path, manifest: Manifest, script_files: Path | None, tell: Callable[[str], None]
) -> None:
    """Copy the tokenizer files named by a checkpoint's job, once verified to be a tokenizer: the
    checkpoint's author may have named any file of this machine. Write files for a tokenizer of
    bytes. A script's tokenizer is next to its checkpoint."""
    job = manifest.extra.get("job")
    told, data = (job.get("tokenizer"), job.get("data")) if isinstance(job, dict) else (None, None)
    if script_files is not None and (script_files / TOKENIZER).is_file():
        told = str(script_files)
    if told == "bytes" and isinstance(data, dict):
        if data.get("text") or data.get("tokenize") == "on-the-fly":
            content, config = make_byte_tokenizer_files()
            _write_json(part / TOKENIZER, content)
            _write_json(part / TOKENIZER_CONFIG, PLAIN_TOKENIZER_CONFIG | config)
        else:
            tell("no tokenizer is written: its data may be tokens already, not bytes of texts")
    if not isinstance(told, str) or told == "bytes":
        return
    place = Path(told)
    named = {TOKENIZER: place}
    if place.is_dir():
        named = {name: place / name for name in (TOKENIZER, *TOKENIZER_SIDE_FILES)}
    present = {name: file for name, file in named.items() if file.is_file()}
    if TOKENIZER not in present:
        tell(f"its tokenizer is not at {place} any more: copy it into the folder by hand")
        return
    try:
        if script_files is None:
            FileTokenizer(present[TOKENIZER])
        else:  # its text may have no end
            parse_tokenizer(files.read_bytes(present[TOKENIZER]), present[TOKENIZER])
        for name in present.keys() & {*TOKENIZER_SIDE_FILES}:
            _check_side_file(present[name])
    except GpumixError as error:
        why = get_first_line(error)
        tell(f"its tokenizer at {place} is not copied, for it cannot be seen to be one: {why}")
        return
    tell(f"its tokenizer is copied from {place}")
    for name, file in present.items():
        files.write_bytes(part / name, files.read_bytes(file))
    if TOKENIZER_CONFIG not in present:
        _write_json(part / TOKENIZER_CONFIG, PLAIN_TOKENIZER_CONFIG)


def _end_of_text(part: Path) -> dict[str, int]:
    """Return the end-of-text token, as transformers aligns a model's configuration with the
    tokenizer before training: a configuration's default belongs to another vocabulary."""
    tokenizer = part / TOKENIZER
    return {END_TOKEN_KEY: FileTokenizer(tokenizer).end_of_text} if tokenizer.is_file() else {}


def _check_side_file(file: Path) -> None:
    """Raise InputError unless a file has the content of its name: a JSON object, or a template."""
    try:
        text = files.read_text(file)
        if file.suffix == ".json" and not isinstance(json.loads(text), dict):
            raise InputError(
                "it is no JSON object", code="side-file-not-json-object", where=str(file)
            )
    except (OSError, ValueError) as error:
        raise InputError(
            explain_unreadable(error), code="side-file-unreadable", where=str(file)
        ) from error


def _check_replaceable(to: Path) -> None:
    """Raise InputError unless `to` is absent, empty or only a former export."""
    if to.is_dir():
        present = {file.name for file in to.iterdir()}
        foreign = present - _read_recorded_files(to)
        if not foreign:
            return
        why = f"it holds {', '.join(sorted(foreign)[:4])}"
    elif to.exists():
        why = "it is a file"
    else:
        return
    raise InputError(
        "this folder is no former export and is not overwritten",
        code="export-folder-foreign",
        where=str(to),
        why=why,
        fix="choose another folder, or empty this one",
    )


def _read_recorded_files(folder: Path) -> set[str]:
    """Return the files written into `folder` by a former export."""
    try:
        recorded = json.loads(files.read_text(folder / RECORD))["files"]
        return {RECORD, *map(str, recorded)}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


@dataclass(frozen=True)
class _Exported:
    """Tensors to write: bytes by name, how some of them are read, and the model of adapters."""

    sizes: Mapping[str, int]
    read: Callable[[Sequence[str]], dict[str, torch.Tensor]]
    merged: MergedModel | None = None


def _open_tensors(
    path: Path, manifest: Manifest, index: Index, dtype: torch.dtype, allowed: Sequence[str]
) -> _Exported:
    """Return the tensors of a checkpoint; those of adapters are merged into their base."""
    prefix = f"{MODEL}."
    stored = {n.removeprefix(prefix): t for n, t in index.tensors.items() if n.startswith(prefix)}

    def read_stored(names: Sequence[str], dtype: torch.dtype = dtype) -> dict[str, torch.Tensor]:
        found = _read(path, index, [prefix + name for name in names], dtype)
        return {name.removeprefix(prefix): tensor for name, tensor in found.items()}

    sizes = {name: _bytes(tensor, dtype) for name, tensor in stored.items()}
    if manifest.base is None:
        return _Exported(sizes, read_stored)
    model = MergedModel(
        manifest, partial(read_stored, dtype=torch.float32), folder=Path(), allowed=allowed
    )
    shapes = model.shapes()
    rest = {find_base_name(n): n for n in stored if n not in {*model.added}}  # buffers

    def read_merged(names: Sequence[str]) -> dict[str, torch.Tensor]:
        found = {}
        for name in names:
            if name in shapes:
                value = model.read(name)
                found[name] = value.to(dtype) if value.is_floating_point() else value
            else:
                (found[name],) = read_stored([rest[name]]).values()
        return found

    merged = {name: shape.numel() * dtype.itemsize for name, shape in shapes.items()}
    merged |= {name: sizes[own] for name, own in rest.items()}
    return _Exported(merged, read_merged, model)


def _write_weights(part: Path, tensors: _Exported, file_bytes: int) -> None:
    names_of_files = list(_group_by_file(tensors.sizes, file_bytes))
    weight_map: dict[str, str] = {}
    for number, names in enumerate(names_of_files, 1):
        of = f"-{number:05d}-of-{len(names_of_files):05d}" if len(names_of_files) > 1 else ""
        file = part / f"model{of}.safetensors"
        save_file(tensors.read(names), file, metadata={"format": "pt"})
        file.chmod(0o666 & ~_umask())  # safetensors makes it private
        weight_map |= dict.fromkeys(names, file.name)
    if len(names_of_files) > 1:
        total = sum(tensors.sizes.values())
        _write_json(
            part / "model.safetensors.index.json",
            {"metadata": {"total_size": total}, "weight_map": weight_map},
        )


def _umask() -> int:
    """Return the process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _group_by_file(sizes: Mapping[str, int], file_bytes: int) -> Iterator[list[str]]:
    """Yield the names of the tensors of each file, in order."""
    names: list[str] = []
    size = 0
    for name, own in sizes.items():
        if names and size + own > file_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += own
    yield names


def _bytes(tensor: StoredTensor, dtype: torch.dtype) -> int:
    return torch.Size(tensor.shape).numel() * _saved_dtype(tensor, dtype).itemsize


def _saved_dtype(tensor: StoredTensor, dtype: torch.dtype) -> torch.dtype:
    stored = tensor.torch_dtype
    return dtype if stored.is_floating_point else stored


def _read(
    checkpoint: Path, index: Index, names: list[str], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the tensors called `names`, cast by the reader while copying."""
    tensors = {}
    for name in names:
        tensor = index.tensors[name]
        tensors[name] = torch.empty(tensor.shape, dtype=_saved_dtype(tensor, dtype))
    boxed = {name: BoxedTensor.whole(tensor) for name, tensor in tensors.items()}
    read_boxes(checkpoint, index, boxed, CollectiveActions(None))
    return tensors


def _configuration(
    config: Mapping[str, Any], dtype: torch.dtype, *, merged: bool
) -> dict[str, Any]:
    """Return the configuration with the dtype of the exported weights; merged ones are not
    quantised, whatever their base was."""
    left_out = {"torch_dtype", *(["quantization_config"] if merged else [])}
    kept = {key: value for key, value in config.items() if key not in left_out}
    return kept | {"dtype": str(dtype).removeprefix("torch.")}


def _record(part: Path, checkpoint: Path, manifest: Manifest) -> dict[str, Any]:
    return {
        "gpumix": gpumix.__version__,
        "checkpoint": str(checkpoint.resolve()),
        "step": manifest.step,
        "model": manifest.model,
        "files": sorted(file.name for file in part.iterdir()),
    }


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    files.write_text_atomically(file, json.dumps(content, indent=2) + "\n")


def _replace(to: Path, part: Path) -> None:
    """Replace `to` by `part`; of concurrent exports the last remains."""
    former = part.with_suffix(".former.part")
    for last in (*[False] * MOST_CONCURRENT_EXPORTS, True):
        with suppress(FileNotFoundError):
            files.move(to, former.name)
        try:
            files.move(part, to.name)
            return
        except OSError as error:  # a concurrent export moved its own here
            if last or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        finally:
            files.remove_quietly(former)
