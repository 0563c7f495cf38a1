"""Saving and restoring of a run's state: checkpoints on disk, and copies in memory."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from gpumix.data.loader import Loader
from gpumix.engine.engine import Engine
from gpumix.engine.rehearsal.settled_reduction import SettledReduction
from gpumix.hardware.host.environment import shared_memory_folder
from gpumix.schema.errors import MachineError, get_first_line
from gpumix.schema.job.job import Job
from gpumix.schema.plan.plan import Plan
from gpumix.train.checkpoint.checkpointer import Checkpointer, Saved
from gpumix.train.checkpoint.content import Content
from gpumix.train.checkpoint.manifest import Damaged, get_job_steps, parse_step
from gpumix.train.checkpoint.model_files import dump_model_files
from gpumix.train.memory_checkpoint import memory_folder, reader
from gpumix.train.memory_checkpoint.checkpointer import MemoryCheckpointer
from gpumix.train.memory_checkpoint.memory_folder import MemoryFolder, NewestState, StateCopy
from gpumix.train.memory_checkpoint.rank_on_host import RankOnHost
from gpumix.train.memory_checkpoint.replication import BuddyReplicator
from gpumix.train.rank_setup.context import RankContext
from gpumix.train.run_log import run_files
from gpumix.train.run_log.metrics import RunEvent
from gpumix.train.run_log.run_id import read_run_id

# Share of step time that copies in memory may cost if their interval is chosen; more for steps
# longer than `LONG_STEP_S`, each as costly to repeat.
MEMORY_SHARE, LONG_SHARE, LONG_STEP_S = 0.01, 0.05, 1.0
MEASURED_COPIES = 100
# Time between checkpoints on disk if their interval is chosen.
SAVE_EVERY_S = 600.0
# Minimum disk throughput on top of `advanced.timeout`; a slower disk counts as hanging.
SLOWEST_BYTES_PER_S = 5e7
# A parameter and the usual optimizer state, in fp32 each.
BYTES_A_PARAMETER = 12
SETTLED_REDUCTION = "settled_reduction"  # key of the content next to copies in memory
# Copy costs are known after this step: the first copy allocates memory.
MEASURED_STEPS = 4


@dataclass(frozen=True)
class ResumedState:
    """State resumed by a run; `extra` is saved next to the state, `path` is the checkpoint on disk,
    or None for copies in memory."""

    step: int
    extra: dict[str, Any]
    path: Path | None = None
    passed_over: tuple[Damaged, ...] = ()

    @property
    def where(self) -> str:
        return str(self.path) if self.path is not None else f"copies in memory of step {self.step}"

    @property
    def of_steps(self) -> int | None:
        """The steps of the job having saved the state; None if no job did."""
        return get_job_steps(self.extra)


def choose_copy_interval(copied_s: float, step_s: float) -> int:
    """Return the interval in steps between copies, given the pause of training per copy and the
    step time."""
    share = LONG_SHARE if step_s > LONG_STEP_S else MEMORY_SHARE
    return max(1, math.ceil(copied_s / max(step_s, 1e-9) / share))


def choose_save_interval(step_s: float) -> int:
    """Return the interval in steps between checkpoints on disk, given the step time."""
    return max(1, math.ceil(SAVE_EVERY_S / max(step_s, 1e-3)))


class StateKeeper:
    """A rank's part in saving and restoring a run. Methods are collective unless documented
    otherwise."""

    def __init__(
        self, context: RankContext, plan: Plan, engine: Engine, optimizer: Optimizer, loader: Loader
    ) -> None:
        self._context = context
        self._engine, self._optimizer, self._loader = engine, optimizer, loader
        job, ranks = context.job, context.ranks
        self._place = RankOnHost(ranks.rank, [worker.host for worker in plan.workers])
        self.patience_s = job.advanced.timeout + _size_of(engine) / SLOWEST_BYTES_PER_S
        """Time limit of a checkpoint, or of a copy in memory."""
        self._group = self._group_of_ranks()
        self.checkpointer = self._checkpointer_of(self._group)
        self._beside: Checkpointer | None = None
        self._extra = _extra(job, plan, engine)
        self.stalled_s = 0.0
        """Pause of training for the checkpoint begun last."""
        self.save_s: float | None = None
        """Duration of writing the last checkpoint."""
        self._safe_step = 0  # the state after it is on disk, or is the run's initial state
        self._begun_step = -1  # step of the checkpoint begun last
        root = shared_memory_folder()
        run = ranks.share("id of the run", read_run_id(job.output_dir) if context.first else None)
        self._home = (
            None if root is None else MemoryFolder(root, job.output_dir, context.device.host, run)
        )
        self._memory: MemoryCheckpointer | None = None
        every = job.memory_save_steps
        self._every_steps = 1 if every == "auto" else every
        self.save_every_steps = job.stated_save_steps
        """Steps between checkpoints on disk; 0 if none is due, or before the interval is chosen."""
        # Pauses of training for the newest copies in memory.
        self._copied_s: deque[float] = deque(maxlen=MEASURED_COPIES)
        # State that cannot be saved is reported now, not when steps would be lost.
        Content.of(0, engine, optimizer, cursor=loader.state_dict(), extra=self._extra)

    def _checkpointer_of(self, group: dist.ProcessGroup | None) -> Checkpointer:
        job = self._context.job
        return Checkpointer(
            job.output_dir / run_files.CHECKPOINTS,
            keep=job.save_total_limit,
            group=group,
            ranks_here=self._place.ranks_here,
            patience_s=self.patience_s,
        )

    def _group_of_ranks(self) -> dist.ProcessGroup | None:
        """Return a group with a timeout long enough for a slow writer to report first."""
        return self._context.ranks.checkpoint_group(patience_s=self.patience_s)

    # -- on disk -----------------------------------------------------------------------------------

    def begin_save(self, step: int, cursor: dict[str, Any] | None = None) -> None:
        """Begin to write a checkpoint during the next steps; the data resumes at `cursor`, by
        default behind the last batch. The previous checkpoint must be finished."""
        begun = time.perf_counter()
        self._begun_step = step
        self.checkpointer.begin(
            step,
            self._engine,
            self._optimizer,
            cursor=cursor or self._loader.state_dict(),
            extra=self._extra,
        )
        self.stalled_s = time.perf_counter() - begun

    def is_free_within(self, limit_s: float) -> bool:
        """Return whether no rank writes a checkpoint any more, waiting at most `limit_s`.
        Collective."""
        begun = time.perf_counter()
        self.checkpointer.wait(limit_s)
        writes = "" if self.checkpointer.writing_since is None else "writes"
        free = not any(self._context.ranks.gather("checkpoint written", writes))
        self.stalled_s += time.perf_counter() - begun
        return free

    def finish_save(self) -> Saved:
        """Wait for the checkpoint begun last."""
        begun = time.perf_counter()
        saved = self.checkpointer.finish()
        self.stalled_s += time.perf_counter() - begun
        self.save_s = saved.seconds
        self._safe_step = saved.step
        return saved

    # -- in memory ---------------------------------------------------------------------------------

    def open_memory(self) -> str:
        """Start keeping copies of the state in host memory, and remove copies of earlier runs;
        return the reason if some rank cannot."""
        # For the thread next to the main thread, independent of its checkpoints.
        self._beside = self._checkpointer_of(self._group_of_ranks())
        ranks, home = self._context.ranks, self._home
        if home is not None and self._place.is_first_here:
            home.forget_other_runs()
        if not self._every_steps:
            return ""
        generation = memory_folder.latest_generation(self._told()) + 1
        refused = next(filter(None, ranks.gather("room in memory", self._refusal(generation))), "")
        if refused:
            return refused
        assert home is not None
        self._memory = MemoryCheckpointer(
            home,
            generation,
            place=self._place,
            extra=self._extra_of_copies,
            buddies=self._buddies_in(home.generation(generation)),
            patience_s=self.patience_s,
        )
        return ""

    def _extra_of_copies(self) -> dict[str, Any]:
        """Return the content next to the state, and how losses add up: see `assume_losses`."""
        found = self._engine.settled_reduction
        return self._extra if found is None else self._extra | {SETTLED_REDUCTION: found.to_json()}

    def _refusal(self, generation: int) -> str:
        """Make this rank's folder for copies in memory; return the reason if impossible."""
        if self._home is None:
            return "this system has no file system in memory"
        try:
            self._home.make(generation)
        except (MachineError, OSError) as error:
            return get_first_line(error)
        return ""

    def _buddies_in(self, folder: Path) -> BuddyReplicator | None:
        """Return the exchange with buddies, or None on a single host. Collective on several
        hosts."""
        if not self._place.has_other_hosts:
            return None
        group = self._group_of_ranks()
        assert group is not None
        return BuddyReplicator(folder, self._place.hosts, group)

    def _told(self) -> list[list[StateCopy]]:
        """Return the copies found by each rank on the rank's host."""
        held = self._home.held() if self._home is not None else []
        told = self._context.ranks.gather("held in memory", memory_folder.to_text(held))
        return [memory_folder.from_text(text) for text in told]

    def is_copy_due(self, step: int) -> bool:
        """Return whether the state after `step` is due to be copied. Not collective."""
        return self._memory is not None and step % self._every_steps == 0

    def begin_copy(self, step: int) -> None:
        """Copy the state after `step` during the next step, if due."""
        if self._memory is None or not self.is_copy_due(step):
            return
        begun = time.perf_counter()
        self._memory.begin(step, self._engine, self._optimizer, self._loader.state_dict())
        self._copied_s.append(time.perf_counter() - begun)

    def keep(self, step: int) -> bool:
        """Put the state after `step` into memory now, finishing any copy in progress; False if some
        rank cannot keep copies."""
        if self._memory is None:
            return False
        if step % self._every_steps:
            self._memory.begin(step, self._engine, self._optimizer, self._loader.state_dict())
        self._memory.finish()
        return not any(self._context.ranks.gather("kept in memory", self._memory.refused))

    def choose_intervals(self, step_s: float) -> list[RunEvent]:
        """Choose the intervals that the job leaves open: of copies in memory by the cost of the
        first (see `choose_copy_interval`), of checkpoints on disk by time. Return the report."""
        job, found = self._context.job, []
        copies = self._memory is not None and job.memory_save_steps == "auto"
        saves = job.save_steps == "auto"
        if not copies and not saves:
            return []
        copied_s = min(self._copied_s, default=0.0)
        own = f"{choose_copy_interval(copied_s, step_s)} {choose_save_interval(step_s)}"
        told = [text.split() for text in self._context.ranks.gather("intervals of saving", own)]
        if copies:
            self._every_steps = max(int(each) for each, _ in told)
            found.append(RunEvent("copies", {"every_steps": self._every_steps}, ""))
        if saves:
            self.save_every_steps = max(int(each) for _, each in told)
        return found

    def is_step_saved(self, step: int, *, deadline: float) -> bool:
        """Return whether on all ranks the state after `step`, the last done, is on disk by
        `deadline` or is the run's initial state. Collective; for a thread next to the main
        thread."""
        assert self._beside is not None
        being_written = self._begun_step == step
        saved = self.checkpointer.wait(deadline - time.monotonic() if being_written else 0.0)
        safe_step = self._safe_step if saved is None else saved.step
        return self._beside.all_say(step == safe_step, "nothing is new")

    def save_copies(self, *, deadline: float, needs_s: float) -> Saved | None:
        """Write the newest state with a copy on all ranks from memory to disk.

        First waits for a checkpoint being written; without time for another, that checkpoint is the
        last. Returns None if neither is written in time, or no copies are kept. The state does not
        change until `resume_copying`. Collective; for a thread next to the main thread.

        Args:
            deadline: end of the save, by `time.monotonic()`.
            needs_s: minimum time left when a checkpoint is begun.
        """
        if self._memory is None:
            return None
        assert self._beside is not None
        held = self._memory.pause_copying(max(0.0, deadline - time.monotonic()))
        self.checkpointer.wait(deadline - needs_s - time.monotonic())
        free = self.checkpointer.writing_since is None
        if not self._beside.all_say(free, "its disk is free"):
            return self.checkpointer.wait(deadline - time.monotonic())
        step = self._beside.common_step(held)
        return None if step is None else self._beside.save_copy(held[step])

    def resume_copying(self) -> None:
        """Resume copying after `save_copies`; not collective."""
        if self._memory is not None:
            self._memory.go_on()

    @property
    def not_copied(self) -> str:
        """Reason why this rank has stopped copying into memory, or empty. Not collective."""
        return "" if self._memory is None else self._memory.refused

    @property
    def saved_in_place(self) -> str:
        """Reason why training waits until this rank's state is written, or empty. Not
        collective."""
        return self.checkpointer.not_copied

    def forget(self) -> None:
        """Remove the copies in memory, no longer needed. Not collective."""
        if self._home is not None and self._place.is_first_here:
            self._home.remove()

    # -- both --------------------------------------------------------------------------------------

    def settle(self, step: int) -> None:
        """Wait until the state may change, once saved and copied. All ranks call it before agreeing
        on the norm of `step`. Not collective."""
        if self.checkpointer.under_way:
            begun = time.perf_counter()
            self.checkpointer.settle()
            self.stalled_s += time.perf_counter() - begun
        if self._memory is not None:
            begun = time.perf_counter()
            if step % self._every_steps:
                self._memory.settle()
            else:  # the next copy follows this step
                self._memory.finish()
            if self._copied_s:
                self._copied_s[-1] += time.perf_counter() - begun

    def restore_newest_state(self, *, needed: bool) -> ResumedState | None:
        """Restore the newest state into engine, optimizer and loader; None if there is no state and
        none is needed.

        Raises:
            InputError: no state is intact, or it is of another model, optimizer or data.
        """
        in_memory, saved = self._found_in_memory(), self.checkpointer.latest()
        if in_memory is None:
            return self._from_disk(-1) if saved is not None or needed else None
        found, held = in_memory
        if saved is None or parse_step(saved) <= found.step:
            return self._from_memory(found, held)
        try:
            return self._from_disk(found.step)
        except Damaged as error:  # all later checkpoints are
            return replace(self._from_memory(found, held), passed_over=(error,))

    def _from_disk(self, after: int) -> ResumedState:
        """Load the newest intact checkpoint of a step later than `after`."""
        state = self.checkpointer.load(self._engine, self._optimizer, after=after)
        self._loader.load_state_dict(state.cursor)
        self._safe_step = state.step
        return ResumedState(state.step, state.extra, state.path, state.passed_over)

    def assume_losses(self, state: ResumedState) -> None:
        """Skip the first rehearsal, if copies in memory are of the same plan and job. Collective.

        Args:
            state: what was restored; the job's code is that of the copies.
        """
        known = state.extra.get(SETTLED_REDUCTION)
        if known is not None and all(state.extra.get(k) == self._extra[k] for k in ("job", "plan")):
            self._engine.assume(SettledReduction.from_json(known))

    def _found_in_memory(self) -> tuple[NewestState, list[StateCopy]] | None:
        """Return the newest state in memory to resume from, and the copies on this host."""
        told = self._told()
        found = memory_folder.find_newest_state(told)
        return None if found is None else (found, told[self._context.ranks.rank])

    def _from_memory(self, found: NewestState, held: list[StateCopy]) -> ResumedState:
        assert self._home is not None
        manifest = reader.load_state(
            self._home,
            held,
            found,
            self._context.ranks,
            self._group,
            self._engine,
            self._optimizer,
        )
        self._loader.load_state_dict(dict(manifest.cursor))
        self._safe_step = -1
        return ResumedState(manifest.step, dict(manifest.extra))


@dataclass(frozen=True)
class TrainingParts:
    """Parts of a rank's training whose state `keeping` saves."""

    engine: Engine
    optimizer: Optimizer
    loader: Loader
    keeping: StateKeeper


def _size_of(engine: Engine) -> int:
    """Return the approximate bytes of a checkpoint, all ranks' parts together."""
    return BYTES_A_PARAMETER * sum(p.numel() for p in engine.model.parameters())


def _extra(job: Job, plan: Plan, engine: Engine) -> dict[str, Any]:
    """Return the content saved next to the state."""
    extra = {"job": job.model_dump(mode="json"), "plan": plan.model_dump(mode="json")}
    return extra | dump_model_files(engine.model)  # also for a model from a factory
