"""Reports of a run under way: in the run's folder, and on the terminal.

Only the first rank writes and shows; the other ranks send their measurements to it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from gpumix.data.core.read_policy import Skipped
from gpumix.engine.comm.step_recorder import RecordedStep
from gpumix.schema.units import show_seconds
from gpumix.train.checkpoint.checkpointer import Saved
from gpumix.train.elastic.plan_change import PlanParts, make_start_event
from gpumix.train.elastic.recovery import Restart
from gpumix.train.memory_checkpoint.memory_folder import WITHOUT_COPIES
from gpumix.train.monitor.step_history import StepHistory
from gpumix.train.monitor.step_timer import StepTimer
from gpumix.train.monitor.step_trace import build_trace
from gpumix.train.rank_setup.context import RankContext
from gpumix.train.run_figures.display import (
    Display,
    describe_first_reason,
    describe_input_bound_ranks,
    describe_skipped_samples,
)
from gpumix.train.run_figures.figures import RESUME_EVENT
from gpumix.train.run_figures.terminal_parts import SEPARATOR
from gpumix.train.run_figures.words import describe_model
from gpumix.train.run_figures.writer import RunLog
from gpumix.train.run_log import run_files
from gpumix.train.run_log.metrics import (
    WARM_UP_STEPS,
    ClassRecord,
    RankRecord,
    RunEvent,
    StepRecord,
    by_class,
    fullest_by_class,
)
from gpumix.train.state_keeper import TrainingParts

LATE_CHECKPOINT = (
    "a checkpoint is due before the last one is written, and put off until then: the disk is "
    "slower than `save_steps` asks for"
)


class RunLogger:
    """Reports by one rank.

    Attributes:
        records: measurements by rank since the exchange before; `classes` by device class.
        held_out_skipped: this rank's samples unreadable in evaluations.

    Args:
        begun_at: the step to resume from.
    """

    def __init__(
        self,
        context: RankContext,
        parts: TrainingParts,
        watch: StepTimer,
        taken: StepHistory,
        *,
        begun_at: int,
    ) -> None:
        engine = parts.engine
        self._context, self._engine, self._loader = context, engine, parts.loader
        self._keeping, self._watch, self._taken = parts.keeping, watch, taken
        self.records: list[RankRecord] = []
        self.classes: list[ClassRecord] = []
        self.held_out_skipped: list[Skipped] = []
        self._log = RunLog(
            context.job.output_dir, engine.plan, context.job.max_steps, done=begun_at
        )
        self._display: Display | None = None
        self._told_of_copies = self._told_of_disk = self._told_of_waiting = False
        self._begun_at = self._steps_before = begun_at
        self._sent_before = float(engine.comm.sent.total())
        self._fullest = fullest_by_class(engine.plan)  # of all plans so far, like measured peaks

    # -- of the run, by the first rank -------------------------------------------------------------

    def open(self, stack: ExitStack) -> None:
        """Write the run's files from here until the end of `stack`."""
        if self._context.first:
            stack.enter_context(self._log)
            job = self._context.job
            model = describe_model(job.model.model_dump(mode="json"))
            title = SEPARATOR.join(filter(None, (job.output_dir.name, model)))
            self._display = stack.enter_context(Display(self._log, job.logging_steps, title))

    def say(self, line: str) -> None:
        if self._display is not None:
            self._display.say(line)

    def tell(self, step: int, told: Sequence[RunEvent]) -> None:
        """Report findings or actions after a step."""
        if self._display is not None:
            for one in told:
                self._log.tell(step, one)
                if one.text:
                    self._display.say(one.text)

    def step(self, record: StepRecord) -> None:
        """Write a step into the log."""
        if self._display is not None:
            self._log.reduction(record.step, self._engine.reduction)
            self._log.step(record)

    def show_step(self, record: StepRecord) -> None:
        """Show a step that is in the log."""
        if self._display is not None:
            self._display.step(record)

    def start(self, before: PlanParts | None, restart: Restart | None) -> None:
        """Report that the run goes on, and a plan unlike the plan of the run `before`."""
        why = restart.decided if restart is not None else "the run was resumed"
        now = PlanParts.of(self._engine.plan, self._context.task.cluster)
        told = make_start_event(before, now, why) if before is not None else None
        resumed = restart is None and self._begun_at > 0
        events = [RunEvent(RESUME_EVENT, {}, "")] if resumed else []
        self.tell(self._begun_at, [*events, told] if told is not None else events)

    def restart(self, step: int, restart: Restart, kept_in: str) -> None:
        """Report a restart when training continues, from state kept in memory or on disk."""
        if self._display is not None:
            seconds = time.time() - restart.failed_at
            self._log.restart(
                step,
                resumed_from=self._begun_at,
                kept_in=kept_in,
                why=restart.why,
                decided=restart.decided,
                seconds=seconds,
            )
            self._display.say(f"training again after {show_seconds(seconds)}")

    def checkpoint(self, saved: Saved) -> None:
        if self._display is not None:
            self._log.checkpoint(
                saved.step, saved.path, seconds=saved.seconds, stalled_s=self._keeping.stalled_s
            )

    def log_late_checkpoint(self, step: int) -> None:
        """Report a checkpoint waiting for the previous checkpoint."""
        text = "" if self._told_of_disk else LATE_CHECKPOINT
        self._told_of_disk = True
        self.tell(step, [RunEvent("checkpoint-late", {}, text)])

    def evaluation(self, step: int, losses: Sequence[float]) -> None:
        """Report the mean loss of batches."""
        if self._display is not None:
            loss = sum(losses) / len(losses)
            self._log.evaluation(step, loss)
            self._display.evaluation(step, loss)

    def trace(self, step: int, told: Sequence[str]) -> None:
        """Save the trace of a step from the recordings of all ranks."""
        if self._display is not None:
            path = self._context.job.output_dir / run_files.TRACE
            recordings = [RecordedStep.from_json(text) for text in told]
            build_trace(self._engine.plan, recordings).save(path)
            self._display.say(f"trace of step {step}: {path}, open it in ui.perfetto.dev")

    def copies(self, refused: str) -> None:
        """Report, once in a run, why memory has no copies of the state."""
        if refused and self._display is not None and not self._told_of_copies:
            self._told_of_copies = True
            self._display.say(f"no copies of the state in memory: {refused}; {WITHOUT_COPIES}")

    def _log_blocking_saves(self, why: str) -> None:
        """Report, once in a run, why training waits for checkpoints."""
        if why and not self._told_of_waiting:
            self._told_of_waiting = True
            self.say(f"training stands still while a checkpoint is written: {why}")

    # -- of each rank, by all ----------------------------------------------------------------------

    def exchange(self, step: int, *, sent_bytes: float) -> None:
        """Exchange all ranks' measurements since the last call, without those of the first steps.
        Collective. Up to `step`, this rank has sent `sent_bytes` since it began."""
        sent_each = (sent_bytes - self._sent_before) / max(1, step - self._steps_before)
        self._sent_before, self._steps_before = sent_bytes, step
        watched = self._watch.take()
        shares = watched.shares()
        device, runtime = self._context.device, self._context.runtime
        clocks = runtime.clocks()
        mine = RankRecord(
            device=device.id,
            device_class=device.device_class,
            busy_share=shares.compute,
            peak_bytes=runtime.peak_bytes(),
            overruns=self._taken.overruns,
            laid_out_bytes=runtime.current_bytes(),
            reserved_bytes=runtime.peak_reserved_bytes(),
            retries=runtime.allocator_retries,
            sm_mhz=None if clocks is None else clocks.sm_mhz,
            sent_bytes=sent_each,
            shares=shares,
            starved_share=self._watch.starvation.share,
            input_limit=self._loader.limit,
            skipped=self._skipped,
            lost_workers=self._loader.lost_workers,
            not_copied=self._keeping.not_copied,
            saved_in_place=self._keeping.saved_in_place,
            **self._speed(watched.steps),
        )
        self._gather(mine)
        if self._display is not None:
            names = self._context.ranks.names
            self._log.classes(step, self.classes)
            self._log.ranks(step, self.records)
            if self._log.report_starvation(step, self.records):
                self.say(describe_input_bound_ranks(names, self.records))
            self.copies(describe_first_reason(names, (one.not_copied for one in self.records)))
            self._log_blocking_saves(
                describe_first_reason(names, (one.saved_in_place for one in self.records))
            )

    def end_warm_up(self, step: int) -> None:
        """After the first steps, leave their times out of the next exchange."""
        if step - self._begun_at == WARM_UP_STEPS:
            self._watch.take()

    def gather_figures(self) -> dict[str, Any]:
        """Return the figures of the run, and the classes' over the run. Collective."""
        figures = self._log.figures
        told = figures.as_dict() | {"classes": [asdict(one) for one in figures.classes]}
        own = json.dumps(told) if self._context.first else ""
        found: dict[str, Any] = json.loads(self._context.ranks.gather("figures", own)[0])
        return found

    def report_skipped_samples(self) -> None:
        """Report samples that could not be read. Collective."""
        told = self._context.ranks.gather("skipped", str(self._skipped))
        names = self._context.ranks.names
        missed = describe_skipped_samples(names, [int(text) for text in told])
        if missed and self._display is not None:
            self._display.say(missed)

    def exclude_sent_bytes(self, sent_bytes: int) -> None:
        """Exclude bytes sent outside of steps."""
        self._sent_before += sent_bytes

    @property
    def _skipped(self) -> int:
        return len(self._loader.skipped) + len(self.held_out_skipped)

    def _speed(self, last: int) -> dict[str, Any]:
        return self._taken.speed(self._engine.plan, self._context.ranks.rank, last)._asdict()

    def _gather(self, mine: RankRecord) -> None:
        told = self._context.ranks.gather("records", mine.to_json())
        self.records = [RankRecord.from_json(text) for text in told]
        self._fullest = fullest_by_class(self._engine.plan, self._fullest)
        self.classes = by_class(self._engine.plan, self.records, self._fullest)
