"""Description of a checkpoint's content and integrity. No tensor is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import Plan
from gpumix.train.checkpoint.checkpoint_folder import list_checkpoints
from gpumix.train.checkpoint.checkpointer import open_checkpoint
from gpumix.train.checkpoint.content import MODEL, OPTIMIZER
from gpumix.train.checkpoint.dcp_storage import Index, StoredTensor
from gpumix.train.checkpoint.manifest import Damaged, Manifest, get_job_steps, verify


@dataclass(frozen=True)
class CheckpointContents:
    """Content of a checkpoint. With `damage` set, little else may be known.

    Attributes:
        parameters: elements of the model's parameters and buffers.
        optimizer: its class; `states`: the names and kinds of its states.
        position: samples seen, over all epochs; `epoch` counts from 0.
        plan: the devices of the run and the parts stored by each; None if unknown.
    """

    path: str
    damage: str | None
    step: int | None = None
    of_steps: int | None = None
    bytes: int = 0
    files: dict[str, int] | None = None
    model: str = ""
    parameters: int = 0
    tensors: int = 0
    model_bytes: int = 0
    optimizer: str = ""
    states: dict[str, str] | None = None
    optimizer_bytes: int = 0
    position: int | None = None
    epoch: int | None = None
    gpumix: str = ""
    torch: str = ""
    plan: Plan | None = None


def inspect(source: Path) -> list[CheckpointContents]:
    """Return the content of a checkpoint, or of all in a run, newest first. Reads every file.

    Raises:
        InputError: there is no checkpoint, or it is of another schema.
    """
    return [_contents(path) for path in list_checkpoints(source)]


def _contents(path: Path) -> CheckpointContents:
    try:
        manifest, index = open_checkpoint(path)
    except Damaged as error:
        return CheckpointContents(path=str(path), damage=f"{error.where}: {error.why}")
    try:
        verify(path, sorted(manifest.files.items()))
        damage = None
    except Damaged as error:
        damage = f"{error.where}: {error.why}"
    files = {name: saved.bytes for name, saved in sorted(manifest.files.items())}
    position, samples = (_int_or_none(manifest.cursor.get(key)) for key in ("position", "n"))
    return CheckpointContents(
        path=str(path),
        damage=damage,
        step=manifest.step,
        of_steps=get_job_steps(manifest.extra),
        bytes=sum(files.values()),
        files=files,
        model=manifest.model,
        parameters=sum(tensor.elements for tensor in _select_tensors(index, MODEL)),
        tensors=len(index.tensors),
        model_bytes=sum(tensor.bytes for tensor in _select_tensors(index, MODEL)),
        optimizer=manifest.optimizer.name,
        states=dict(manifest.optimizer.states),
        optimizer_bytes=sum(tensor.bytes for tensor in _select_tensors(index, OPTIMIZER)),
        position=position,
        epoch=position // samples if position is not None and samples else None,
        gpumix=manifest.gpumix,
        torch=manifest.torch,
        plan=_read_plan(manifest),
    )


def _select_tensors(index: Index, prefix: str) -> list[StoredTensor]:
    return [tensor for name, tensor in index.tensors.items() if name.startswith(f"{prefix}.")]


def _int_or_none(value: object) -> int | None:
    return value if type(value) is int else None


def _read_plan(manifest: Manifest) -> Plan | None:
    """Return the saved plan: a user's own training loop may save none, a hostile file anything."""
    try:
        return Plan.model_validate(manifest.extra["plan"])
    except (KeyError, ValueError, InputError):
        return None
