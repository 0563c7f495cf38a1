"""Where a run's state goes, and where it comes from: checkpoints on disk, and copies in memory."""

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
from gpumix.hardware.environment import shared_memory_folder
from gpumix.spec.errors import MachineError, first_line
from gpumix.spec.job import Job
from gpumix.spec.plan import Plan
from gpumix.train import memory_folder, memory_reader, run_files
from gpumix.train.checkpoint import Checkpointer, Saved
from gpumix.train.checkpoint_content import Content
from gpumix.train.checkpoint_file import Damaged, of_steps, step_of
from gpumix.train.context import Context
from gpumix.train.memory_buddies import Buddies
from gpumix.train.memory_checkpoint import MemoryCheckpointer
from gpumix.train.memory_folder import Found, Held, Home
from gpumix.train.metrics import Told
from gpumix.train.model_files import saved_beside_weights
from gpumix.train.run_id import id_of

# Of a step's time, what copies in memory may hold up training for, if their interval is chosen; of
# a step that takes for longer than so many seconds more, for each that is repeated costs as much.
MEMORY_SHARE, LONG_SHARE, LONG_STEP_S = 0.01, 0.05, 1.0
MEASURED_COPIES = 100
# What a disk must do at least beside the `timeout`, else it counts as one that hangs.
SLOWEST_BYTES_PER_S = 5e7
# Of a parameter's state: itself, and what most optimizers keep, in fp32 each.
BYTES_A_PARAMETER = 12
# After this step it is known what copies cost: the first makes room.
MEASURED_STEPS = 4


@dataclass(frozen=True)
class TakenUp:
    """What a run goes on from; `extra` is what was saved beside the state, `path` its checkpoint on
    disk: None for copies in memory."""

    step: int
    extra: dict[str, Any]
    path: Path | None = None
    passed_over: tuple[Damaged, ...] = ()

    @property
    def where(self) -> str:
        return str(self.path) if self.path is not None else f"copies in memory of step {self.step}"

    @property
    def of_steps(self) -> int | None:
        """The steps of the job that saved it; None if no job did."""
        return of_steps(self.extra)


def interval_of(copied_s: float, step_s: float) -> int:
    """Every so many steps of `step_s` the state is copied, for which training stands still for
    `copied_s` each time."""
    share = LONG_SHARE if step_s > LONG_STEP_S else MEMORY_SHARE
    return max(1, math.ceil(copied_s / max(step_s, 1e-9) / share))


class Keeping:
    """The state of a run, as one of its ranks keeps it. Methods are collective but where they say
    otherwise."""

    def __init__(
        self, context: Context, plan: Plan, engine: Engine, optimizer: Optimizer, loader: Loader
    ) -> None:
        self._context = context
        self._engine, self._optimizer, self._loader = engine, optimizer, loader
        job, ranks = context.job, context.ranks
        self._hosts = [worker.host for worker in plan.workers]
        here = [rank for rank, host in enumerate(self._hosts) if host == context.device.host]
        self._ranks_here = len(here)
        self._first_here = here[0] == ranks.rank
        self.patience_s = job.timeout + _size_of(engine) / SLOWEST_BYTES_PER_S
        """How long a checkpoint, or a copy in memory, may take."""
        self._group = self._group_of_ranks()
        self.checkpointer = self._checkpointer_of(self._group)
        self._beside: Checkpointer | None = None
        self._extra = _extra(job, plan, engine)
        self.stalled_s = 0.0
        """How long training stood still for the checkpoint that was begun last."""
        self.save_s: float | None = None
        """How long the last one was written."""
        self._safe_step = 0  # the state after it is on disk, or is what the run begins with
        self._begun_step = -1  # a checkpoint was begun after it
        root = shared_memory_folder()
        run = ranks.share("id of the run", id_of(job.output) if context.first else None)
        self._home = None if root is None else Home(root, job.output, context.device.host, run)
        self._memory: MemoryCheckpointer | None = None
        every = job.checkpoint.memory_every_steps
        self._every_steps = 1 if every == "auto" else every
        # How long training stood still for the newest copies in memory.
        self._copied_s: deque[float] = deque(maxlen=MEASURED_COPIES)
        # What cannot be saved is told now, and not when steps would be lost.
        Content.of(0, engine, optimizer, cursor=loader.state_dict(), extra=self._extra)

    def _checkpointer_of(self, group: dist.ProcessGroup | None) -> Checkpointer:
        job = self._context.job
        return Checkpointer(
            job.output / run_files.CHECKPOINTS,
            keep=job.checkpoint.keep,
            group=group,
            ranks_here=self._ranks_here,
            patience_s=self.patience_s,
        )

    def _group_of_ranks(self) -> dist.ProcessGroup | None:
        """Whoever writes for too long says so before the others give up waiting for it."""
        return self._context.ranks.checkpoint_group(patience_s=self.patience_s)

    # -- on disk -----------------------------------------------------------------------------------

    def begin_save(self, step: int, cursor: dict[str, Any] | None = None) -> None:
        """Write a checkpoint beside the next steps; the data goes on at `cursor`, by default behind
        the last batch. The one before must be finished."""
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
        """Whether no rank writes a checkpoint any more, after so long at most. Collective."""
        begun = time.perf_counter()
        self.checkpointer.wait(limit_s)
        writes = "" if self.checkpointer.writing_since is None else "writes"
        free = not any(self._context.ranks.gather("checkpoint written", writes))
        self.stalled_s += time.perf_counter() - begun
        return free

    def finish_save(self) -> Saved:
        """Wait for the checkpoint that was begun."""
        begun = time.perf_counter()
        saved = self.checkpointer.finish()
        self.stalled_s += time.perf_counter() - begun
        self.save_s = saved.seconds
        self._safe_step = saved.step
        return saved

    # -- in memory ---------------------------------------------------------------------------------

    def open_memory(self) -> str:
        """Have copies of the state in the hosts' memory from now on, and those of earlier runs
        removed; why not, if some rank cannot."""
        # Beside the main thread, whatever that does with the other one.
        self._beside = self._checkpointer_of(self._group_of_ranks())
        ranks, home = self._context.ranks, self._home
        if home is not None and self._first_here:
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
            rank=ranks.rank,
            world=ranks.world,
            ranks_here=self._ranks_here,
            tidies=self._first_here,
            extra=self._extra,
            buddies=self._buddies_in(home.generation(generation)),
            patience_s=self.patience_s,
        )
        return ""

    def _refusal(self, generation: int) -> str:
        """Why this rank cannot have copies in memory; else their folder is there."""
        if self._home is None:
            return "this system has no file system in memory"
        try:
            self._home.make(generation)
        except (MachineError, OSError) as error:
            return first_line(error)
        return ""

    def _buddies_in(self, place: Path) -> Buddies | None:
        """Where there are several hosts. Collective then."""
        if len(set(self._hosts)) == 1:
            return None
        group = self._group_of_ranks()
        assert group is not None
        return Buddies(place, self._hosts, group)

    def _told(self) -> list[list[Held]]:
        """The copies that each rank finds on its host."""
        held = self._home.held() if self._home is not None else []
        told = self._context.ranks.gather("held in memory", memory_folder.to_text(held))
        return [memory_folder.from_text(text) for text in told]

    def remembers(self, step: int) -> bool:
        """Whether it is the turn of the state after `step` to be copied. Not collective."""
        return self._memory is not None and step % self._every_steps == 0

    def remember(self, step: int) -> None:
        """Copy the state after `step` beside the next one, if it is its turn."""
        if self._memory is None or not self.remembers(step):
            return
        begun = time.perf_counter()
        self._memory.begin(step, self._engine, self._optimizer, self._loader.state_dict())
        self._copied_s.append(time.perf_counter() - begun)

    def keep(self, step: int) -> bool:
        """Have the state after `step`, of which a copy may be under way, in memory now; False if
        some rank has no copies there."""
        if self._memory is None:
            return False
        if step % self._every_steps:
            self._memory.begin(step, self._engine, self._optimizer, self._loader.state_dict())
        self._memory.finish()
        return not any(self._context.ranks.gather("kept in memory", self._memory.refused))

    def choose_interval(self, step_s: float) -> list[Told]:
        """By what the first copies took; see `interval_of`. What to say of it."""
        if self._memory is None or self._context.job.checkpoint.memory_every_steps != "auto":
            return []
        own = interval_of(min(self._copied_s, default=0.0), step_s)
        told = self._context.ranks.gather("copies' interval", str(own))
        self._every_steps = every = max(map(int, told))
        return [Told("copies", {"every_steps": every}, "")]

    def nothing_new(self, step: int, *, deadline: float) -> bool:
        """Whether on all ranks the state after `step`, the last one done, is on disk by then, or is
        what the run began with. Collective; for a thread beside the main one."""
        assert self._beside is not None
        being_written = self._begun_step == step
        saved = self.checkpointer.wait(deadline - time.monotonic() if being_written else 0.0)
        safe_step = self._safe_step if saved is None else saved.step
        return self._beside.all_say(step == safe_step, "nothing is new")

    def save_copies(self, *, deadline: float, needs_s: float) -> Saved | None:
        """Write to disk what is in memory: the newest state of which all ranks have a copy. A
        checkpoint that is being written is waited for; if that leaves no time for another one, it
        is the last. None if there is neither in time, or nothing is kept in memory. The state
        changes no more until `go_on_copying`. Collective; for a thread beside the main one.

        Args:
            deadline: when all is to be done, by `time.monotonic()`.
            needs_s: so long before a checkpoint is begun at the latest.
        """
        if self._memory is None:
            return None
        assert self._beside is not None
        held = self._memory.hold(max(0.0, deadline - time.monotonic()))
        self.checkpointer.wait(deadline - needs_s - time.monotonic())
        free = self.checkpointer.writing_since is None
        if not self._beside.all_say(free, "its disk is free"):
            return self.checkpointer.wait(deadline - time.monotonic())
        step = self._beside.common_step(held)
        return None if step is None else self._beside.save_copy(held[step])

    def go_on_copying(self) -> None:
        """After `save_copies`; not collective."""
        if self._memory is not None:
            self._memory.go_on()

    @property
    def not_copied(self) -> str:
        """Why this rank does not copy into memory any more, if it began to. Not collective."""
        return "" if self._memory is None else self._memory.refused

    @property
    def saved_in_place(self) -> str:
        """Why training waits until what this rank saves is written, if it does. Not collective."""
        return self.checkpointer.not_copied

    def forget(self) -> None:
        """The copies in memory are not needed any more. Not collective."""
        if self._home is not None and self._first_here:
            self._home.remove()

    # -- both --------------------------------------------------------------------------------------

    def settle(self, step: int) -> None:
        """Wait until the state may change: what is saved and copied is. All ranks call it before
        they agree on the norm of `step`. Not collective."""
        if self.checkpointer.under_way:
            begun = time.perf_counter()
            self.checkpointer.settle()
            self.stalled_s += time.perf_counter() - begun
        if self._memory is not None:
            begun = time.perf_counter()
            if step % self._every_steps:
                self._memory.settle()
            else:  # the next copy is made after this step
                self._memory.finish()
            if self._copied_s:
                self._copied_s[-1] += time.perf_counter() - begun

    def take_up(self, *, needed: bool) -> TakenUp | None:
        """Put the newest state that there is into engine, optimizer and loader; None if there is
        none, and none is needed.

        Raises:
            InputError: there is none that is whole, or it is of another model, optimizer or data.
        """
        in_memory, saved = self._found_in_memory(), self.checkpointer.latest()
        if in_memory is None:
            return self._from_disk(-1) if saved is not None or needed else None
        found, held = in_memory
        if saved is None or step_of(saved) <= found.step:
            return self._from_memory(found, held)
        try:
            return self._from_disk(found.step)
        except Damaged as error:  # all that are later
            return replace(self._from_memory(found, held), passed_over=(error,))

    def _from_disk(self, after: int) -> TakenUp:
        """The newest checkpoint that is whole, of a step later than `after`."""
        state = self.checkpointer.load(self._engine, self._optimizer, after=after)
        self._loader.load_state_dict(state.cursor)
        self._safe_step = state.step
        return TakenUp(state.step, state.extra, state.path, state.passed_over)

    def _found_in_memory(self) -> tuple[Found, list[Held]] | None:
        """What can be gone on from, and what of it is on this host."""
        told = self._told()
        found = memory_folder.newest(told)
        return None if found is None else (found, told[self._context.ranks.rank])

    def _from_memory(self, found: Found, held: list[Held]) -> TakenUp:
        assert self._home is not None
        manifest = memory_reader.load(
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
        return TakenUp(manifest.step, dict(manifest.extra))


def _size_of(engine: Engine) -> int:
    """Of a checkpoint, about; all of it, though each rank writes a part."""
    return BYTES_A_PARAMETER * sum(p.numel() for p in engine.model.parameters())


def _extra(job: Job, plan: Plan, engine: Engine) -> dict[str, Any]:
    """What is saved beside the state."""
    extra = {"job": job.model_dump(mode="json"), "plan": plan.model_dump(mode="json")}
    return extra | saved_beside_weights(engine.model)  # also if a factory made it
