"""Joint actions of ranks for a checkpoint: a failure on any rank fails all ranks with one error.

A rank leaving with an error would keep the others waiting until their timeout. So the outcome of
each action is exchanged before any rank continues.
"""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from gpumix.engine.comm.collective_progress import begin_collective
from gpumix.engine.comm.communicator import CollectiveScope, CommunicationError
from gpumix.schema.errors import (
    GpumixError,
    MachineError,
    TrainingError,
    format_in_one_line,
    rebuild_error,
)
from gpumix.schema.file_errors import FULL, describe_write_fix
from gpumix.train.checkpoint.background import BackgroundTimeout

T = TypeVar("T")
NONE_TYPE = TypeAdapter(None)

_FURTHER_FIXES = dict.fromkeys(FULL, "if need be by removing this run's older checkpoints") | (
    dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS), "or choose another `output_dir` in the job"
    )
)


class CollectiveActions:
    """The ranks of `group`, a group of CPU tensors; None for a single process."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)

    def run_on_all(
        self, action: Callable[[], T], kind: TypeAdapter[T], doing: str, folder: Path
    ) -> list[T]:
        """Run `action` on every rank; return all results in rank order. Collective.

        Args:
            kind: type of the result, sent to the other ranks as JSON: nothing received over the
                network is code.

        Raises:
            GpumixError: the error of the lowest failing rank, the same on all ranks.
        """
        return self._run(action, kind, doing, folder)

    def first(self, action: Callable[[], T], kind: TypeAdapter[T], doing: str, folder: Path) -> T:
        """Run `action` on rank 0; return its result on all ranks. Collective; raises like
        `run_on_all`."""
        return self._run(action if self.rank == 0 else None, kind, doing, folder)[0]

    def collect(self, text: str, doing: str) -> list[str]:
        """Return the texts of all ranks on rank 0, and an empty list elsewhere. Collective."""
        return self._exchange(text, doing, here=self.rank == 0)

    def _run(
        self, action: Callable[[], T] | None, kind: TypeAdapter[T], doing: str, folder: Path
    ) -> list[T]:
        """Run like `run_on_all`; a rank without an action has no result."""
        told: dict[str, Any] = {}
        results: list[Any] = [None] * self.world
        failed: GpumixError | None = None
        try:
            if action is not None:
                results[self.rank] = action()
                told["result"] = kind.dump_json(results[self.rank]).decode()
        except Exception as error:  # the other ranks must know
            failed = make_joint_error(error, f"rank {self.rank} could not {doing}", folder)
            told["error"] = failed.as_dict()
            if failed is not error:
                failed.__cause__ = error
        for rank, text in enumerate(self._exchange(json.dumps(told), doing)):
            one = json.loads(text)
            if "error" in one:
                own = failed if rank == self.rank else None  # it has its traceback
                raise own or rebuild_error(one["error"])
            if "result" in one and rank != self.rank:
                results[rank] = kind.validate_json(one["result"])
        return results

    def _exchange(self, text: str, doing: str, *, here: bool | None = None) -> list[str]:
        """Return the texts of all ranks, on all of them or only where it is `here`. Collective."""
        if self.group is None or self.world == 1:
            return [text]
        with CollectiveScope(
            f"exchange of who could {doing}", begin_collective(self.group.group_name)
        ):
            mine, sizes = self._padded(text)
            every = [] if here is False else [torch.empty_like(mine) for _ in sizes]
            if here is None:
                dist.all_gather(every, mine, group=self.group)
            else:
                dist.gather(mine, every or None, group=self.group, group_dst=0)
        return [one[:size].numpy().tobytes().decode() for one, size in zip(every, sizes)]

    def _padded(self, text: str) -> tuple[torch.Tensor, list[int]]:
        """Return the bytes of `text`, padded to the longest text of all ranks, and the length on
        each rank."""
        coded = text.encode()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(coded)]), group=self.group)
        counts = [int(size) for size in sizes]
        padded = bytearray(coded.ljust(max(counts)))
        return torch.frombuffer(padded, dtype=torch.uint8), counts


def make_joint_error(error: BaseException, what: str, folder: Path) -> GpumixError:
    """Return the error to raise on all ranks for a failed action on a single rank."""
    if isinstance(error, GpumixError):
        return error
    where = f"{socket.gethostname()}: {folder}"
    system = _system_error(error)
    if system is None:
        return TrainingError(
            what, code="checkpoint-failed", where=where, why=format_in_one_line(error)
        )
    code = system.errno or 0
    file = f" ({system.filename})" if system.filename else ""
    return MachineError(
        what,
        code="checkpoint-io-failed",
        where=where,
        why=f"{os.strerror(code) if code else system}{file}",
        fix=", ".join(filter(None, [describe_write_fix(system), _FURTHER_FIXES.get(code)])),
    )


def make_timeout_error(error: BackgroundTimeout, what: str, rank: int, folder: Path) -> GpumixError:
    """Return the error for a timeout on this rank, caused by its peers or the disk."""
    late = f"rank {rank} could not {what} within {error.patience_s:.0f} s"
    where = f"{socket.gethostname()}: {folder}"
    if error.wait is not None:
        return CommunicationError(
            late, code="checkpoint-peer-timeout", where=where, wait=error.wait
        )
    return MachineError(
        late,
        code="checkpoint-io-timeout",
        where=where,
        why="a call of the system has not come back: the disk, or the server behind it, hangs",
        fix="look at that disk and at `dmesg | tail`, then run the same command with --resume; a "
        "longer `advanced.timeout` in the job waits longer",
    )


def _system_error(error: BaseException | None) -> OSError | None:
    """Return the operating system's error in a chain of errors; torch.save hides it in another."""
    while error is not None:
        if isinstance(error, OSError):
            return error
        error = error.__cause__ or error.__context__
    return None
