"""Folder of copies of ranks' state in host memory, and the selection of matching copies.

    /dev/shm/gpumix-6f1d.../             of one run, by its id, on one host
        whose.json                       the run's output, and the host
        generation-00000002/             of the ranks of one start of the run
            rank_0001.slot_0             one copy of a rank's state: the bytes
            rank_0001.slot_0.index       tensors in it, and their locations
            rank_0001.slot_0.seal        its step; written when the copy is complete

Host memory outlives its processes, and a new run uses other copies than the previous one. A rank
copies into two slots in turn, so one is complete at any time.

All users of a host may make folders in its memory. So the name of a run's folder is unpredictable,
and of existing folders only those accessible to this user alone count. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from gpumix.schema import files
from gpumix.schema.errors import MachineError

SLOTS = 2
WITHOUT_COPIES = "a run that loses a rank goes on from its last checkpoint"
_GENERATION = re.compile(r"generation-(\d{8})")
SEAL = ".seal"
_SEAL = re.compile(r"rank_(\d{4,})\.slot_(\d)\.seal")
_NAME, _OWNER_FILE = "gpumix-", "whose.json"


def count_copies(hosts: int) -> int:
    """Return the number of copies of each rank's state in memory, given one or several hosts: with
    several, another host has copies too."""
    return SLOTS * (1 if hosts == 1 else 2)


@dataclass(frozen=True)
class StateCopy:
    """A complete copy of a rank's state: slot, step, and number of ranks."""

    generation: int
    world: int
    rank: int
    slot: int
    step: int


@dataclass(frozen=True)
class NewestState:
    """The newest state with a copy of every rank on some host.

    Attributes:
        slots: by saving rank.
        givers: by saving rank: a current rank on the host with its copy.
    """

    generation: int
    step: int
    slots: tuple[int, ...]
    senders: tuple[int, ...]


class MemoryFolder:
    """The folder of a run's copies on a host.

    Args:
        root: a file system in memory.
        output: the run's; `host` is the name of the host in its plan, `run` the id of the run.

    Attributes:
        folder: the run's on that host.
    """

    def __init__(self, root: Path, output: Path, host: str, run: str) -> None:
        self._root = root
        self._whose = {"output": str(output.absolute()), "host": host}
        told = json.dumps([run, *self._whose.values()])
        self.folder = root / f"{_NAME}{hashlib.sha256(told.encode()).hexdigest()[:32]}"

    def generation(self, number: int) -> Path:
        return self.folder / f"generation-{number:08d}"

    def make(self, generation: int) -> Path:
        """Make the folder of a generation, private to the user.

        Raises:
            MachineError: another user can reach it.
        """
        try:
            files.make_private(self.folder)
        except files.NotAFileError as error:
            raise MachineError(
                "the folder for copies in memory is not this user's alone",
                code="memory-folder-foreign",
                where=str(self.folder),
                fix="remove it, or ask its owner to",
            ) from error
        files.write_text_atomically(self.folder / _OWNER_FILE, json.dumps(self._whose))
        folder = self.generation(generation)
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def held(self) -> list[StateCopy]:
        """Return the complete copies of the run on this host."""
        return [
            one for path, number in self._generations() for one in _find_copies_in(path, number)
        ]

    def _generations(self) -> Iterator[tuple[Path, int]]:
        for path in sorted(self.folder.iterdir()) if files.is_private(self.folder) else ():
            if found := _GENERATION.fullmatch(path.name):
                yield path, int(found[1])

    def forget_before(self, generation: int) -> None:
        """Remove the copies of earlier starts."""
        for path, number in list(self._generations()):
            if number < generation:
                files.remove_quietly(path)

    def forget_other_runs(self) -> None:
        """Remove the copies of earlier runs with this output."""
        for place, whose in self._places():
            if whose == self._whose and place != self.folder:
                files.remove_quietly(place)

    def remove(self) -> None:
        """Remove all copies of the output on this host, and copies of deleted outputs."""
        for place, whose in self._places():
            if whose == self._whose or not Path(whose["output"]).exists():
                files.remove_quietly(place)

    def _places(self) -> Iterator[tuple[Path, dict[str, str]]]:
        """Yield the folders of all runs of this user, with output and host of each."""
        for place in sorted(self._root.glob(f"{_NAME}*")):
            if files.is_private(place):
                with suppress(OSError, ValueError, TypeError, KeyError):
                    whose = json.loads(files.read_text(place / _OWNER_FILE, files.MARK_BYTES))
                    yield place, {name: str(whose[name]) for name in self._whose}


def data_file(rank: int, slot: int) -> str:
    return f"rank_{rank:04d}.slot_{slot}"


def seal_file(rank: int, slot: int) -> str:
    return f"{data_file(rank, slot)}{SEAL}"


def index_file(rank: int, slot: int) -> str:
    return f"{data_file(rank, slot)}.index"


def _find_copies_in(path: Path, generation: int) -> Iterator[StateCopy]:
    for file in path.iterdir():
        if found := _SEAL.fullmatch(file.name):
            with suppress(OSError, ValueError, KeyError, TypeError):
                told = json.loads(files.read_text(file))
                rank, slot = int(found[1]), int(found[2])
                step, world = int(told["manifest"]["step"]), int(told["world"])
                if (path / data_file(rank, slot)).is_file():
                    yield StateCopy(generation, world, rank, slot, step)


def to_text(held: Iterable[StateCopy]) -> str:
    """Return the copies as text for other ranks."""
    return json.dumps([asdict(one) for one in held])


def from_text(text: str) -> list[StateCopy]:
    return [StateCopy(**one) for one in json.loads(text)]


def find_newest_state(told: Sequence[Sequence[StateCopy]]) -> NewestState | None:
    """Return the newest state to resume from, given the copies found by each current rank on its
    host: the latest state of the latest start with a copy of every rank."""
    givers: dict[tuple[int, int, int], dict[int, tuple[int, int]]] = {}
    for giver, held in enumerate(told):
        for one in held:
            state = givers.setdefault((one.generation, one.step, one.world), {})
            state.setdefault(one.rank, (giver, one.slot))
    whole = [key for key, ranks in givers.items() if set(ranks) == set(range(key[2]))]
    if not whole:
        return None
    generation, step, world = max(whole)
    ranks = givers[generation, step, world]
    return NewestState(
        generation,
        step,
        slots=tuple(ranks[rank][1] for rank in range(world)),
        senders=tuple(ranks[rank][0] for rank in range(world)),
    )


def latest_generation(told: Iterable[Iterable[StateCopy]]) -> int:
    """Return the latest generation, 0 without copies."""
    return max((one.generation for held in told for one in held), default=0)
