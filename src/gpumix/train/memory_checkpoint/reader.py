"""Reader of states kept in host memory: local copies are mapped, copies on other hosts are sent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from gpumix.engine.comm.communicator import CollectiveScope
from gpumix.engine.engine import Engine
from gpumix.engine.rank_group import RankGroup
from gpumix.schema.files import INDEX_BYTES, read_text
from gpumix.train.checkpoint import content as content
from gpumix.train.checkpoint.collective_errors import CollectiveActions
from gpumix.train.checkpoint.dcp_storage import BoxedTensor, Index, StoredBox, read_from
from gpumix.train.checkpoint.manifest import Manifest
from gpumix.train.memory_checkpoint import memory_folder as folder
from gpumix.train.memory_checkpoint.memory_folder import MemoryFolder, NewestState, StateCopy
from gpumix.train.memory_checkpoint.mmap_file import map_file

MESSAGE_BYTES = 1 << 28  # per message


def load_state(
    home: MemoryFolder,
    held: Sequence[StateCopy],
    found: NewestState,
    ranks: RankGroup,
    group: dist.ProcessGroup | None,
    engine: Engine,
    optimizer: Optimizer,
) -> Manifest:
    """Load a state into the engine and the optimizer. Collective.

    Args:
        held: the copies on this rank's host; `found` describes the copies of all ranks together.
        group: all ranks, for CPU tensors.

    Raises:
        InputError: the state is of another model or optimizer; nothing was changed.
        CommunicationError: a rank is gone.
    """
    manifest, index = _gather_description(home, found, ranks)
    where = home.generation(found.generation)
    content.check_fits(engine, where, manifest, index)
    content.check_optimizer(where, manifest, index, engine, optimizer)
    copies = _CopySource(home, held, found, ranks, group)

    def read(tensors: Mapping[str, BoxedTensor]) -> None:
        read_from(index, tensors, CollectiveActions(group), copies)

    content.restore(engine, optimizer, manifest, index, read)
    return manifest


def _gather_description(
    home: MemoryFolder, found: NewestState, ranks: RankGroup
) -> tuple[Manifest, Index]:
    """Return the merged manifest and index of all copies. Collective."""
    own = {
        rank: _read_description(home, found.generation, rank, found.slots[rank])
        for rank, giver in enumerate(found.senders)
        if giver == ranks.rank
    }
    told: dict[str, Any] = {}
    for text in ranks.gather("copies in memory", json.dumps(own)):
        told |= json.loads(text)
    every = [told[str(rank)] for rank in range(len(found.senders))]
    manifests = [Manifest.model_validate(one["manifest"]) for one in every]
    kinds = content.merged_kinds(m.optimizer.states for m in manifests)
    optimizer = manifests[0].optimizer.model_copy(update={"states": kinds})
    known = {"optimizer": optimizer, "extra": every[0]["extra"]}
    index = Index.merged([Index.model_validate(one["index"]) for one in every])
    return manifests[0].model_copy(update=known), index


def _read_description(home: MemoryFolder, generation: int, rank: int, slot: int) -> dict[str, Any]:
    """Return the manifest and index of a copy on this host."""
    place = home.generation(generation)
    seal = json.loads(read_text(place / folder.seal_file(rank, slot)))
    index = json.loads(read_text(place / folder.index_file(rank, slot), INDEX_BYTES))
    return {"manifest": seal["manifest"], **index}


@dataclass
class _CopySource:
    """Bytes of the copies, local or fetched."""

    home: MemoryFolder
    held: Sequence[StateCopy]
    found: NewestState
    ranks: RankGroup
    group: dist.ProcessGroup | None
    _files: dict[str, torch.Tensor] = field(default_factory=dict)
    _fetched: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Map all copies on this host, in whatever slot."""
        place = self.home.generation(self.found.generation)
        here = {(one.generation, one.step, one.rank, one.slot) for one in self.held}
        for rank, slot in enumerate(self.found.slots):
            if (self.found.generation, self.found.step, rank, slot) in here:
                name = folder.data_file(rank, slot)
                self._files[name] = map_file(place / name)

    def bytes_of(self, box: StoredBox) -> torch.Tensor:
        file = self._files.get(box.file)
        if file is None:
            return self._fetched[box.file, box.start]
        return file[box.start : box.start + box.length]

    def fetch(self, wanted: Sequence[StoredBox]) -> None:
        """Fetch missing boxes from remote ranks. Collective: after all requests are known, all
        pairs of ranks exchange in one order."""
        missing: dict[int, dict[tuple[str, int], int]] = {}
        for box in wanted:
            if box.file not in self._files:
                giver = self.found.senders[_find_saving_rank(self.found, box.file)]
                missing.setdefault(giver, {})[box.file, box.start] = box.length
        asked = {
            str(giver): [[file, start, length] for (file, start), length in boxes.items()]
            for giver, boxes in missing.items()
        }
        told = [json.loads(text) for text in self.ranks.gather("fetch", json.dumps(asked))]
        for giver in range(self.ranks.world):
            for taker, boxes in enumerate(one.get(str(giver), []) for one in told):
                if boxes and self.ranks.rank in (giver, taker):
                    self._pass_on(giver, taker, boxes)

    def _pass_on(self, giver: int, taker: int, boxes: list[list[Any]]) -> None:
        with CollectiveScope(f"copies in memory of rank {giver} for rank {taker}"):
            for file, start, length in boxes:
                if self.ranks.rank == giver:
                    for piece in self._files[file][start : start + length].split(MESSAGE_BYTES):
                        dist.send(piece, taker, self.group)
                else:
                    room = torch.empty(length, dtype=torch.uint8)
                    for piece in room.split(MESSAGE_BYTES):
                        dist.recv(piece, giver, self.group)
                    self._fetched[file, start] = room


def _find_saving_rank(found: NewestState, file: str) -> int:
    """Return the rank that saved a file."""
    names = [folder.data_file(rank, slot) for rank, slot in enumerate(found.slots)]
    return names.index(file)
