"""Saving and loading of a run, under any plan and any number of ranks.

See `manifest` for the files, `checkpoint_folder` for creating and removing checkpoints,
`content` for the content.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from torch.optim import Optimizer

from gpumix.engine.engine import Engine
from gpumix.hardware.runtime import Stream
from gpumix.schema.errors import GpumixError, InputError
from gpumix.schema.files import INDEX_BYTES, read_bytes
from gpumix.train.checkpoint import checkpoint_folder
from gpumix.train.checkpoint import content as content
from gpumix.train.checkpoint.background import BackgroundTask, BackgroundTimeout
from gpumix.train.checkpoint.collective_errors import (
    NONE_TYPE,
    CollectiveActions,
    make_timeout_error,
)
from gpumix.train.checkpoint.dcp_storage import Index, read_boxes, write_boxes
from gpumix.train.checkpoint.host_copy import (
    HostCopy,
    Tensors,
    count_bytes,
    format_no_room,
    has_room_for,
)
from gpumix.train.checkpoint.manifest import (
    INDEX,
    METADATA,
    Damaged,
    Manifest,
    SavedFile,
    StateKind,
    check_written,
    describe_content,
    describe_file,
    make_damaged_error,
    parse_step,
    read_manifest,
    verify,
)

# Types exchanged by ranks.
KINDS = TypeAdapter(dict[str, StateKind])
MANIFEST = TypeAdapter(Manifest)
FOLDER, FOLDERS = TypeAdapter(Path), TypeAdapter(list[Path])
OPTIONAL_FOLDER: TypeAdapter[Path | None] = TypeAdapter(Path | None)
STEPS = TypeAdapter(list[int])
BOOL = TypeAdapter(bool)
FILES = TypeAdapter(dict[str, SavedFile])
OPENED = TypeAdapter(tuple[Manifest, Index])


@dataclass(frozen=True)
class LoadedState:
    """Content of a checkpoint next to model and optimizer, and the damaged newer checkpoints."""

    path: Path
    step: int
    cursor: dict[str, Any]
    extra: dict[str, Any]
    passed_over: tuple[Damaged, ...] = ()


@dataclass(frozen=True)
class Saved:
    """A written checkpoint and the seconds taken by writing, concurrent with training."""

    path: Path
    step: int
    seconds: float


class Checkpointer:
    """The checkpoints in a folder. Methods are collective unless documented otherwise.

    A checkpoint is written during training: the state is first copied into host memory, during
    training too, and may not change until `settle` has returned.

    Args:
        folder: folder of the checkpoints, shared by all hosts.
        keep: number of complete checkpoints kept.
        group: all ranks, in the engine's order, with CPU tensors and its own timeout; used for
            nothing else (`dist.new_group(backend="gloo")`). None for a single process.
        ranks_here: number of ranks sharing this rank's host and its memory.
        patience_s: time limit of a checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        group: dist.ProcessGroup | None = None,
        ranks_here: int = 1,
        patience_s: float = math.inf,
    ) -> None:
        if keep < 1:
            raise InputError(
                f"cannot keep {keep} checkpoints",
                code="checkpoint-count-invalid",
                fix="keep at least 1",
            )
        self.folder = folder
        self.keep = keep
        self._ranks = CollectiveActions(group)
        self._ranks_here = ranks_here
        self._patience_s = patience_s
        self.not_copied = ""
        """Reason why this rank's state is not copied first and training waits until it is written;
        empty if it is copied."""
        self._copy: HostCopy | None = None
        self._saving: BackgroundTask[Saved] | None = None
        self._settled = threading.Event()

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
        """Write a checkpoint and wait for the end: `begin` and `finish`."""
        self.begin(step, engine, optimizer, cursor=cursor, extra=extra)
        return self.finish().path

    def begin(
        self,
        step: int,
        engine: Engine,
        optimizer: Optimizer,
        *,
        cursor: Mapping[str, Any],
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin to write a checkpoint; the oldest beyond `keep` are removed once it is written. The
        previous checkpoint must be finished.

        Args:
            step: names the checkpoint; a checkpoint of the same step is replaced.
            cursor: the place in the data; JSON values only, as in `extra`.
        """
        assert self._saving is None, "two checkpoints at once"
        engine.agree_on_buffers()
        try:
            to_save: content.Content | Exception = content.Content.of(
                step, engine, optimizer, cursor=cursor, extra=extra or {}
            )
        except Exception as error:  # the other ranks must know
            to_save = error
        stream = content.copying_stream(engine.device)
        self._settled.clear()
        self._saving = BackgroundTask(
            lambda: self._save(step, to_save, stream),
            name="gpumix-checkpoint",
            patience_s=self._patience_s,
        )

    def common_step(self, steps: Iterable[int]) -> int | None:
        """Return the newest step common to all ranks, given the steps of each rank."""
        every = self._ranks.run_on_all(lambda: list(steps), STEPS, "tell its copies", self.folder)
        return max(set.intersection(*map(set, every)), default=None)

    def all_say(self, yes: bool, of: str) -> bool:
        """Return whether `yes` is true on all ranks."""
        said: list[bool] = self._ranks.run_on_all(
            lambda: yes, BOOL, f"tell whether {of}", self.folder
        )
        return all(said)

    def save_copy(self, copy: content.Content) -> Saved:
        """Write a checkpoint of an unchanging copy."""
        return self._timed(copy.manifest.step, copy, lambda: copy.tensors)

    def settle(self) -> None:
        """Wait until the state being saved may change. Not collective.

        Raises:
            MachineError: the disk hangs.
        """
        if self._saving is not None:
            with self._raise_if_overdue():
                self._saving.wait(self._settled)

    @contextmanager
    def _raise_if_overdue(self) -> Iterator[None]:
        try:
            yield
        except BackgroundTimeout as error:
            what = "write a checkpoint"
            raise make_timeout_error(error, what, self._ranks.rank, self.folder) from error

    def wait(self, seconds: float) -> Saved | None:
        """Wait at most `seconds` for the checkpoint begun last; return it if written by then. None
        without a checkpoint. Not collective, callable from any thread."""
        saving = self._saving
        if saving is None:
            return None
        saving.join(max(0.0, seconds))
        return saving.result() if saving.ended and not saving.failed else None

    @property
    def writing_since(self) -> float | None:
        """Begin of the checkpoint being written, by `time.monotonic()`, or None. Not collective,
        readable from any thread."""
        saving = self._saving
        return None if saving is None or saving.ended else saving.begun_at

    @property
    def under_way(self) -> bool:
        """True from `begin` of a checkpoint to `finish`. Not collective."""
        return self._saving is not None

    @property
    def written(self) -> bool:
        """True if the checkpoint begun last is written. Not collective."""
        return self._saving is not None and self._saving.ended and not self._saving.failed

    @property
    def failed(self) -> bool:
        """True if `finish` will raise, as far as is known. Not collective."""
        return self._saving is not None and self._saving.failed

    def finish(self) -> Saved:
        """Wait for the checkpoint begun last.

        Raises:
            MachineError: a rank could not write (the same error on all ranks), or its disk hangs;
                earlier checkpoints remain.
            CommunicationError: a rank is gone.
        """
        assert self._saving is not None, "no checkpoint was begun"
        saving, self._saving = self._saving, None
        with self._raise_if_overdue():
            return saving.result()

    def _save(
        self, step: int, to_save: content.Content | Exception, stream: Stream | None
    ) -> Saved:
        """Save in the background thread."""

        def copied() -> Tensors:
            assert isinstance(to_save, content.Content)
            return self._copied(to_save.tensors, stream)

        try:
            return self._timed(step, to_save, copied)
        finally:
            self._settled.set()

    def _timed(
        self, step: int, to_save: content.Content | Exception, taken: Callable[[], Tensors]
    ) -> Saved:
        begun = time.perf_counter()
        path = self._save_together(step, to_save, taken)
        return Saved(path, step, seconds=time.perf_counter() - begun)

    def _save_together(
        self, step: int, to_save: content.Content | Exception, taken: Callable[[], Tensors]
    ) -> Path:
        """Save with all ranks; `taken` returns the tensors to write."""
        ranks = self._ranks
        tensors: dict[str, Any] = {}

        def take() -> dict[str, StateKind]:
            if isinstance(to_save, Exception):
                raise to_save
            tensors.update(taken())
            return to_save.kinds

        def describe() -> Manifest:
            assert isinstance(to_save, content.Content)
            optimizer = to_save.manifest.optimizer.model_copy(update={"states": kinds})
            return to_save.manifest.model_copy(update={"optimizer": optimizer})

        every = ranks.run_on_all(take, KINDS, "take what is to be saved", self.folder)
        kinds = content.merged_kinds(every)
        manifest = ranks.first(describe, MANIFEST, "describe a checkpoint", self.folder)
        part = ranks.first(
            lambda: checkpoint_folder.begin_part(self.folder, step),
            FOLDER,
            "make a folder for a checkpoint",
            self.folder,
        )
        try:
            return self._write(part, manifest, tensors)
        except GpumixError:
            if ranks.rank == 0:
                checkpoint_folder.remove_part(part)
            raise

    def _copied(self, tensors: Tensors, stream: Stream | None) -> Tensors:
        """Return a copy of `tensors`, or `tensors` unchanged if memory is short: they may not
        change until written."""
        if self._copy is None or not self._copy.fits(tensors):
            self._copy, size = None, count_bytes(tensors)
            if not has_room_for(size, self._ranks_here):
                self.not_copied = format_no_room(1, size, self._ranks_here)
                return tensors
            self._copy, self.not_copied = HostCopy(tensors, pinned=stream is not None), ""
        self._copy.fill(tensors, stream)
        self._settled.set()
        return self._copy.boxed

    def _write(self, part: Path, manifest: Manifest, tensors: Tensors) -> Path:
        ranks = self._ranks
        index, own = write_boxes(part, tensors, ranks)  # complete on rank 0 only, where needed

        def read_back() -> dict[str, SavedFile]:
            for name, saved in own.items():
                check_written(part / name, saved)
            return own

        files = ranks.run_on_all(read_back, FILES, "read back what it wrote", part)
        every_file = {name: saved for by_rank in files for name, saved in by_rank.items()}
        return ranks.first(
            lambda: self._finish(part, manifest, index, every_file),
            FOLDER,
            "finish a checkpoint",
            part,
        )

    def _finish(
        self, part: Path, manifest: Manifest, index: Index, files: dict[str, SavedFile]
    ) -> Path:
        checkpoint_folder.check_visible(part, files)
        text = index.model_dump_json()
        checkpoint_folder.write_durably(part / INDEX, text)
        files |= {INDEX: describe_content(text.encode()), METADATA: describe_file(part / METADATA)}
        check_written(part / INDEX, files[INDEX])
        path = checkpoint_folder.finish_part(part, manifest.model_copy(update={"files": files}))
        checkpoint_folder.prune(self.folder, self.keep)
        return path

    # -- loading -----------------------------------------------------------------------------------

    def latest(self) -> Path | None:
        """Return the checkpoint saved last, damaged or not."""
        return self._ranks.first(
            lambda: checkpoint_folder.find_latest(self.folder),
            OPTIONAL_FOLDER,
            "look for checkpoints",
            self.folder,
        )

    def load(
        self,
        engine: Engine,
        optimizer: Optimizer | None,
        *,
        source: Path | None = None,
        after: int = -1,
    ) -> LoadedState:
        """Load a checkpoint into the engine and the optimizer.

        Args:
            optimizer: None loads the model alone, for evaluation.
            source: a checkpoint, or a run's folder; default: this folder. Of a folder the newest
                intact checkpoint is loaded.
            after: only checkpoints of later steps count, from the last saved back to the first of
                this step or an earlier one.

        Raises:
            InputError: no checkpoint is intact, or it is of another model or optimizer; nothing was
                changed.
            MachineError: a rank could not read; the engine is half loaded.
        """
        ranks = self._ranks
        at = source or self.folder
        paths = ranks.first(
            lambda: list(
                takewhile(lambda p: parse_step(p) > after, checkpoint_folder.list_checkpoints(at))
            ),
            FOLDERS,
            "look for checkpoints",
            at,
        )

        def take(path: Path) -> tuple[Path, Manifest, Index]:
            manifest, index = ranks.first(
                lambda: open_checkpoint(path), OPENED, "open a checkpoint", path
            )
            files = sorted(manifest.files.items())

            def check() -> None:
                verify(path, files[ranks.rank :: ranks.world])
                content.check_fits(engine, path, manifest, index)
                if optimizer is not None:
                    content.check_optimizer(path, manifest, index, engine, optimizer)

            ranks.run_on_all(check, NONE_TYPE, "check a checkpoint", path)
            return path, manifest, index

        (path, manifest, index), passed = checkpoint_folder.take_first_intact(paths, take)
        content.restore(
            engine,
            optimizer,
            manifest,
            index,
            lambda tensors: read_boxes(path, index, tensors, ranks),
        )
        return LoadedState(path, manifest.step, dict(manifest.cursor), dict(manifest.extra), passed)


def open_checkpoint(path: Path) -> tuple[Manifest, Index]:
    """Return manifest and index of the checkpoint at `path`; tensor files are not checked yet.

    Raises:
        Damaged: it is not as saved, or nothing that gpumix saves.
        InputError: it is of another schema.
    """
    manifest = read_manifest(path)
    if INDEX not in manifest.files:
        raise make_damaged_error(path / INDEX, "the checkpoint does not say what it should be")
    verify(path, [(INDEX, manifest.files[INDEX])])
    try:
        index = Index.model_validate_json(read_bytes(path / INDEX, INDEX_BYTES))
        index.check_complete()
        index.check_fits({name: saved.bytes for name, saved in manifest.files.items()})
    except OSError as error:
        raise make_damaged_error(path / INDEX, error.strerror or str(error)) from error
    except ValidationError as error:
        raise make_damaged_error(path / INDEX, error.errors()[0]["msg"]) from error
    except GpumixError as error:
        raise make_damaged_error(path / INDEX, error.what) from error
    return manifest, index
