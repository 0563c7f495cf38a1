"""Why a rank left a step, told to those that wait for it in vain.

Ranks whose collectives do not meet wait for the group's whole timeout, and then know nothing. So a
rank that leaves a step by an error leaves its account in the process group's store, and whoever
waits looks there now and then. Nothing is said, and nothing asked, while all goes well.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from gpumix.engine.held_up import Wait
from gpumix.spec.errors import GpumixError, TrainingError, in_a_line

# How long a rank waits for a collective before it looks whether somebody has failed.
LOOK_S = 0.5
# So long a rank that has failed stays for the others to hear it: the store may go with it.
STAY_S = 4 * LOOK_S


class CommunicationError(TrainingError):
    """A collective failed: a peer died, failed by itself, was too late, or the network broke.

    Args:
        wait: what was waited for, if it is not a peer's own account.
    """

    def __init__(self, what: str, *, wait: Wait | None = None, **words: str) -> None:
        super().__init__(what, **words)
        self.wait = wait


class LastWords:
    """What the ranks of an engine leave behind; without a store nobody hears anything.

    Args:
        on_gloo: whether a wait may be given up and taken up again.
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
    def of_default_group(cls, *, rank: int, world: int, on_gloo: bool) -> LastWords:
        """Made once per engine, on all ranks: each has words of its own."""
        if world == 1 or not dist.is_initialized():
            return cls()
        default = dist.distributed_c10d._get_default_store()
        number = default.add(f"gpumix/engines/{rank}", 1)
        store = dist.PrefixStore(f"gpumix/engine{number}", default)
        return cls(store, rank=rank, world=world, on_gloo=on_gloo)

    def wait(self, work: dist.Work) -> None:
        """Wait for a collective, or for the account of a rank that will not take part in it.

        Raises:
            CommunicationError: there is such an account.
            RuntimeError: the collective failed.
        """
        if self._store is None or not self._on_gloo:
            work.wait()
            return
        while True:
            try:
                work.wait(timedelta(seconds=LOOK_S))
                return
            except RuntimeError:
                if work.is_completed():  # at last, or because it failed: that raises again
                    work.wait()
                    return
            account = self.heard()
            if account is not None:
                raise account

    def after(self, error: BaseException) -> BaseException:
        """What a rank raises that leaves a step by `error`: another rank's account if there is one,
        else that error, once the others know."""
        if not isinstance(error, CommunicationError):
            self._say(error)
            return error
        return self.heard() or error

    def heard(self) -> CommunicationError | None:
        """What another rank has said, if any has."""
        if self._store is None:
            return None
        with suppress(RuntimeError):  # the store is gone
            if self._store.check(["failed"]):
                self._store.add("heard", 1)
                return _retold(self._store.get("failed").decode(), self._rank)
        return None

    def _say(self, error: BaseException) -> None:
        if self._store is None:
            return
        with suppress(RuntimeError):
            # Of several ranks that fail at once the first is heard.
            told = json.dumps([self._rank, _described(error)])
            if self._store.compare_set("failed", "", told).decode() != told:
                return
            deadline = time.monotonic() + STAY_S
            while self._store.add("heard", 0) < self._world - 1 and time.monotonic() < deadline:
                time.sleep(LOOK_S / 10)


def _described(error: BaseException) -> dict[str, str]:
    if isinstance(error, GpumixError):
        return {"what": error.what, "why": error.why, "fix": error.fix}
    return {"what": in_a_line(error), "why": "", "fix": ""}


def _retold(told: str, here: int) -> CommunicationError:
    rank, account = json.loads(told)
    return CommunicationError(
        f"rank {rank} failed: {account['what']}",
        where=f"rank {here}, which waited for it",
        why=account["why"],
        fix=account["fix"],
    )
