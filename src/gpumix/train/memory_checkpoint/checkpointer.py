"""Copies of a run's state in host memory, surviving the loss of a rank.

After a step each rank copies its state, during the next step, into one of two slots. The copy must
be complete before the ranks agree on the next step's gradient norm: so when any rank changes its
state again, every rank has a complete copy of the previous step, and there is always a step common
to all. See `memory_folder` for the files.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from gpumix.engine.engine import Engine
from gpumix.hardware.host.pinned import allocate_pinned
from gpumix.hardware.runtime import Stream
from gpumix.schema.errors import GpumixError, MachineError, RankLost, convert_error, get_first_line
from gpumix.schema.files import remove, write_text_atomically
from gpumix.train.checkpoint import content as content
from gpumix.train.checkpoint.background import BackgroundTask, BackgroundTimeout
from gpumix.train.checkpoint.collective_errors import make_timeout_error
from gpumix.train.checkpoint.host_copy import (
    HostCopy,
    Tensors,
    count_bytes,
    format_no_room,
    has_room_for,
    make_index,
)
from gpumix.train.memory_checkpoint import memory_folder as folder
from gpumix.train.memory_checkpoint.memory_folder import MemoryFolder
from gpumix.train.memory_checkpoint.mmap_file import create_mapped_file
from gpumix.train.memory_checkpoint.rank_on_host import RankOnHost
from gpumix.train.memory_checkpoint.replication import BuddyReplicator


class MemoryCheckpointer:
    """Copies of a rank's state in host memory.

    Args:
        home: folder of the copies; `generation` is the number of this start of the run.
        place: this rank on its host; the first rank of a host removes the copies of earlier starts.
        extra: returns the content next to the state, as of the first copy.
        buddies: exchange of second copies, if there are several hosts.
        patience_s: time limit of a copy.
    """

    def __init__(
        self,
        home: MemoryFolder,
        generation: int,
        *,
        place: RankOnHost,
        extra: Callable[[], Mapping[str, Any]],
        buddies: BuddyReplicator | None = None,
        patience_s: float = math.inf,
    ) -> None:
        self._folder = home.make(generation)
        self._buddies = buddies
        self._patience_s = patience_s
        self._settled = threading.Event()
        self._settled.set()
        self._home, self._generation = home, generation
        self._place = place
        self._get_extra = extra
        self._extra: dict[str, Any] | None = None
        self._copies: dict[int, HostCopy] = {}
        self._whole: dict[int, content.Content] = {}  # complete copies by slot
        self._turn, self._held = threading.Condition(), False
        self._begun = 0
        self._copying: BackgroundTask[None] | None = None
        self.refused = ""
        """Reason why copying has stopped; empty otherwise."""

    def begin(
        self, step: int, engine: Engine, optimizer: Optimizer, cursor: Mapping[str, Any]
    ) -> None:
        """Begin to copy the state after `step`, which may not change until `settle` returns. All
        ranks copy the same steps, after all have called `finish` before the last of them."""
        self.finish()
        engine.agree_on_buffers()
        if self.refused and self._buddies is None:
            return
        if self._extra is None:
            self._extra = content.to_json_values(self._get_extra(), "extra")
        now = content.Content.of(step, engine, optimizer, cursor=cursor, extra={})
        stream = content.copying_stream(engine.device)
        slot = self._begun % folder.SLOTS
        self._begun += 1
        with self._turn:
            self._wait_for_turn()
            self._settled.clear()
            self._copying = BackgroundTask(
                lambda: self._copy(slot, now, stream),
                name="gpumix-memory",
                patience_s=self._patience_s,
            )

    def pause_copying(self, limit_s: float) -> dict[int, content.Content]:
        """Return the complete copies by step, waiting at most `limit_s` for a copy in progress.
        Copying pauses until `go_on`: the main thread waits before it would copy or change the
        state. For another thread."""
        with self._turn:
            self._held = True
        settled = self._settled.wait(min(limit_s, self._limit_s))
        if self.refused or not settled:
            return {}
        return {one.manifest.step: one for one in self._whole.values()}

    def go_on(self) -> None:
        """Resume copying after `pause_copying`."""
        with self._turn:
            self._held = False
            self._turn.notify_all()

    def settle(self) -> None:
        """Wait until the state may change. Not collective.

        Raises:
            RankLost: a copy does not end.
        """
        with self._turn:
            self._wait_for_turn()
        if self._copying is not None:
            try:
                self._copying.wait(self._settled)
            except BackgroundTimeout as error:
                raise self._make_stuck_error(error) from error

    def _wait_for_turn(self) -> None:
        """Wait until no thread holds the copies; called with `_turn`."""
        if not self._turn.wait_for(lambda: not self._held, self._limit_s):
            raise self._make_timeout_error(BackgroundTimeout(self._patience_s, None))

    @property
    def _limit_s(self) -> float:
        return min(self._patience_s, threading.TIMEOUT_MAX)

    def _make_timeout_error(self, error: BackgroundTimeout) -> GpumixError:
        return make_timeout_error(
            error, "copy its state into memory", self._place.rank, self._folder
        )

    def _make_stuck_error(self, error: BackgroundTimeout) -> GpumixError:
        """Return the error for a copy that does not end. No disk is involved: unless it waits for
        another rank, this rank hangs, and restarting all ranks may help."""
        found = self._make_timeout_error(error)
        if error.wait is not None:
            return found
        return convert_error(
            found,
            RankLost,
            why="a copy from its device, or into the memory of its host, has not come back",
            fix="look at `dmesg | tail` there, then run the same command with --resume; a longer "
            "`advanced.timeout` in the job waits longer",
        )

    def finish(self) -> None:
        """Wait until the copy begun last is complete, here and with the buddy. Not collective: a
        rank unable to copy continues without.

        Raises:
            RankLost: a copy does not end.
        """
        with self._turn:
            self._wait_for_turn()
        if self._copying is None:
            return
        copying, self._copying = self._copying, None
        try:
            copying.result()
        except BackgroundTimeout as error:
            raise self._make_stuck_error(error) from error
        except (OSError, MachineError, RuntimeError) as error:
            self.refused = get_first_line(error)
            return
        if self._begun == folder.SLOTS and self._place.is_first_here:
            self._home.forget_before(self._generation)

    def _copy(self, slot: int, now: content.Content, stream: Stream | None) -> None:
        """Copy in the background thread."""
        whole = False
        try:
            self._copy_to_slot(slot, now, stream)
            whole = True
        finally:
            self._settled.set()
            if self._buddies is not None:
                self._buddies.exchange(slot, whole=whole)

    def _copy_to_slot(self, slot: int, now: content.Content, stream: Stream | None) -> None:
        seal = self._folder / folder.seal_file(self._place.rank, slot)
        self._whole.pop(slot, None)
        remove(seal)
        copy = self._copies.get(slot)
        if copy is None or not copy.fits(now.tensors):
            copy = self._room(slot, now.tensors, pinned=stream is not None)
        copy.fill(now.tensors, stream)
        told = {"world": self._place.world, "manifest": now.manifest.model_dump(mode="json")}
        write_text_atomically(seal, json.dumps(told))
        manifest = now.manifest.model_copy(update={"extra": self._extra})
        self._whole[slot] = replace(now, tensors=copy.boxed, manifest=manifest)

    def _room(self, slot: int, tensors: Tensors, *, pinned: bool) -> HostCopy:
        """Allocate memory for a copy in a slot."""
        size = count_bytes(tensors)
        copies = folder.count_copies(hosts=1 if self._buddies is None else 2)
        if not self._copies and not has_room_for(copies * size, self._place.ranks_here):
            raise MachineError(
                format_no_room(copies, size, self._place.ranks_here), code="host-memory-short"
            )
        self._copies.pop(slot, None)
        file = self._folder / folder.data_file(self._place.rank, slot)
        memory = _create_memory(file, size, pinned=pinned)
        index = make_index(tensors, file.name).model_dump(mode="json")
        told = json.dumps({"extra": self._extra, "index": index})
        write_text_atomically(self._folder / folder.index_file(self._place.rank, slot), told)
        self._copies[slot] = HostCopy(tensors, pinned=False, memory=memory)
        return self._copies[slot]


def _create_memory(file: Path, size: int, *, pinned: bool) -> torch.Tensor:
    """Map a new file of `size` bytes as memory, pinned for faster copies of a GPU's tensors."""
    memory = create_mapped_file(file, size)
    return allocate_pinned(size, file) if pinned else memory
