"""Last save of a run asked to end whose step does not end in time.

The sender of the request (a cloud, a scheduler, `gpumix launch`) ends the processes some time
later. The main thread answers between two steps. If that is too late, a second thread writes the
copies in host memory to disk: all ranks together, for the newest step with a copy on all ranks. If
the last completed step is on disk, or none was completed yet, the run ends without a save.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpumix.engine.comm.collective_progress import get_awaited_collective
from gpumix.engine.comm.thread_shutdown import join_threads
from gpumix.engine.rank_group import STORE_ERRORS
from gpumix.hardware.host.environment import grace_of_launcher
from gpumix.schema.errors import GpumixError, Interrupted
from gpumix.schema.units import show_seconds
from gpumix.train.checkpoint.background import BackgroundTimeout
from gpumix.train.checkpoint.collective_errors import make_timeout_error
from gpumix.train.checkpoint.manifest import get_folder_name
from gpumix.train.processes.stop_signals import StopRequest
from gpumix.train.rank_setup.context import RankContext
from gpumix.train.run_log import run_files
from gpumix.train.run_log.metrics import compute_median_s
from gpumix.train.state_keeper import StateKeeper

# Time after SIGTERM before torchrun and most schedulers kill processes.
GRACE_S = 30.0
LOOK_S = 1.0  # between checks for a hurried rank elsewhere
LOOK_ASKED_S = 0.1  # on a rank asked to end
RECENT_STEPS = 20  # that tell how long a step takes now
# The next save may take longer than the last by this factor.
SAVE_TIME_FACTOR = 1.5
# Assumed save time before the first save, as a share of the grace period.
UNKNOWN_SAVE = 0.5
# Who saves the end of a run: the main threads, or the second threads, and within how many seconds.
# The first claim counts.
LAST_SAVE_KEY, BY_STEP, AT_ONCE = "end of the run", "by step", "at once, within "


@dataclass(frozen=True)
class StopTiming:
    """Timing of a rank asked to end, by a single clock.

    Attributes:
        asked_at: time of the request; the rank is killed `grace_s` later.
        began_at: begin of the current step; a step usually takes `step_s`, 0 if unknown.
        tells: whether all ranks learn of the request with this step, or only with the next.
        behind: number of steps by which they learn of it later.
        save_s: duration of the last checkpoint, if there was one.
        writing_since: begin of the checkpoint being written, if any: no other can begin before it
            is complete.
    """

    asked_at: float
    grace_s: float
    began_at: float
    step_s: float
    announced: bool
    save_s: float | None
    writing_since: float | None = None
    behind: int = 0

    @property
    def deadline(self) -> float:
        """The time by which everything must be done."""
        return self.asked_at + self.grace_s

    def too_late(self, now: float) -> bool:
        """Return whether a checkpoint begun after the step may be incomplete at the deadline."""
        step_left_s = max(0.0, self.began_at + self.step_s - now)
        step_left_s += self.step_s * (self.behind + (not self.announced))
        wait_s = max(step_left_s, self._write_left_s(now))
        return now + wait_s + self.needs_s(now) > self.deadline

    def needs_s(self, now: float) -> float:
        """Return the assumed duration of a checkpoint, at least the current checkpoint's so far."""
        known_s = (
            UNKNOWN_SAVE * self.grace_s if self.save_s is None else SAVE_TIME_FACTOR * self.save_s
        )
        return max(known_s, SAVE_TIME_FACTOR * self._written_s(now))

    def _written_s(self, now: float) -> float:
        return 0.0 if self.writing_since is None else now - self.writing_since

    def _write_left_s(self, now: float) -> float:
        """Return the time left for the current checkpoint; if unknown, the time elapsed so far."""
        written_s = self._written_s(now)
        if self.writing_since is None or self.save_s is None:
            return written_s
        return max(0.0, SAVE_TIME_FACTOR * self.save_s - written_s)


class PreemptionSaver:
    """A rank's part in the last save.

    Args:
        done: returns the number of completed steps.
    """

    def __init__(self, context: RankContext, keeping: StateKeeper, done: Callable[[], int]) -> None:
        self._ranks, self._keeping, self._done = context.ranks, keeping, done
        self._folder = context.job.output_dir / run_files.CHECKPOINTS
        self._steps = context.job.max_steps
        self._grace_s = context.job.advanced.grace_period or grace_of_launcher() or GRACE_S
        self._began_at, self._step_s, self._tells = time.monotonic(), 0.0, False
        self._behind = 0
        self._closed, self._over = threading.Event(), threading.Event()
        self._over.set()
        self._watching: int | None = None  # the second thread

    @contextmanager
    def beside(self, stop: StopRequest) -> Iterator[None]:
        """Watch during the block for a request to end on this or another rank."""
        self._over.clear()
        watch = partial(self._watch, stop)
        thread = threading.Thread(target=watch, name="gpumix-last-minute", daemon=True)
        thread.start()
        self._watching = thread.ident
        try:
            yield
        finally:
            self._closed.set()
            stop.wake()
            join_threads([thread])

    def step_begins(self, before: Sequence[float], *, tells: bool, behind: int = 0) -> None:
        """Note the begin of a step; `before` are earlier step times, `announced` and `behind` as in
        `StopTiming`."""
        self._step_s, self._tells, self._behind = (
            compute_median_s(before[-RECENT_STEPS:]),
            tells,
            behind,
        )
        self._began_at = time.monotonic()

    def claim_last_save(self) -> None:
        """Claim the last save for the main thread. If the second threads have begun to save, wait
        for them; their success raises `Interrupted` out of here.

        Raises:
            MachineError: the disk hangs.
            CommunicationError: another rank hangs.
        """
        if not self._ranks.claim(LAST_SAVE_KEY, BY_STEP).startswith(AT_ONCE):
            return
        limit_s = min(self._grace_s + self._keeping.patience_s, threading.TIMEOUT_MAX)
        if not self._over.wait(limit_s):
            late = BackgroundTimeout(limit_s, get_awaited_collective(self._watching))
            raise make_timeout_error(
                late, "save the end of the run", self._ranks.rank, self._folder
            )

    def _watch(self, stop: StopRequest) -> None:
        word, error = "", None  # to raise in the main thread
        try:
            while not word and not self._closed.is_set():
                if stop.asked_at is None:
                    stop.wait(LOOK_S)
                else:
                    self._closed.wait(LOOK_ASKED_S)
                word = self._claim_if_late(stop.asked_at)
            if word.startswith(AT_ONCE):
                error = self._saved(float(word.removeprefix(AT_ONCE)))
        except STORE_ERRORS:  # the main thread reports it
            pass
        if error is not None:
            stop.leave(error)
        else:
            self._over.set()

    def _claim_if_late(self, asked_at: float | None) -> str:
        """Return the claim on the last save, claiming it if the main thread would be too late;
        empty if undecided."""
        if asked_at is None:
            return self._ranks.claimed(LAST_SAVE_KEY)
        moment, now = self._moment(asked_at), time.monotonic()
        if moment.too_late(now):
            return self._ranks.claim(LAST_SAVE_KEY, f"{AT_ONCE}{moment.deadline - now:.3f}")
        return self._ranks.claimed(LAST_SAVE_KEY)

    def _moment(self, asked_at: float) -> StopTiming:
        return StopTiming(
            asked_at,
            self._grace_s,
            self._began_at,
            self._step_s,
            self._tells,
            self._keeping.save_s,
            self._keeping.checkpointer.writing_since,
            self._behind,
        )

    def _saved(self, left_s: float) -> Interrupted | None:
        """Save within `left_s` seconds; return the error reporting the save, or None if
        impossible."""
        now = time.monotonic()
        moment = self._moment(now + left_s - self._grace_s)
        try:
            done = self._done()
            if self._keeping.is_step_saved(done, deadline=moment.deadline):
                return self._ended_without_a_save(done)
            saved = self._keeping.save_copies(deadline=moment.deadline, needs_s=moment.needs_s(now))
        except (GpumixError, RuntimeError, OSError):
            saved = None
        if saved is None:  # the main thread saves
            self._keeping.resume_copying()
            return None
        late = f"the step under way was not to end, and be saved, within {self._grace}"
        return self._stopped_after(saved.step, saved.path, late)

    @property
    def _grace(self) -> str:
        return f"{show_seconds(self._grace_s)} (`advanced.grace_period`)"

    def _ended_without_a_save(self, done: int) -> Interrupted:
        if not done:
            return Interrupted(
                "stopped before the first step was done",
                code="stopped-before-first-step",
                why=f"it was not to end within {self._grace}; nothing was trained that could be "
                "saved",
                fix="start it again with the same command",
            )
        late = f"the step under way was not to end within {self._grace}"
        why = f"{late}; nothing was trained since the last checkpoint"
        return self._stopped_after(done, self._folder / get_folder_name(done), why)

    def _stopped_after(self, step: int, saved: Path, why: str) -> Interrupted:
        return Interrupted(
            f"stopped after step {step} of {self._steps}",
            code="stopped-after-step",
            where=str(saved),
            why=why,
            fix="go on with the same command and --resume",
        )
