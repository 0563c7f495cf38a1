"""What ranks do together in a checkpoint: when it fails on one it fails on all, with one error.

A rank that met an error and left would keep the others waiting for it until their timeout. So each
action's outcome is exchanged before anybody goes on.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from gpumix.engine.comm import reported
from gpumix.spec.errors import GpumixError, MachineError, TrainingError, in_a_line

T = TypeVar("T")

_FIXES = {
    errno.ENOSPC: "make room on that disk, if need be by removing this run's older checkpoints",
    errno.EDQUOT: "make room in that quota, if need be by removing this run's older checkpoints",
    errno.EACCES: "make the folder accessible, or choose another `output` in the job",
    errno.EPERM: "make the folder accessible, or choose another `output` in the job",
    errno.EROFS: "choose another `output` in the job",
}


class Together:
    """The ranks of `group`, a group of CPU tensors; None is a single process."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)

    def each(self, action: Callable[[], T], doing: str, folder: Path) -> list[T]:
        """Run `action` on every rank; all results in rank order. Collective.

        Raises:
            GpumixError: the error of the lowest rank that had one, the same on all ranks.
        """
        outcome: tuple[Any, GpumixError | None]
        try:
            outcome = action(), None
        except Exception as error:  # the other ranks must hear of it
            outcome = None, explained(error, f"rank {self.rank} could not {doing}", folder)
            outcome[1].__cause__ = error
        outcomes = self._gathered(outcome, doing)
        errors = [error for _, error in outcomes if error is not None]
        if errors:
            raise errors[0]
        return [result for result, _ in outcomes]

    def first(self, action: Callable[[], T], doing: str, folder: Path) -> T:
        """Run `action` on rank 0; its result on all. Collective; raises as `each` does."""
        only = self.each(lambda: action() if self.rank == 0 else None, doing, folder)
        return only[0]  # type: ignore[return-value]

    def _gathered(self, outcome: Any, doing: str) -> list[Any]:
        if self.world == 1:
            return [outcome]
        outcomes: list[Any] = [None] * self.world
        with reported(f"exchange of who could {doing}"):
            dist.all_gather_object(outcomes, outcome, group=self.group)
        outcomes[self.rank] = outcome  # with its traceback
        return outcomes


def explained(error: BaseException, what: str, folder: Path) -> GpumixError:
    """The error to raise on all ranks for `error` on one: `what` could not be done in `folder`."""
    if isinstance(error, GpumixError):
        return error
    if isinstance(error, CheckpointException):
        rank = min(error.failures)
        cause = error.failures[rank][0]
        if not isinstance(cause, Exception):
            raise cause  # an interrupt
        return explained(cause, what, folder)
    where = f"{socket.gethostname()}: {folder}"
    system = _system_error(error)
    if system is None:
        return TrainingError(what, where=where, why=in_a_line(error))
    code = system.errno or 0
    file = f" ({system.filename})" if system.filename else ""
    return MachineError(
        what,
        where=where,
        why=f"{os.strerror(code) if code else system}{file}",
        fix=_FIXES.get(code, "look at that disk and at `dmesg | tail`"),
    )


def _system_error(error: BaseException | None) -> OSError | None:
    """The operating system's own error in a chain of errors; torch.save hides it in another."""
    while error is not None:
        if isinstance(error, OSError):
            return error
        error = error.__cause__ or error.__context__
    return None
