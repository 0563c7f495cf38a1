"""Task dispatch to ranks through the store, with a limit on every wait."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch.distributed as dist

from gpumix.check.probes.probe import JsonDict
from gpumix.check.probes.worker import END, RESTART_S, SHORT_POLL_S, STORE_PREFIX

SLACK_S = RESTART_S + 1.0  # margin for a rank to report its hung process
LEAVE_S = 2.0  # time for ranks to leave before the store closes
MOST_SILENT = 2  # consecutive hangs before a rank counts as lost


@dataclass(frozen=True)
class TaskAnswer:
    """A rank's answer to a task.

    Attributes:
        error: reason for a missing value; empty if a value is present.
        silent: the process hung and was killed.
    """

    value: JsonDict = field(default_factory=dict)
    error: str = ""
    fix: str = ""
    silent: bool = False


class RankClients:
    """All ranks, from the view of the asking process.

    Attributes:
        lost: ranks without answers, excluded from further tasks.

    Args:
        deadline: in `time.monotonic` time; no wait continues past it.
    """

    def __init__(self, store: dist.Store, world: int, deadline: float) -> None:
        self.lost: set[int] = set()
        self._words = [dist.PrefixStore(f"{STORE_PREFIX}/{rank}", store) for rank in range(world)]
        self._asked = [0] * world
        self._silences: Counter[int] = Counter()
        self._deadline = deadline

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self._deadline - time.monotonic())

    def collect_hellos(self, patience_s: float) -> list[JsonDict | None]:
        """Return the hello of each rank; None for an absent rank, counted as lost."""
        found: list[JsonDict | None] = []
        until = time.monotonic() + min(patience_s, self.left_s)
        for rank in range(len(self._words)):
            found.append(self._heard(rank, "hello", until))
            if found[-1] is None:
                self.lost.add(rank)
        return found

    def ask(
        self, task: str, given: Mapping[int, JsonDict] | Collection[int], limit_s: float
    ) -> dict[int, TaskAnswer]:
        """Run a task on several ranks at once, with arguments by rank; return the answers of all
        ranks not lost before."""
        given = given if isinstance(given, Mapping) else {rank: {} for rank in given}
        limit_s = min(limit_s, self.left_s)
        asked: dict[int, int] = {}
        for rank, arguments in given.items():
            if rank in self.lost or limit_s <= 0:
                continue
            asked[rank] = self._asked[rank]
            self._give(rank, {"task": task, "given": arguments, "limit_s": limit_s})
        until = time.monotonic() + limit_s + SLACK_S
        return {rank: self._answer(rank, n, until, limit_s) for rank, n in asked.items()}

    def ahead_s(self, rank: int) -> tuple[float, float] | None:
        """Return the lead of a rank's clock over the local clock, and the uncertainty."""
        begun = time.time()
        answer = self.ask("clock", {rank: {}}, 1.0).get(rank)
        ended = time.time()
        if answer is None or answer.error:
            return None
        return answer.value["now_s"] - (begun + ended) / 2, (ended - begun) / 2

    def dismiss(self, ranks: Iterable[int], *, failed: bool) -> None:
        """Send the end task to the given ranks; `failed` is the result of the check."""
        for rank in ranks:
            self._give(rank, {"task": END, "failed": failed})

    def wait_for_ends(self, ranks: Iterable[int]) -> None:
        """Wait until the given ranks have left, at most `LEAVE_S`."""
        until = time.monotonic() + LEAVE_S
        for rank in ranks:
            self._heard(rank, "gone", until)

    def _give(self, rank: int, task: JsonDict) -> None:
        self._words[rank].set(f"task/{self._asked[rank]}", json.dumps(task))
        self._asked[rank] += 1

    def _answer(self, rank: int, number: int, until: float, limit_s: float) -> TaskAnswer:
        told = self._heard(rank, f"answer/{number}", until)
        if told is None:
            self.lost.add(rank)
            return TaskAnswer(error=f"no answer within {limit_s:.0f} s", silent=True)
        if "value" in told:
            self._silences[rank] = 0
            return TaskAnswer(value=told["value"])
        if told["silent"]:
            self._silences[rank] += 1
            if self._silences[rank] == MOST_SILENT:
                self.lost.add(rank)
        return TaskAnswer(error=told["error"], fix=told["fix"], silent=told["silent"])

    def _heard(self, rank: int, key: str, until: float) -> JsonDict | None:
        words = self._words[rank]
        while not words.check([key]):
            if time.monotonic() > until:
                return None
            time.sleep(SHORT_POLL_S)
        told: JsonDict = json.loads(words.get(key).decode())
        return told
