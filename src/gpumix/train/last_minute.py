"""Saves a run that was asked to end and whose step does not end in time.

Who asks (a cloud, a scheduler, `gpumix launch`) ends the processes some time later. The main thread
answers between two steps. Where that would be too late a thread beside it writes to disk what was
copied into the hosts' memory: all ranks together, of the last step of which all have a copy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from gpumix.engine.leaving import leave_together
from gpumix.engine.ranks import STORE_ERRORS
from gpumix.engine.stands import wait_of
from gpumix.hardware.environment import grace_of_launcher
from gpumix.spec.errors import GpumixError, Interrupted
from gpumix.spec.units import show_seconds
from gpumix.train import run_files
from gpumix.train.background import Overdue
from gpumix.train.checkpoint_together import not_in_time
from gpumix.train.context import Context
from gpumix.train.keeping import Keeping
from gpumix.train.metrics import WINDOW, typical_s
from gpumix.train.stop import StopRequest

# How long after SIGTERM torchrun, and most schedulers, let processes go on.
GRACE_S = 30.0
LOOK_S = 1.0  # between two looks at whether another rank is in a hurry
LOOK_ASKED_S = 0.1  # of one that was asked to end
# What a save took may be a little less than what the next one takes.
MARGIN = 1.5
# Of the grace period, for a save when none was made yet.
UNKNOWN_SAVE = 0.5
# Who saves the end of a run: the main threads, or those beside them. The first word counts.
END, BY_STEP, AT_ONCE = "end of the run", "by step", "at once"


@dataclass(frozen=True)
class Moment:
    """Where a rank is that was asked to end, by one clock.

    Attributes:
        asked_at: when that was; after `grace_s` more it is ended.
        began_at: when the step under way began; one usually takes `step_s`, 0 if that is unknown.
        tells: whether with that step all ranks hear of it, not only with the next.
        save_s: what the last checkpoint took, if there was one.
    """

    asked_at: float
    grace_s: float
    began_at: float
    step_s: float
    tells: bool
    save_s: float | None

    def too_late(self, now: float) -> bool:
        """Whether a checkpoint that is begun after the step may not be whole in time."""
        left_s = self.asked_at + self.grace_s - now
        step_left_s = max(0.0, self.began_at + self.step_s - now)
        if not self.tells:
            step_left_s += self.step_s
        needed_s = UNKNOWN_SAVE * self.grace_s if self.save_s is None else MARGIN * self.save_s
        return left_s - step_left_s < needed_s


class LastMinute:
    """One rank's part in it."""

    def __init__(self, context: Context, keeping: Keeping) -> None:
        self._ranks, self._keeping = context.ranks, keeping
        self._folder = context.job.output / run_files.CHECKPOINTS
        self._steps = context.job.steps
        self._grace_s = context.job.grace or grace_of_launcher() or GRACE_S
        self._began_at, self._step_s, self._tells = time.monotonic(), 0.0, False
        self._closed, self._over = threading.Event(), threading.Event()
        self._over.set()
        self._watching: int | None = None  # the thread

    @contextmanager
    def beside(self, stop: StopRequest) -> Iterator[None]:
        """Look, while the block trains, whether this rank or another one was asked to end."""
        threads = []
        if self._keeping.copies_in_memory:
            self._over.clear()
            watch = partial(self._watch, stop)
            threads = [threading.Thread(target=watch, name="gpumix-last-minute", daemon=True)]
            threads[0].start()
            self._watching = threads[0].ident
        try:
            yield
        finally:
            self._closed.set()
            stop.wake()
            leave_together(threads)

    def step_begins(self, before: Sequence[float], *, tells: bool) -> None:
        """After steps that took `before`; `tells`: see `Moment`."""
        self._step_s, self._tells = typical_s(before[-WINDOW:]), tells
        self._began_at = time.monotonic()

    def leave_to_me(self) -> None:
        """Said by the main thread before it saves for the last time; where the others have begun to
        it waits for them, and is raised out of here if they could.

        Raises:
            MachineError: the disk hangs.
            CommunicationError: another rank does.
        """
        if self._ranks.claim(END, BY_STEP) != AT_ONCE:
            return
        limit_s = min(self._grace_s + self._keeping.patience_s, threading.TIMEOUT_MAX)
        if not self._over.wait(limit_s):
            late = Overdue(limit_s, wait_of(self._watching))
            raise not_in_time(late, "save the end of the run", self._ranks.rank, self._folder)

    def _watch(self, stop: StopRequest) -> None:
        word, error = "", None  # to be raised in the main thread
        try:
            while not word and not self._closed.is_set():
                if stop.asked_at is None:
                    stop.wait(LOOK_S)
                else:
                    self._closed.wait(LOOK_ASKED_S)
                word = self._word(stop.asked_at)
            if word == AT_ONCE:
                error = self._saved()
        except STORE_ERRORS:  # the main thread will say so
            pass
        if error is not None:
            stop.leave(error)
        else:
            self._over.set()

    def _word(self, asked_at: float | None) -> str:
        """What is decided; empty if nothing is yet."""
        if asked_at is None:
            return self._ranks.claimed(END)
        at, save_s = self._began_at, self._keeping.save_s
        moment = Moment(asked_at, self._grace_s, at, self._step_s, self._tells, save_s)
        if moment.too_late(time.monotonic()):
            return self._ranks.claim(END, AT_ONCE)
        return self._ranks.claimed(END)

    def _saved(self) -> Interrupted | None:
        """What to tell of it; None if it could not be."""
        try:
            saved = self._keeping.save_copies(limit_s=self._grace_s)
        except (GpumixError, RuntimeError, OSError):
            saved = None
        if saved is None:  # the main thread saves
            self._keeping.go_on_copying()
            return None
        return Interrupted(
            f"stopped after step {saved.step} of {self._steps}",
            where=str(saved.path),
            why="the step under way was not to end, and be saved, within "
            f"{show_seconds(self._grace_s)} (`grace`)",
            fix="go on with the same command and --resume",
        )
