"""Second copy of each rank's state in the memory of another host: a host may be lost too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from gpumix.schema.files import remove
from gpumix.train.memory_checkpoint import memory_folder as folder
from gpumix.train.memory_checkpoint.mmap_file import create_mapped_file, map_file

MESSAGE_BYTES = 1 << 28  # sent at once


def assign_buddies(hosts: Sequence[str]) -> list[int]:
    """Return by rank the buddy for its second copy: a rank on the next host, in turn. `hosts` are
    the ranks' hosts, more than one."""
    names = list(dict.fromkeys(hosts))
    members = {name: [r for r, host in enumerate(hosts) if host == name] for name in names}
    found = []
    for rank, host in enumerate(hosts):
        there = members[names[(names.index(host) + 1) % len(names)]]
        found.append(there[members[host].index(rank) % len(there)])
    return found


class BuddyReplicator:
    """Exchange of copies between a rank and the rank's buddies.

    Args:
        place: the folder of this rank's host for this start of the run.
        hosts: of all ranks, in the order of `group`, which is used for nothing else.
    """

    def __init__(self, place: Path, hosts: Sequence[str], group: dist.ProcessGroup) -> None:
        self._place = place
        self._group = group
        self._rank = dist.get_rank(group)
        every = assign_buddies(hosts)
        self._taker = every[self._rank]
        self._givers = [rank for rank, buddy in enumerate(every) if buddy == self._rank]
        self._kept: dict[str, torch.Tensor] = {}

    def exchange(self, slot: int, *, whole: bool) -> None:
        """Send this rank's copy in a slot if complete, and keep the copies received. Collective.

        Raises:
            RuntimeError: a rank is gone, or late.
            OSError: there is no memory here; the copies of other ranks were received and dropped.
        """
        own = [self._place / name for name in _name_files(self._rank, slot)] if whole else []
        sizes = torch.tensor([path.stat().st_size for path in own] or [0, 0, 0])
        told = {giver: torch.empty_like(sizes) for giver in self._givers}
        self._pass([sizes], {giver: [room] for giver, room in told.items()})
        short: OSError | None = None
        rooms: dict[int, list[torch.Tensor]] = {}
        for giver, lengths in told.items():
            remove(self._place / folder.seal_file(giver, slot))
            try:
                rooms[giver] = self._rooms(giver, slot, lengths.tolist())
            except OSError as error:
                short = error
                rooms[giver] = [torch.empty(size, dtype=torch.uint8) for size in lengths.tolist()]
        self._pass([map_file(path) for path in own], rooms)
        if short is not None:
            raise short
        for giver, lengths in told.items():
            seal = self._place / folder.seal_file(giver, slot)
            if lengths.any():
                _get_partial_path(seal).replace(seal)

    def _rooms(self, giver: int, slot: int, sizes: list[int]) -> list[torch.Tensor]:
        """Allocate files for another rank's copy; its seal, marking a complete copy, under a
        temporary name."""
        *names, seal = _name_files(giver, slot)
        for name, size in zip(names, sizes):
            if name not in self._kept or len(self._kept[name]) != size:
                self._kept.pop(name, None)
                self._kept[name] = create_mapped_file(self._place / name, size)
        return [
            *(self._kept[name] for name in names),
            create_mapped_file(_get_partial_path(self._place / seal), sizes[-1]),
        ]

    def _pass(self, sent: list[torch.Tensor], rooms: dict[int, list[torch.Tensor]]) -> None:
        works = [
            dist.isend(piece, group=self._group, group_dst=self._taker)
            for piece in _split_pieces(sent)
        ]
        works += [
            dist.irecv(piece, group=self._group, group_src=giver)
            for giver, tensors in rooms.items()
            for piece in _split_pieces(tensors)
        ]
        for work in works:
            assert work is not None
            work.wait()


def _split_pieces(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [piece for tensor in tensors for piece in tensor.split(MESSAGE_BYTES) if len(piece)]


def _name_files(rank: int, slot: int) -> tuple[str, str, str]:
    """Return the names of a copy's files, the seal last."""
    return (
        folder.data_file(rank, slot),
        folder.index_file(rank, slot),
        folder.seal_file(rank, slot),
    )


def _get_partial_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")
