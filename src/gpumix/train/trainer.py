"""Training loop of a rank. `Trainer.run` reads top to bottom."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NoReturn

from gpumix.data.loader import evaluation_batches
from gpumix.engine.comm.step_exchange import StepTable
from gpumix.engine.comm.step_recorder import SILENT, Recorder
from gpumix.engine.optimizers.overlapped_step import is_elementwise
from gpumix.engine.reshard import can_move_state
from gpumix.schema.errors import Interrupted
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile
from gpumix.train.async_steps import BadStep, IssuedSteps, ReadStep
from gpumix.train.checkpoint.checkpointer import Saved
from gpumix.train.checks.non_finite import (
    make_corrupt_weights_error,
    make_no_labels_error,
    make_overflow_error,
)
from gpumix.train.elastic.plan_change import PlanParts
from gpumix.train.elastic.recovery import Restart
from gpumix.train.monitor.clock_warnings import ClockMonitor
from gpumix.train.monitor.corruption_monitor import CorruptionMonitor
from gpumix.train.monitor.host_syncs import record_syncs
from gpumix.train.monitor.trial_hook import TrialObserver
from gpumix.train.preemption_save import PreemptionSaver
from gpumix.train.processes.stop_signals import StopRequest
from gpumix.train.rank_setup.context import RankContext
from gpumix.train.rebalance_controller import RebalanceController
from gpumix.train.run_log.interruption_cost import InterruptionCost, measure_s
from gpumix.train.run_log.metrics import WARM_UP_STEPS, RunEvent, StepRecord, compute_median_s
from gpumix.train.run_log.summary import Summary, TrialResult
from gpumix.train.run_logger import RunLogger
from gpumix.train.state_keeper import MEASURED_STEPS, ResumedState, TrainingParts

# Notices sent through the engine; the largest counts.
WRITING = 0.5  # a checkpoint is being written
STOP = 1.0  # this rank was asked to stop
UNSAVED = 2.0  # a checkpoint could not be written
# Maximum time steps wait for a checkpoint in progress when the next is due.
MOST_STALL_S = 5.0
MOST_OVERLAPPED_STEPS = 8  # measured during a checkpoint


@dataclass(frozen=True)
class TrainingStart:
    """Start of a run, or of a later part of it.

    Attributes:
        state: state of an earlier part, already restored.
        plan_before: the plan's parts in force before; on the first rank.
        restart: reason for the restart of the run.
    """

    state: ResumedState | None = None
    plan_before: PlanParts | None = None
    restart: Restart | None = None


class Trainer:
    """Training of a job by a plan, on a single rank; `train.trainer_builder` builds it.

    Args:
        context: this rank's device, peers and data.
        plan: the workers in the order of the ranks.
        profile: the plan's source, if known.
    """

    def __init__(
        self,
        context: RankContext,
        plan: Plan,
        parts: TrainingParts,
        start: TrainingStart,
        profile: Profile | None,
    ) -> None:
        self.context, self.job, self.plan = context, context.job, plan
        self.engine, self.optimizer, self.loader = parts.engine, parts.optimizer, parts.loader
        self.keeping = parts.keeping
        self._start = start
        self._begun_at = self.step = start.state.step if start.state is not None else 0
        self._last_minute = PreemptionSaver(context, self.keeping, lambda: self.step)
        self._at_once_until = 0
        self._stopping = False
        self._found: list[RunEvent] = []  # on a coming change of the plan
        self._put_off = False  # a checkpoint is due and was put off
        self._restart = start.restart  # until told
        self.steps = IssuedSteps(context, parts, done=self.step, not_finite=self._not_finite)
        self.taken, self.watch = self.steps.taken, self.steps.watch
        self._telling = RunLogger(context, parts, self.watch, self.taken, begun_at=self.step)
        self._balancing = self._make_controller(profile) if self.job.advanced.rebalance else None
        self._clocks = ClockMonitor(profile)
        self._soundness = CorruptionMonitor(context, plan, self.engine)

    def _make_controller(self, profile: Profile | None) -> RebalanceController:
        moves = can_move_state(self.plan) and is_elementwise(self.optimizer)
        step_s = self._restart.step_s if self._restart is not None else None
        return RebalanceController(
            self.plan, profile, self.context, state_moves=moves, step_before_s=step_s
        )

    def run(self) -> Summary:
        """Train to the end.

        Raises:
            Interrupted: asked to stop; the state is saved.
            TrainingError: the loss is not finite; the state before that step is saved.
        """
        saved = self._start.state.path if self._start.state is not None else None
        if saved is not None and self.step >= self.job.max_steps:
            return self._summary(saved)  # nothing is left to train or to write
        with ExitStack() as stack:
            stack.enter_context(self.loader)
            stop = stack.enter_context(StopRequest())
            self._telling.open(stack)
            stack.push(self._tell_of_what_is_there)
            self._telling.start(self._start.plan_before, self._start.restart)
            self._telling.copies(self.keeping.open_memory())
            stack.enter_context(self._last_minute.beside(stop))
            if self._soundness.no_replay_reason:
                self._telling.say(f"no batch is replayed: {self._soundness.no_replay_reason}")
            while self.steps.given < self.job.max_steps:
                traced = self.steps.given + 1 == self.job.advanced.trace_step
                step = self._traced_step if traced else self.issue_step
                step(stop)
                while self.steps.unread > self._most_pending():
                    done = self._read()
                    self._tell(done)
                    self._after(done.exchanged)
            self._report_last_split()
            self.engine.look_back()
            path = self.save()
            self.keeping.forget()
            return self._summary(path)

    def _after(self, exchanged: StepTable) -> None:
        """Act on a step just read, given the ranks' reports."""
        if self._due(self.job.eval_steps):
            sent_bytes = self.engine.comm.sent.total()
            self._evaluate()
            self._telling.exclude_sent_bytes(self.engine.comm.sent.total() - sent_bytes)
        if self.step == self.job.max_steps:
            return
        # An error is raised in one step on all ranks, once all know of it.
        if self.keeping.checkpointer.written or UNSAVED in exchanged.notices:
            self._finish_save()
        self._stopping |= STOP in exchanged.notices
        if self._stopping:
            if not self.steps.unread:
                self._stop()
            return
        self._save_if_due(writing=WRITING in exchanged.notices)
        self._remember()
        self._rebalance(exchanged.reports)
        self._telling.tell(self.step, self._soundness.after_step(self.step, exchanged))

    def try_out(
        self, steps: int, *, beside: bool = False, watcher: TrialObserver | None = None
    ) -> TrialResult:
        """Train `steps` steps after the warm-up; nothing is written.

        Args:
            beside: then evaluate once and save a few times, if the job does so; and detect host
                synchronizations in one more step.
            watcher: entered before; may want another step.
        """
        evaluation = save = InterruptionCost()
        with self.loader, StopRequest() as stop:
            for _ in range(WARM_UP_STEPS):
                self.train_step(stop)
            self._telling.exchange(self.step, sent_bytes=self.engine.comm.sent.total())
            waited_s, before = self.engine.comm.clock.total_s(), self._counters()
            records, tokens, padded = [], 0, 0
            if watcher is not None:
                watcher.begins()
            for _ in range(steps):
                self.issue_step(stop)
                while self.steps.unread > int(self.steps.late):
                    records.append(self._read().record)
                for lengths in self.steps.lengths():
                    tokens, padded = tokens + sum(lengths), padded + len(lengths) * max(lengths)
            records += [self._read().record for _ in range(self.steps.unread)]
            if watcher is not None:
                watcher.ends()
            tokens_a_step = fmean(self.taken.tokens[-steps:])
            waited_s = self.engine.comm.clock.total_s() - waited_s
            counted = [now - then for now, then in zip(self._counters(), before)]
            shares = self.watch.take().shares()
            if beside and self.job.eval_steps:
                evaluation = InterruptionCost(pause_s=measure_s(self._evaluate))
            if beside and self.job.stated_save_steps:
                usual_s = fmean(r.step_s for r in records)
                save = self._save_beside(stop, 1, usual_s)
                lasts = self._steps_beside(save, usual_s)
                # The first checkpoints take longer.
                for _ in range(3 if lasts < MOST_OVERLAPPED_STEPS else 1):
                    save = self._save_beside(stop, lasts, usual_s)
            with record_syncs(self.engine.device if beside else None) as syncs:
                classes = self.context.task.cluster.classes  # all ranks step, or none
                if beside and any(one.is_gpu for one in classes):
                    self.train_step(stop)
            if watcher is not None and watcher.looks:
                with watcher.looking():
                    self.train_step(stop)
        times = [r.step_s for r in records]
        step_s = compute_median_s(times)
        own = {
            "peak_bytes": self.context.runtime.peak_bytes(),
            "busy_shares": 1.0 - waited_s / sum(times),
            "input_shares": shares.input,
            "overruns": counted[0],
            "limits": self.loader.limit.value,
            "retries": counted[1],
            "tokens": tokens,
            "padded": padded,
            "syncs": syncs(),
            "told": watcher.told() if watcher is not None else None,
        }
        told = [json.loads(text) for text in self.context.ranks.gather("trial", json.dumps(own))]
        every = {name: [one[name] for one in told] for name in own}
        all_tokens, all_padded = sum(every.pop("tokens")), sum(every.pop("padded"))
        # All ranks return the first rank's findings.
        syncs_of_first, told_by_first = every.pop("syncs")[0], every.pop("told")[0]
        return TrialResult(
            step_s=step_s,
            mean_s=sum(times) / len(times),
            tokens_per_s=tokens_a_step / step_s,
            losses=self.taken.losses[:],
            padding_share=1.0 - all_tokens / all_padded if all_padded else None,
            save=save,
            evaluation=evaluation,
            overruns=sum(every.pop("overruns")),
            syncs=[(place, times) for place, times in syncs_of_first],
            told=told_by_first,
            **every,
        )

    def _counters(self) -> tuple[int, int]:
        """Return this rank's overruns of emulated devices and retries of its allocator so far."""
        return self.taken.overruns, self.context.runtime.allocator_retries

    def _save_beside(self, stop: StopRequest, steps: int, usual_s: float) -> InterruptionCost:
        """Save once during some steps, usually taking `usual_s` each."""
        still_s = measure_s(self._begin_save)
        took_s = sum(self.train_step(stop).step_s for _ in range(steps))
        beside_s = self._finish_save().seconds
        return InterruptionCost.of_steps(still_s, beside_s, usual_s=steps * usual_s, took_s=took_s)

    def _steps_beside(self, first: InterruptionCost, usual_s: float) -> int:
        """Return the steps a checkpoint lasts, equal on all ranks, at most
        `MOST_OVERLAPPED_STEPS`."""
        mine = min(MOST_OVERLAPPED_STEPS, math.ceil(first.overlapped_s / usual_s))
        return max(map(int, self.context.ranks.gather("steps beside", str(mine))))

    def train_step(self, stop: StopRequest | None = None) -> StepRecord:
        """Run one step and read it at once."""
        self.issue_step(stop)
        return [self._read() for _ in range(self.steps.unread)][-1].record

    def issue_step(self, stop: StopRequest | None = None) -> None:
        """Give the device a step, without reading the result; see `_read`."""
        self.steps.give(partial(self._begins, stop))

    def _read(self) -> ReadStep:
        """Read the oldest unread step."""
        read = self.steps.read()
        self.step = read.record.step
        return read

    def _most_pending(self) -> int:
        """Return the number of steps that may stay unread before the next is given."""
        changes = self._balancing is not None and self._balancing.plan is not self.plan
        outdated = self._balancing is not None and self._balancing.outdated is not None
        at_once = (
            self._stopping or changes or outdated or self._needs_immediate_read(self.steps.given)
        )
        return int(self.steps.late and not at_once)

    def _needs_immediate_read(self, step: int) -> bool:
        """Return whether `step` may have consequences beyond its report, to be awaited by the
        next."""
        job = self.job
        return (
            step == job.max_steps
            or step <= self._at_once_until
            or self._put_off
            or step - self._begun_at == MEASURED_STEPS
            or self.keeping.is_copy_due(step)
            or job.advanced.trace_step in (step, step + 1)
            or _is_due(step, job.eval_steps)
            or _is_due(step, self.keeping.save_every_steps)
        )

    def _tell_of_what_is_there(self, kind: type[BaseException] | None, *_: object) -> None:
        """Log the completed steps after an error, without waiting for a device that may hang."""
        with suppress(Exception):
            while kind is not None and self.steps.is_next_ready:
                record = self._read().record
                self._telling.step(record)
                self._telling.show_step(record)

    def _begins(self, stop: StopRequest | None) -> float:
        """Return the notice to send to all ranks with a step whose batch is ready."""
        asked, behind = stop is not None and stop.requested, int(self.steps.late)
        self._last_minute.step_begins(self.taken.times_s, tells=asked, behind=behind)
        saving = self.keeping.checkpointer
        if saving.failed:
            return UNSAVED
        if asked:
            return STOP
        return 0.0 if saving.writing_since is None else WRITING

    def _traced_step(self, stop: StopRequest | None = None) -> None:
        """Give a traced step, like `issue_step`; write all ranks' recordings to the run's
        folder."""
        comm = self.engine.comm
        comm.record = recorder = Recorder(comm, self.plan.workers[comm.rank])
        self.issue_step(stop)
        comm.record = SILENT
        told = self.context.ranks.collect("recordings", recorder.recording().to_json())
        self._telling.trace(self.steps.given, told)

    def _tell(self, step: ReadStep) -> None:
        self._telling.step(step.record)
        if self._due(self.job.logging_steps) or self.step == self.job.max_steps:
            self._telling.exchange(self.step, sent_bytes=step.given.sent_bytes)
            self._telling.tell(
                self.step, self._clocks.find_clock_changes(self.plan, self._telling.records)
            )
        self._telling.show_step(step.record)
        self._telling.end_warm_up(self.step)
        restart, self._restart = self._restart, None
        if restart is not None:
            state = self._start.state
            kept_in = "" if state is None else "memory" if state.path is None else "disk"
            self._telling.restart(self.step, restart, kept_in)

    def _evaluate(self) -> None:
        losses = [
            self.engine.evaluate(batch, samples).item()
            for batch, samples in evaluation_batches(
                self.context.held_out,
                self.plan,
                self.context.ranks.rank,
                batches=self.job.eval_batches,
                device=self.context.runtime.torch_device,
                reading=self.context.reading,
                skipped=self._telling.held_out_skipped,
            )
        ]
        self._telling.evaluation(self.step, losses)

    def _due(self, every_steps: int) -> bool:
        return _is_due(self.step, every_steps)

    # -- state -------------------------------------------------------------------------------------

    def save(self, cursor: dict[str, Any] | None = None) -> Path:
        """Write the last checkpoint and wait for it; the data resumes at `cursor`, by default
        behind the last batch."""
        self._last_minute.claim_last_save()
        self._begin_save(cursor)
        return self._finish_save().path

    def _save_if_due(self, *, writing: bool) -> None:
        """Begin a checkpoint if due. If some rank was still writing the previous checkpoint during
        this step, wait briefly; if still writing, delay the new one until no rank is writing."""
        if not self._due(self.keeping.save_every_steps) and not self._put_off:
            return
        if writing and (self._put_off or not self.keeping.is_free_within(MOST_STALL_S)):
            if not self._put_off:
                self._put_off = True
                self._telling.log_late_checkpoint(self.step)
            return
        self._put_off = False
        self._begin_save()

    def _begin_save(self, cursor: dict[str, Any] | None = None) -> None:
        """Begin a checkpoint written during the next steps."""
        if self.keeping.checkpointer.under_way:
            self._finish_save()
        self.keeping.begin_save(self.step, cursor)

    def _finish_save(self) -> Saved:
        saved = self.keeping.finish_save()
        self._telling.checkpoint(saved)
        return saved

    def _remember(self) -> None:
        """Copy this step's state into memory, if due."""
        done = self.step - self._begun_at
        if done == MEASURED_STEPS:
            told = self.keeping.choose_intervals(compute_median_s(self.taken.times_s[1:]))
            self._telling.tell(self.step, told)
        self.keeping.begin_copy(self.step)

    def _rebalance(self, reports: Sequence[float]) -> None:
        """Split the samples again if worthwhile by the ranks' `reports` of the last steps."""
        if self._balancing is None or self.step == self.job.advanced.trace_step:
            return
        if not self._found:
            self._found = self._balancing.after_step(self.taken.times_s, reports)
        changes, outdated = self._balancing.plan is not self.plan, self._balancing.outdated
        if self.steps.unread and (changes or outdated is not None):
            return  # first read the step given by the old plan
        if changes:
            self.plan = self.steps.plan = self._balancing.plan
            self.keeping.settle(self.step)  # state being copied may move
            self.engine.replan(self.plan, self.optimizer)
            self.loader.replan(self.plan)
            # The report of the step after the next is by the new plan already.
            self._at_once_until = self.step + 1
        found, self._found = self._found, []
        self._telling.tell(self.step, found)
        if outdated is not None:
            if not self.keeping.keep(self.step):
                self.save()
            raise outdated

    def _report_last_split(self) -> None:
        if self._balancing is not None:
            self._telling.tell(self.step, self._balancing.effect(self.taken.times_s))

    def _stop(self) -> None:
        self._report_last_split()
        path = self.save()
        self.keeping.forget()
        raise Interrupted(
            f"stopped after step {self.step} of {self.job.max_steps}",
            code="stopped-after-step",
            where=str(path),
            fix="go on with the same command and --resume",
        )

    def _not_finite(self, bad: BadStep) -> NoReturn:
        """Save the state from before a step that is not finite, and raise; without saving if the
        weights are corrupt already."""
        ranks = self.context.ranks
        who = " and ".join(ranks.names[r] for r in bad.exchanged.bad_losses)
        wrong = f"the {bad.what} of step {self.step + 1} is {bad.value}"
        if not self.engine.finite():
            raise make_corrupt_weights_error(wrong, who)
        path = self.save(bad.cursor)
        self.keeping.forget()
        # All losses are finite: 0 of 0 tokens.
        if math.isnan(bad.value) and bad.what == "loss" and not who:
            raise make_no_labels_error(self.step + 1, ranks.names[ranks.rank], bad.samples, path)
        raise make_overflow_error(wrong, who, path)

    def _summary(self, path: Path) -> Summary:
        """Return the summary of the run. Collective."""
        self._telling.report_skipped_samples()
        told, losses = self._telling.gather_figures(), self.taken.losses[:]
        return Summary(
            steps=self.step,
            loss=losses[-1] if losses else None,
            tokens_per_s=told["tokens_per_s"] or 0.0,
            step_s=told["step_s"] or 0.0,
            predicted_step_s=told["predicted_step_s"],
            slower_than_planned=told["slower_than_planned"],
            overruns=sum(one["overruns"] for one in told["classes"]),
            classes=told["classes"],
            devices=[asdict(r) for r in self._telling.records],
            losses=losses,
            checkpoint=str(path),
        )


def _is_due(step: int, every_steps: int) -> bool:
    return every_steps > 0 and step % every_steps == 0
