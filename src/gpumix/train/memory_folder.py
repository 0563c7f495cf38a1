"""Where a host keeps copies of its ranks' state in its memory, and which of them belong together.

    /dev/shm/gpumix-1000/6f1d.../            of one output, by its path
        output                               that path
        localhost/                           of one host
            run-1a2b.../                     of one run, by its id
                generation-00000002/         of the ranks of one start of the run
                    rank_0001.slot_0         one copy of a rank's state: the bytes
                    rank_0001.slot_0.index   what it holds, and where
                    rank_0001.slot_0.seal    after which step; written when the copy is whole

The memory of a host outlives the processes in it, and a run that begins anew goes by other copies
than the one before it. A rank copies into two slots in turn, so one is
whole at any time. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from gpumix.spec.errors import MachineError

SLOTS = 2
WITHOUT_COPIES = "a run that loses a rank goes on from its last checkpoint"
_GENERATION = re.compile(r"generation-(\d{8})")
SEAL = ".seal"
_SEAL = re.compile(r"rank_(\d{4,})\.slot_(\d)\.seal")
_OUTPUT = "output"


def copies(hosts: int) -> int:
    """How often the state of each rank is in the memory of a run's hosts, or of one of them: where
    there are several hosts, another one has it too."""
    return SLOTS * (1 if hosts == 1 else 2)


@dataclass(frozen=True)
class Held:
    """One whole copy of a rank's state: in which slot, after which step, of how many ranks."""

    generation: int
    world: int
    rank: int
    slot: int
    step: int


@dataclass(frozen=True)
class Found:
    """The newest state of which every rank's copy is somewhere.

    Attributes:
        slots: by the ranks that saved it.
        givers: by the ranks that saved it: one of now, on whose host its copy is.
    """

    generation: int
    step: int
    slots: tuple[int, ...]
    givers: tuple[int, ...]


class Home:
    """The folder of one run's copies on one host.

    Args:
        root: a file system in memory.
        output: the run's; `host` is the name of the host in its plan, `run` the id of the run.

    Attributes:
        folder: of all runs with that output.
    """

    def __init__(self, root: Path, output: Path, host: str, run: str) -> None:
        self._output = output.absolute()
        self._root = root / f"gpumix-{os.getuid()}"
        digest = hashlib.sha256(str(self._output).encode()).hexdigest()[:16]
        self._all_hosts = self._root / digest
        self.folder = self._all_hosts / re.sub(r"[^A-Za-z0-9.-]", "_", host)
        self._run = self.folder / f"run-{run}"

    def generation(self, number: int) -> Path:
        return self._run / f"generation-{number:08d}"

    def make(self, generation: int) -> Path:
        """The folder of a generation, which only this user can read.

        Raises:
            MachineError: another user can reach it.
        """
        with suppress(FileExistsError):
            self._root.mkdir(mode=0o700)
        self._check_owner()
        folder = self.generation(generation)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self._all_hosts / _OUTPUT).write_text(str(self._output), encoding="utf-8")
        return folder

    def _check_owner(self) -> None:
        """In memory all users may make folders: what another has made could be anything."""
        found = self._root.lstat()
        open_to_others = found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or open_to_others:
            raise MachineError(
                "the folder for copies in memory is not this user's alone",
                where=str(self._root),
                fix="remove it, or ask its owner to",
            )

    def held(self) -> list[Held]:
        """The whole copies of this run that are here."""
        if not self._run.is_dir():
            return []
        self._check_owner()
        return [one for path, number in self._generations() for one in _held_in(path, number)]

    def _generations(self) -> Iterator[tuple[Path, int]]:
        for path in sorted(self._run.iterdir()):
            if found := _GENERATION.fullmatch(path.name):
                yield path, int(found[1])

    def forget_before(self, generation: int) -> None:
        """Remove the copies of earlier starts."""
        for path, number in list(self._generations()):
            if number < generation:
                shutil.rmtree(path, ignore_errors=True)

    def forget_other_runs(self) -> None:
        """Remove the copies of earlier runs with this output."""
        for path in list(self.folder.iterdir()) if self.folder.is_dir() else ():
            if path != self._run:
                shutil.rmtree(path, ignore_errors=True)

    def remove(self) -> None:
        """Remove all copies of this output on this host, and those of outputs that are gone."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for place in self._root.iterdir() if self._root.is_dir() else ():
            with suppress(OSError):
                gone = not Path((place / _OUTPUT).read_text(encoding="utf-8")).exists()
                if gone or not any(one.is_dir() for one in place.iterdir()):
                    shutil.rmtree(place, ignore_errors=True)
        with suppress(OSError):  # others are there
            self._root.rmdir()


def data_file(rank: int, slot: int) -> str:
    return f"rank_{rank:04d}.slot_{slot}"


def seal_file(rank: int, slot: int) -> str:
    return f"{data_file(rank, slot)}{SEAL}"


def index_file(rank: int, slot: int) -> str:
    return f"{data_file(rank, slot)}.index"


def _held_in(path: Path, generation: int) -> Iterator[Held]:
    for file in path.iterdir():
        if found := _SEAL.fullmatch(file.name):
            with suppress(OSError, ValueError, KeyError, TypeError):
                told = json.loads(file.read_text(encoding="utf-8"))
                rank, slot = int(found[1]), int(found[2])
                step, world = int(told["manifest"]["step"]), int(told["world"])
                if (path / data_file(rank, slot)).is_file():
                    yield Held(generation, world, rank, slot, step)


def to_text(held: Iterable[Held]) -> str:
    """For other ranks."""
    return json.dumps([asdict(one) for one in held])


def from_text(text: str) -> list[Held]:
    return [Held(**one) for one in json.loads(text)]


def newest(told: Sequence[Sequence[Held]]) -> Found | None:
    """What can be gone on from, of the copies that each rank of now finds on its host: of the
    latest start that has a state of which every rank's copy is there, the latest."""
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
    return Found(
        generation,
        step,
        slots=tuple(ranks[rank][1] for rank in range(world)),
        givers=tuple(ranks[rank][0] for rank in range(world)),
    )


def latest_generation(told: Iterable[Iterable[Held]]) -> int:
    """0 where there is none."""
    return max((one.generation for held in told for one in held), default=0)
