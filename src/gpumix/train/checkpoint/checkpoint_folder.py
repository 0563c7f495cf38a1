"""Folder of a run's checkpoints: order, creation and removal.

A checkpoint is written into `step-00000010.part` and renamed once complete, and renamed to
`.gone.part` before it is removed. A checkpoint being replaced by another of the same step is
`.former.part` for a moment, and counts while there is no other. So a crash at any moment leaves
only complete checkpoints and parts. A checkpoint moved elsewhere and linked back counts as well;
when it is pruned only the link is removed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from gpumix.schema import files
from gpumix.schema.errors import InputError, MachineError
from gpumix.train.checkpoint.manifest import (
    MANIFEST,
    STEP,
    Damaged,
    Manifest,
    SavedFile,
    get_folder_name,
    read_manifest,
)
from gpumix.train.run_log import run_files

T = TypeVar("T")

_PARTS = "step-*.part"
_FORMER = ".former.part"
_GONE = ".gone.part"
_NUMBER = re.compile(r"\d+$")


def list_checkpoints(path: Path) -> list[Path]:
    """Return the checkpoints named by `path`, newest first: `path` itself, or the checkpoints in it
    or in its `checkpoints`; of a script with transformers, those in the folder of one of its
    checkpoints or of its output.

    Raises:
        InputError: there is none.
    """
    if (path / MANIFEST).exists():
        return [path]
    folders = (path, path / run_files.CHECKPOINTS, path / run_files.SCRIPT_FOLDER)
    for folder in folders:
        saved = [one for _, one in reversed(_list_in_order(folder))]
        if saved:
            return saved
    if saved := _list_of_scripts(path):
        return saved
    parts = [part.name for folder in folders for part in folder.glob(_PARTS)]
    raise InputError(
        "there is no checkpoint here",
        code="no-checkpoint",
        where=str(path),
        why=f"{parts[0]} was never finished" if parts else "",
        fix="give the folder of a run or of one of its checkpoints",
    )


def take_first_intact(
    paths: Sequence[Path], take: Callable[[Path], T]
) -> tuple[T, tuple[Damaged, ...]]:
    """Return the result of `take` for the first intact checkpoint in `paths`, and the damage of
    earlier ones.

    Raises:
        Damaged: all are.
    """
    found: list[Damaged] = []
    for path in paths:
        try:
            return take(path), tuple(found)
        except Damaged as error:
            found.append(error)
    if len(found) == 1:
        raise found[0]
    raise Damaged(
        f"all {len(found)} checkpoints here are damaged",
        code="checkpoints-all-damaged",
        where=str(paths[0].parent),
        why="; ".join(f"{error.where}: {error.why}" for error in found),
        fix="give one of another run, or begin anew: without --resume, with another `output_dir`",
    )


def find_latest(folder: Path) -> Path | None:
    """Return the checkpoint in `folder` saved last."""
    saved = _list_in_order(folder)
    return saved[-1][1] if saved else None


def _list_in_order(folder: Path) -> list[tuple[float, Path]]:
    """Return (sequence, path) of the complete checkpoints in `folder`, oldest first. Unreadable
    checkpoints count as newest, so they are not passed over silently."""
    paths = [p for p in folder.glob("step-*") if STEP.fullmatch(p.name)]
    paths += [former for former, _ in _find_replaced(folder)]
    return sorted((_sequence(p), p) for p in paths if (p / MANIFEST).exists())


def _list_of_scripts(output: Path) -> list[Path]:
    """Return the checkpoints in `checkpoint-N` of transformers' Trainer, or in
    `checkpoints/checkpoint_N` of Accelerate, newest first."""
    found = [
        *output.glob(f"checkpoint-*/{run_files.SCRIPT_FOLDER}"),
        *output.glob(f"{run_files.CHECKPOINTS}/checkpoint_*/{run_files.SCRIPT_FOLDER}"),
    ]
    numbered = [(_NUMBER.search(folder.parent.name), folder) for folder in found]
    order = sorted((int(number[0]), folder) for number, folder in numbered if number)
    return [one for _, folder in reversed(order) for _, one in reversed(_list_in_order(folder))]


def find_script_files(path: Path) -> Path | None:
    """Return the folder with the configuration and the tokenizer of a script's checkpoint at
    `path`; None if it is not a script's."""
    folder = path.parent.parent
    return folder if path.parent.name == run_files.SCRIPT_FOLDER else None


def _find_replaced(folder: Path) -> list[tuple[Path, Path]]:
    """Return checkpoints interrupted while being replaced, with the free paths they had before."""
    formers = [f for f in folder.glob(f"step-*{_FORMER}") if (f / MANIFEST).exists()]
    found = [(f, f.with_name(f.name.removesuffix(_FORMER))) for f in formers]
    return [(former, final) for former, final in found if not final.exists()]


def _sequence(path: Path) -> float:
    try:
        return read_manifest(path).sequence
    except InputError:
        return math.inf


def begin_part(folder: Path, step: int) -> Path:
    """Make a new, empty part for a checkpoint of `step`; parts of earlier crashes are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for former, final in _find_replaced(folder):
        files.move(former, final.name)
    for leftover in folder.glob(_PARTS):
        files.remove(leftover)
    part = folder / f"{get_folder_name(step)}.part"
    files.make_folder(part)
    return part


def check_visible(part: Path, saved_files: Mapping[str, SavedFile]) -> None:
    """Check the files written by all ranks for visibility on rank 0's host.

    Raises:
        MachineError: a file is not; the ranks do not share the folder.
    """
    for name, saved in saved_files.items():
        file = part / name
        if not file.exists() or file.stat().st_size != saved.bytes:
            raise MachineError(
                f"a rank wrote {name}, which rank 0 does not find",
                code="folder-not-shared",
                where=str(part),
                why="the hosts do not share this folder",
                fix="choose an `output_dir` in the job on a file system that all hosts share",
            )


def finish_part(part: Path, manifest: Manifest) -> Path:
    """Turn a completely written part into a checkpoint and return the path."""
    folder, final = part.parent, part.with_suffix("")
    sequences = [sequence for sequence, _ in _list_in_order(folder) if sequence < math.inf]
    manifest = manifest.model_copy(update={"sequence": int(max(sequences, default=0)) + 1})
    write_durably(part / MANIFEST, manifest.sealed())
    files.sync_folder(part)
    former = final.with_name(final.name + _FORMER)
    if final.exists():  # this step was saved before, and the run resumed from an older one
        files.move(final, former.name)
    files.move(part, final.name)
    files.sync_folder(folder)
    files.remove(former)
    return final


def remove_part(part: Path) -> None:
    """Remove an unfinished part; anything left is removed by the next `begin_part`."""
    files.remove_quietly(part)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the `keep` newest checkpoints; unreadable checkpoints are left alone."""
    readable = [path for sequence, path in _list_in_order(folder) if sequence < math.inf]
    for path in readable[:-keep]:
        files.remove(files.move(path, path.name + _GONE))


def write_durably(file: Path, text: str) -> None:
    """Write `text` durably: the file survives a crash of the machine."""
    files.write_text_atomically(file, text, durable=True)
