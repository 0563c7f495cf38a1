"""Saves a run and takes it up again, under any plan and any number of ranks.

What the files are is said in `checkpoint_file`, how a checkpoint comes and goes in
`checkpoint_folder`, what is in it in `checkpoint_content`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch.optim import Optimizer

import gpumix
from gpumix.engine.engine import Engine
from gpumix.engine.state import OptimizerState
from gpumix.spec.errors import GpumixError, InputError
from gpumix.train import checkpoint_content as content
from gpumix.train import checkpoint_folder
from gpumix.train.checkpoint_file import (
    INDEX,
    Manifest,
    SavedFile,
    SavedOptimizer,
    StateKind,
    damaged,
    described,
    read_manifest,
    verify,
)
from gpumix.train.checkpoint_shards import Index, read, write
from gpumix.train.checkpoint_together import Together


@dataclass(frozen=True)
class LoadedState:
    """What a checkpoint holds beside the model and the optimizer."""

    path: Path
    step: int
    cursor: dict[str, Any]
    extra: dict[str, Any]


class Checkpointer:
    """The checkpoints in one folder. All methods are collective.

    Args:
        folder: where they are; hosts must share it.
        keep: how many complete ones are kept.
        group: all ranks, in the engine's order, with CPU tensors and its own timeout; used for
            nothing else (`dist.new_group(backend="gloo")`). None for a single process.
    """

    def __init__(self, folder: Path, *, keep: int, group: dist.ProcessGroup | None = None) -> None:
        if keep < 1:
            raise InputError(f"cannot keep {keep} checkpoints", fix="keep at least 1")
        self.folder = folder
        self.keep = keep
        self._ranks = Together(group)

    # -- saving ------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        engine: Engine,
        optimizer: Optimizer,
        *,
        cursor: Mapping[str, Any],
        extra: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write a checkpoint; afterwards the oldest ones beyond `keep` are gone.

        Args:
            step: names the checkpoint; one of the same step is replaced.
            cursor: the place in the data. It and `extra` are what JSON can hold.

        Returns:
            The checkpoint's folder.

        Raises:
            MachineError: a rank could not write, the same error on all; earlier checkpoints stay.
            CommunicationError: a rank is gone.
        """
        ranks = self._ranks
        engine.agree_on_buffers()
        state: OptimizerState = {}

        def collect() -> dict[str, StateKind]:
            state.update(engine.optimizer_state(optimizer))
            return content.kinds_of(state)

        found = ranks.each(collect, "collect the optimizer's state", self.folder)
        saved = SavedOptimizer(name=type(optimizer).__name__, states=content.merged_kinds(found))
        manifest = ranks.first(
            lambda: _manifest(step, engine, saved, cursor, extra or {}),
            "describe a checkpoint",
            self.folder,
        )
        part = ranks.first(
            lambda: checkpoint_folder.begin(self.folder, step),
            "make a folder for a checkpoint",
            self.folder,
        )
        try:
            return self._write(part, manifest, engine, state)
        except GpumixError:
            if ranks.rank == 0:
                checkpoint_folder.abandon(part)
            raise

    def _write(self, part: Path, manifest: Manifest, engine: Engine, state: OptimizerState) -> Path:
        ranks = self._ranks
        tensors: dict[str, Mapping[str, Any]] = {
            content.MODEL: content.model_to_save(engine),
            content.OPTIMIZER: content.optimizer_to_save(engine, state),
        }
        index = write(part, tensors, ranks)
        own = f"__{ranks.rank}_*"
        files = ranks.each(
            lambda: {file.name: described(file) for file in part.glob(own)},
            "read back what it wrote",
            part,
        )
        every_file = {name: saved for by_rank in files for name, saved in by_rank.items()}
        return ranks.first(
            lambda: self._finish(part, manifest, index, every_file), "finish a checkpoint", part
        )

    def _finish(
        self, part: Path, manifest: Manifest, index: Index, files: dict[str, SavedFile]
    ) -> Path:
        checkpoint_folder.check_visible(part, files)
        checkpoint_folder.write_durably(part / INDEX, index.model_dump_json())
        files |= {name: described(part / name) for name in (INDEX, ".metadata")}
        path = checkpoint_folder.finish(part, manifest.model_copy(update={"files": files}))
        checkpoint_folder.prune(self.folder, self.keep)
        return path

    # -- loading -----------------------------------------------------------------------------------

    def latest(self) -> Path | None:
        """The checkpoint that was saved last."""
        return self._ranks.first(
            lambda: checkpoint_folder.latest(self.folder), "look for checkpoints", self.folder
        )

    def load(
        self, engine: Engine, optimizer: Optimizer | None, *, source: Path | None = None
    ) -> LoadedState:
        """Put a checkpoint into the engine and the optimizer.

        Args:
            optimizer: None takes the model alone, for evaluation.
            source: a checkpoint or a run's folder; default: the newest in this folder.

        Raises:
            InputError: there is none, it is damaged, or of another model or optimizer; nothing was
                changed.
            MachineError: a rank could not read; the engine is half loaded.
        """
        ranks = self._ranks
        at = source or self.folder
        path, manifest, index = ranks.first(lambda: opened(at), "open a checkpoint", at)
        files = sorted(manifest.files.items())

        def check() -> None:
            verify(path, files[ranks.rank :: ranks.world])
            content.check_fits(engine, path, manifest, index)
            if optimizer is not None:
                _check_optimizer(path, manifest, optimizer)

        ranks.each(check, "check a checkpoint", path)
        self._read(path, manifest, index, engine, optimizer)
        engine.steps = manifest.engine_steps
        engine.losses_counted.fill_(manifest.losses_counted)
        if engine.scaler.active and manifest.scaler is not None:
            engine.scaler.load_state_dict(manifest.scaler)
        return LoadedState(path, manifest.step, dict(manifest.cursor), dict(manifest.extra))

    def _read(
        self,
        path: Path,
        manifest: Manifest,
        index: Index,
        engine: Engine,
        optimizer: Optimizer | None,
    ) -> None:
        tensors = content.model_to_load(engine)
        kinds = manifest.optimizer.states if optimizer is not None else {}
        room = content.OptimizerRoom.made(engine, kinds, index)
        read(path, index, tensors | room.boxed(), self._ranks)
        engine.values_changed()
        if optimizer is not None:
            engine.load_optimizer_state(optimizer, room.state())


def opened(path: Path) -> tuple[Path, Manifest, Index]:
    """The checkpoint at `path` (see `checkpoint_folder.find`), what it is and where its tensors
    are; the tensors' files are not checked yet.

    Raises:
        InputError: there is none, or it is damaged.
    """
    path = checkpoint_folder.find(path)
    manifest = read_manifest(path)
    verify(path, [(INDEX, manifest.files[INDEX])] if INDEX in manifest.files else [])
    try:
        index = Index.model_validate_json((path / INDEX).read_bytes())
    except OSError as error:
        raise damaged(path / INDEX, error.strerror or str(error)) from error
    except ValidationError as error:
        raise damaged(path / INDEX, error.errors()[0]["msg"]) from error
    return path, manifest, index


def _manifest(
    step: int,
    engine: Engine,
    optimizer: SavedOptimizer,
    cursor: Mapping[str, Any],
    extra: Mapping[str, Any],
) -> Manifest:
    return Manifest(
        step=step,
        model=engine.plan.model,
        gpumix=gpumix.__version__,
        torch=torch.__version__,
        engine_steps=engine.steps,
        losses_counted=engine.losses_counted.item(),
        scaler=engine.scaler.state_dict() if engine.scaler.active else None,
        optimizer=optimizer,
        cursor=_as_json(cursor, "cursor"),
        extra=_as_json(extra, "extra"),
    )


def _as_json(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """`values` as they will be when they are loaded."""
    try:
        return dict(json.loads(json.dumps(values)))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"'{name}' cannot be kept in a checkpoint",
            why=str(error),
            fix="give what JSON can hold",
        ) from error


def _check_optimizer(path: Path, manifest: Manifest, optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    if name != manifest.optimizer.name:
        raise InputError(
            f"the checkpoint has the state of {manifest.optimizer.name}, the optimizer is {name}",
            where=str(path),
            fix="resume with the optimizer of the job that saved it",
        )
