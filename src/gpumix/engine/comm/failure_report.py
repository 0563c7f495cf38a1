"""Error reports of failed ranks to waiting ranks.

Ranks with unmatched collectives wait for the group's full timeout, and get no reason. So a rank
that leaves a step by an error writes a report to the process group's store, and waiting ranks look
there now and then. Without errors, nothing is written or read.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from gpumix.engine.comm.hang_attribution import AwaitedCollective
from gpumix.schema.errors import GpumixError, TrainingError, format_in_one_line

# Interval at which a rank waiting for a collective checks for failures.
POLL_INTERVAL_S = 0.5
# Time that a failed rank stays for other ranks to read its report: the store may end with it.
LINGER_S = 4 * POLL_INTERVAL_S


class CommunicationError(TrainingError):
    """A collective failed: a peer died, failed or was too late, or the network broke.

    Args:
        wait: the collective waited for, unless a peer reported its error.
    """

    def __init__(self, what: str, *, wait: AwaitedCollective | None = None, **words: str) -> None:
        super().__init__(what, **words)
        self.wait = wait


class FailureReports:
    """Error reports of the ranks of an engine; without a store nothing is reported.

    Args:
        on_gloo: whether a wait may be interrupted and resumed.
    """

    def __init__(
        self,
        store: dist.Store | None = None,
        *,
        rank: int = 0,
        world: int = 1,
        on_gloo: bool = True,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world = world
        self._on_gloo = on_gloo

    @classmethod
    def of_default_group(cls, *, rank: int, world: int, on_gloo: bool) -> FailureReports:
        """Make a separate channel for each engine. Called once per engine on all ranks."""
        if world == 1 or not dist.is_initialized():
            return cls()
        default = dist.distributed_c10d._get_default_store()
        number = default.add(f"gpumix/engines/{rank}", 1)
        store = dist.PrefixStore(f"gpumix/engine{number}", default)
        return cls(store, rank=rank, world=world, on_gloo=on_gloo)

    def wait(self, work: dist.Work) -> None:
        """Wait for a collective, or for the error report of a rank that will not take part.

        Raises:
            CommunicationError: a rank reported an error.
            RuntimeError: the collective failed.
        """
        if self._store is None or not self._on_gloo:
            work.wait()
            return
        while True:
            try:
                work.wait(timedelta(seconds=POLL_INTERVAL_S))
                return
            except RuntimeError:
                if work.is_completed():  # late, or failed: then waiting raises again
                    work.wait()
                    return
            account = self.heard()
            if account is not None:
                raise account

    def after(self, error: BaseException) -> BaseException:
        """Return the error to raise when leaving a step by `error`: another rank's report if any,
        otherwise `error`, after reporting it."""
        if not isinstance(error, CommunicationError):
            self._say(error)
            return error
        return self.heard() or error

    def heard(self) -> CommunicationError | None:
        """Return another rank's report, if any."""
        if self._store is None:
            return None
        with suppress(RuntimeError):  # the store is gone
            if self._store.check(["failed"]):
                self._store.add("heard", 1)
                return _deserialize_error(self._store.get("failed").decode(), self._rank)
        return None

    def _say(self, error: BaseException) -> None:
        if self._store is None:
            return
        with suppress(RuntimeError):
            # If several ranks fail at once, the first is heard.
            told = json.dumps([self._rank, _serialize_error(error)])
            if self._store.compare_set("failed", "", told).decode() != told:
                return
            deadline = time.monotonic() + LINGER_S
            while self._store.add("heard", 0) < self._world - 1 and time.monotonic() < deadline:
                time.sleep(POLL_INTERVAL_S / 10)


def _serialize_error(error: BaseException) -> dict[str, str]:
    if isinstance(error, GpumixError):
        return {"what": error.what, "why": error.why, "fix": error.fix}
    return {"what": format_in_one_line(error), "why": "", "fix": ""}


def _deserialize_error(told: str, here: int) -> CommunicationError:
    rank, account = json.loads(told)
    return CommunicationError(
        f"rank {rank} failed: {account['what']}",
        code="other-rank-failed",
        where=f"rank {here}, which waited for it",
        why=account["why"],
        fix=account["fix"],
    )
