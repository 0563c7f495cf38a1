"""The training loop of one rank. `Trainer.run` reads top to bottom."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import nn

from gpumix.data.course import ByLength
from gpumix.data.loader import Loader, evaluation_batches
from gpumix.engine.prepare import prepare
from gpumix.engine.record import SILENT, Recorder
from gpumix.engine.replan import may_move
from gpumix.engine.state import some_of
from gpumix.engine.updates import updates_elements
from gpumix.engine.weights import unused
from gpumix.spec.errors import Interrupted
from gpumix.spec.plan import Plan
from gpumix.spec.profile import ROOT, Profile
from gpumix.train.balancing import Balancing
from gpumix.train.checkpoint import Saved
from gpumix.train.checkpoint_file import number_of_job
from gpumix.train.context import Context
from gpumix.train.documents import check_documents
from gpumix.train.goes_on import check_goes_on
from gpumix.train.interlude import Interlude, seconds_of
from gpumix.train.keeping import MEASURED_STEPS, Keeping
from gpumix.train.last_minute import LastMinute
from gpumix.train.metrics import WARM_UP_STEPS, Part, StepRecord, typical_s
from gpumix.train.models import attention_cost, model_of
from gpumix.train.not_finite import overflowed, spoilt, without_labels
from gpumix.train.optimizer import learning_rate, optimizer_for, set_learning_rates
from gpumix.train.outcome import Summary, Trial
from gpumix.train.plan_change import in_force
from gpumix.train.recovery import Restart
from gpumix.train.soundness import Soundness
from gpumix.train.steps_taken import StepsTaken
from gpumix.train.stop import StopRequest
from gpumix.train.syncs import syncs_of
from gpumix.train.tables import stderr
from gpumix.train.telling import Telling
from gpumix.train.watch import Watch, stamps_of
from gpumix.train.watcher import Watcher

# Notices of the engine's, the larger one first.
WRITING = 0.5  # a checkpoint is being written
STOP = 1.0  # this rank was asked to stop
UNSAVED = 2.0  # a checkpoint could not be written
# How long steps wait for a checkpoint that is being written when the next one is due.
MOST_STALL_S = 5.0
MOST_STEPS_BESIDE = 8  # that are watched beside a checkpoint


class Trainer:
    """Trains a job by a plan, as one of its ranks.

    Args:
        context: this rank's device, peers and data.
        plan: the workers in the order of the ranks; `profile` is what it was made from, if known.
        resume: go on from the newest state that there is.
        restart: why the run had to start again; it goes on from the newest state, if there is any.
    """

    def __init__(
        self,
        context: Context,
        plan: Plan,
        profile: Profile | None = None,
        *,
        resume: bool = False,
        restart: Restart | None = None,
    ) -> None:
        self.context = context
        self.plan = plan
        job, ranks = context.job, context.ranks
        self.job = job
        self.engine = prepare(
            self._built(resume),
            plan,
            comm=ranks.communicator(plan),
            weights=job.model.weights,
            units=job.model.units,
            tensor=job.model.tensor_plan,
            seed=job.seed,
        )
        self.optimizer = optimizer_for(
            job.optimizer,
            self.engine.pieces(),
            self.engine.layout,
            names=self.engine.trained_names(),
            fused=plan.workers[ranks.rank].efficiency.fused_optimizer,
        )
        self.loader = Loader(
            context.train_data,
            plan,
            ranks.rank,
            seed=job.seed,
            device=context.runtime.torch_device,
            workers=job.data.workers,
            prefetch=job.data.prefetch,
            bad_samples=job.data.bad_samples,
            timeout_s=job.timeout,
            by_length=ByLength(job.data.bucketing, attention_cost(self.engine.model)),
        )
        if job.data.packing == "documents":
            warning = check_documents(self.engine)
            if warning and context.first:
                stderr().print(warning)
        self.keeping = Keeping(context, plan, self.engine, self.optimizer, self.loader)
        self._last_minute = LastMinute(context, self.keeping, lambda: self.step)
        self.step = 0
        self._nothing_left: Path | None = None  # the checkpoint of the last step
        self._put_off = False  # a checkpoint that is due
        self._restart = restart
        again = context.first and (resume or restart is not None)
        self._plan_before = in_force(job.output, fresh=not resume) if again else None
        self._kept_in = ""  # where the state was that it goes on from
        if resume or restart is not None:
            self._take_up(needed=restart is None)
        self._begun_at = self.step
        self._tokens = self._tokens_at(0, self.loader.cursor.position)
        context.runtime.reset_peak()
        self.taken = StepsTaken(context.runtime)
        stamps = stamps_of(self.engine.device)
        self.watch = Watch(stamps, self.engine.comm.clock, self.engine.copies)
        self._telling = Telling(
            context,
            self.engine,
            self.loader,
            self.keeping,
            self.watch,
            self.taken,
            begun_at=self.step,
        )
        moves = may_move(plan) and updates_elements(self.optimizer)
        step_s = restart.step_s if restart is not None else None
        balancing = Balancing(plan, profile, context, state_moves=moves, step_before_s=step_s)
        self._balancing = balancing if job.rebalance else None
        self._soundness = Soundness(context, plan, self.engine)

    def _built(self, resume: bool) -> nn.Module:
        """The job's model; of a run that goes on it is the one that was saved."""
        context, spec = self.context, self.job.model
        model = model_of(spec, folder=context.task.folder, seed=self.job.seed)
        if resume:
            check_goes_on(context, model, self.plan.model)
        if context.first and spec.weights is not None:
            _tell_of_unused(unused(model, spec.weights))
        return model

    def run(self) -> Summary:
        """Train to the end.

        Raises:
            Interrupted: asked to stop; the state is saved.
            TrainingError: the loss is not finite; the state before that step is saved.
        """
        if self._nothing_left is not None:
            return self._summary(self._nothing_left)
        with ExitStack() as stack:
            stack.enter_context(self.loader)
            stop = stack.enter_context(StopRequest())
            self._telling.open(stack)
            self._telling.start(self._plan_before, self._restart)
            self._telling.copies(self.keeping.open_memory())
            stack.enter_context(self._last_minute.beside(stop))
            if self._soundness.why_not:
                self._telling.say(f"no batch is replayed: {self._soundness.why_not}")
            while self.step < self.job.steps:
                traced = self.step + 1 == self.job.trace_step
                step = self._traced_step if traced else self.train_step
                self._tell(step(stop))
                if self._due(self.job.evaluation.every_steps):
                    sent_bytes = self.engine.comm.sent.total()
                    self._evaluate()
                    self._telling.not_of_steps(self.engine.comm.sent.total() - sent_bytes)
                if self.step == self.job.steps:
                    break
                notices = self.engine.exchanged.notices
                # An error is raised when all ranks know of it, in the same step.
                if self.keeping.checkpointer.written or UNSAVED in notices:
                    self._finish_save()
                if STOP in notices:
                    self._stop()
                self._save_if_due(writing=WRITING in notices)
                self._remember()
                self._rebalance()
                self._look_for_wrong_results()
            self._tell_of_last_split()
            path = self.save()
            self.keeping.forget()
            return self._summary(path)

    def try_out(self, steps: int, *, beside: bool = False, watcher: Watcher | None = None) -> Trial:
        """Train `steps` steps after those of the warm-up; nothing is written.

        Args:
            beside: then evaluate once and save a few times, if the job does that; and look,
                in one step more, for what makes the host wait.
            watcher: entered before; may want another step.
        """
        evaluation = save = Interlude()
        with self.loader, StopRequest() as stop:
            for _ in range(WARM_UP_STEPS):
                self.train_step(stop)
            self._telling.exchange(self.step)
            waited_s = self.engine.comm.clock.total_s()
            records, tokens, padded = [], 0, 0
            if watcher is not None:
                watcher.begins()
            for _ in range(steps):
                records.append(self.train_step(stop))
                for lengths in self._lengths():
                    tokens, padded = tokens + sum(lengths), padded + len(lengths) * max(lengths)
            if watcher is not None:
                watcher.ends()
            tokens_a_step = fmean(self.taken.tokens[-steps:])
            waited_s = self.engine.comm.clock.total_s() - waited_s
            shares = self.watch.take().shares()
            if beside and self.job.evaluation.every_steps:
                evaluation = Interlude(still_s=seconds_of(self._evaluate))
            if beside and self.job.checkpoint.every_steps:
                usual_s = fmean(r.step_s for r in records)
                save = self._save_beside(stop, 1, usual_s)
                lasts = self._steps_beside(save, usual_s)
                # The first checkpoints take longer than others.
                for _ in range(3 if lasts < MOST_STEPS_BESIDE else 1):
                    save = self._save_beside(stop, lasts, usual_s)
            with syncs_of(self.engine.device if beside else None) as syncs:
                classes = self.context.task.cluster.classes  # all ranks step, or none
                if beside and any(one.accelerator == "cuda" for one in classes):
                    self.train_step(stop)
            if watcher is not None and watcher.looks:
                with watcher.looking():
                    self.train_step(stop)
        times = [r.step_s for r in records]
        gather, step_s = self.context.ranks.gather, typical_s(times)
        busy = gather("busy", str(1.0 - waited_s / sum(times)))
        starved = gather("starved", str(shares.input))
        peaks = gather("peaks", json.dumps(self.context.runtime.peak_bytes()))
        overruns = gather("overruns", str(self.taken.overruns))
        limits = gather("limits", self.loader.limit.value)
        retries = gather("retries", str(self.context.runtime.allocator_retries))
        # Each rank returns the same: what the first one saw.
        seen = json.loads(gather("syncs", json.dumps(syncs()))[0])
        told = gather("told", json.dumps(watcher.told() if watcher is not None else None))[0]
        counted = [json.loads(text) for text in gather("tokens", json.dumps([tokens, padded]))]
        all_tokens, all_padded = map(sum, zip(*counted))
        return Trial(
            step_s=step_s,
            mean_s=sum(times) / len(times),
            tokens_per_s=tokens_a_step / step_s,
            losses=self.taken.losses,
            peak_bytes=[json.loads(text) for text in peaks],
            busy_shares=[float(text) for text in busy],
            input_shares=[float(text) for text in starved],
            padding_share=1.0 - all_tokens / all_padded if all_padded else None,
            save=save,
            evaluation=evaluation,
            overruns=sum(map(int, overruns)),
            limits=limits,
            retries=[int(text) for text in retries],
            syncs=[(place, times) for place, times in seen],
            told=json.loads(told),
        )

    def _save_beside(self, stop: StopRequest, steps: int, usual_s: float) -> Interlude:
        """Save once, beside some steps that take `usual_s` each with nothing beside them."""
        still_s = seconds_of(self._begin_save)
        took_s = sum(self.train_step(stop).step_s for _ in range(steps))
        beside_s = self._finish_save().seconds
        return Interlude.of_steps(still_s, beside_s, usual_s=steps * usual_s, took_s=took_s)

    def _steps_beside(self, first: Interlude, usual_s: float) -> int:
        """How many steps such a checkpoint lasts, on all ranks alike; a few, if it lasts long."""
        mine = min(MOST_STEPS_BESIDE, math.ceil(first.beside_s / usual_s))
        return max(map(int, self.context.ranks.gather("steps beside", str(mine))))

    def _lengths(self) -> list[list[int]]:
        """Tokens of the samples of the last batch, by micro-batch; none where they are alike."""
        known = self.context.train_data.lengths
        if known is None:
            return []
        sizes = [len(rows) for rows in self.plan.rows_of(self.context.ranks.rank)]
        lengths = known[self.loader.last_indices].tolist()
        ends = list(accumulate(sizes))
        return [lengths[end - n : end] for n, end in zip(sizes, ends) if n]

    def train_step(self, stop: StopRequest | None = None) -> StepRecord:
        """One step: fetch, forward and backward, check, clip, update."""
        record, watch = self.engine.comm.record, self.watch
        begun = record.begin()
        watch.begin()
        cursor, begin = self.loader.state_dict(), self.loader.cursor.position
        batch = watch.next_of(self.loader)
        self.context.runtime.idle()
        rate = learning_rate(self.job, self.step)
        set_learning_rates(self.optimizer, self.job, self.step)
        asked = stop is not None and stop.requested
        self._last_minute.step_begins(self.taken.times_s, tells=asked)
        self.engine.notice = self._notice(asked=asked)
        self.engine.report = watch.computed_s if self.taken.times_s else 0.0
        clip_norm = self.job.optimizer.clip_norm
        # Without clipping nothing must be known of all gradients before the first is used.
        early = clip_norm is None and self.engine.may_update_early(self.optimizer)
        if early:
            self.keeping.settle(self.step + 1)
        watch.computes()
        loss = self.engine.step(batch, self.optimizer if early else None).item()
        # Before the ranks agree on the norm: see `memory_checkpoint`.
        self.keeping.settle(self.step + 1)
        if clip_norm is None:
            norm = self.engine.gradient_norm().item()
        else:
            norm = self.engine.clip_grad_norm_(clip_norm).item()
        for what, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                self._not_finite(what, value, cursor)
        record.computes("optimizer", ROOT)
        if not early:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.context.runtime.synchronize()
        watch.end()
        self.step += 1
        step_s = record.end() - begun
        tokens = self._tokens_at(begin, self.loader.cursor.position)
        self._tokens += tokens
        worker = self.plan.workers[self.context.ranks.rank]
        part = Part.of(self.engine.computed, worker.samples, self.plan.sequence_length)
        self.taken.add(step_s, loss, tokens, self._tokens_of_own(), part)
        return StepRecord(
            step=self.step,
            loss=loss,
            learning_rate=rate,
            gradient_norm=norm,
            step_s=step_s,
            tokens_per_s=tokens / step_s,
            tokens=self._tokens,
            shares=watch.last() if self.context.first else None,
            samples=self.plan.global_batch,
        )

    def _notice(self, *, asked: bool) -> float:
        saving = self.keeping.checkpointer
        if saving.failed:
            return UNSAVED
        if asked:
            return STOP
        return 0.0 if saving.writing_since is None else WRITING

    def _tokens_at(self, start: int, stop: int) -> int:
        """Tokens of the samples at these positions of the order, without padding where it is known
        what that is."""
        counted = self.loader.course.tokens(start, stop)
        return (stop - start) * self.plan.sequence_length if counted is None else counted

    def _tokens_of_own(self) -> int:
        """As `_tokens_at`, of the samples that this rank had in the last step."""
        if self.context.train_data.lengths is not None:
            return sum(map(sum, self._lengths()))
        return self.plan.workers[self.context.ranks.rank].samples * self.plan.sequence_length

    def _traced_step(self, stop: StopRequest | None = None) -> StepRecord:
        """As `train_step`; what every rank did goes into the run's folder."""
        comm = self.engine.comm
        comm.record = recorder = Recorder(comm, self.plan.workers[comm.rank])
        done = self.train_step(stop)
        comm.record = SILENT
        told = self.context.ranks.collect("recordings", recorder.recording().to_json())
        self._telling.trace(self.step, told)
        return done

    def _tell(self, record: StepRecord) -> None:
        if self._due(self.job.log_every_steps) or self.step == self.job.steps:
            self._telling.exchange(self.step)
        self._telling.step(record)
        restart, self._restart = self._restart, None
        if restart is not None:
            self._telling.restart(self.step, restart, self._kept_in)

    def _evaluate(self) -> None:
        losses = [
            self.engine.evaluate(batch, samples).item()
            for batch, samples in evaluation_batches(
                self.context.held_out,
                self.plan,
                self.context.ranks.rank,
                batches=self.job.evaluation.batches,
                device=self.context.runtime.torch_device,
                reading=self.context.reading,
                skipped=self._telling.held_out_skipped,
            )
        ]
        self._telling.evaluation(self.step, losses)

    def _due(self, every_steps: int) -> bool:
        return every_steps > 0 and self.step % every_steps == 0

    # -- state -------------------------------------------------------------------------------------

    def save(self, cursor: dict[str, Any] | None = None) -> Path:
        """Write the last checkpoint, and wait for it; the data goes on at `cursor`, by default
        behind the last batch."""
        self._last_minute.leave_to_me()
        self._begin_save(cursor)
        return self._finish_save().path

    def _save_if_due(self, *, writing: bool) -> None:
        """Begin a checkpoint if one is due. Where the one before was being written on some rank
        while it computed this step, that is waited for, but not long: then the next one begins when
        no rank writes any more."""
        if not self._due(self.job.checkpoint.every_steps) and not self._put_off:
            return
        if writing and (self._put_off or not self.keeping.is_free_within(MOST_STALL_S)):
            if not self._put_off:
                self._put_off = True
                self._telling.put_off(self.step)
            return
        self._put_off = False
        self._begin_save()

    def _begin_save(self, cursor: dict[str, Any] | None = None) -> None:
        """Write a checkpoint beside the next steps."""
        if self.keeping.checkpointer.under_way:
            self._finish_save()
        self.keeping.begin_save(self.step, cursor)

    def _finish_save(self) -> Saved:
        saved = self.keeping.finish_save()
        self._telling.checkpoint(saved)
        return saved

    def _remember(self) -> None:
        """Have this step's state copied into memory."""
        done = self.step - self._begun_at
        if done == MEASURED_STEPS:
            told = self.keeping.choose_interval(typical_s(self.taken.times_s[1:]))
            self._telling.tell(self.step, told)
        self.keeping.remember(self.step)

    def _rebalance(self) -> None:
        """Split the samples anew, if that is worth it by the last steps."""
        if self._balancing is None or self.step == self.job.trace_step:
            return
        told = self._balancing.after_step(self.taken.times_s, self.engine.exchanged.reports)
        if self._balancing.plan is not self.plan:
            self.plan = self._balancing.plan
            self.keeping.settle(self.step)  # what is copied may move
            self.engine.replan(self.plan, self.optimizer)
            self.loader.replan(self.plan)
        self._telling.tell(self.step, told)
        if self._balancing.outdated is not None:
            if not self.keeping.keep(self.step):
                self.save()
            raise self._balancing.outdated

    def _tell_of_last_split(self) -> None:
        if self._balancing is not None:
            self._telling.tell(self.step, self._balancing.effect(self.taken.times_s))

    def _look_for_wrong_results(self) -> None:
        self._telling.tell(self.step, self._soundness.after_step(self.step))

    def _take_up(self, *, needed: bool) -> None:
        state = self.keeping.take_up(needed=needed)
        if state is None:
            return
        self.step = state.step
        self._kept_in = "memory" if state.path is None else "disk"
        if state.path is not None and self.step >= self.job.steps:
            self._nothing_left = state.path  # or to write
        if not self.context.first:
            return
        for damage in state.passed_over:
            stderr().print(f"passed over: {damage.where} is damaged: {damage.why}")
        stderr().print(f"going on from {state.where}")
        if self.job.trace_step is not None and self.job.trace_step <= self.step:
            stderr().print(f"step {self.job.trace_step} is done, and is not traced")
        batch = number_of_job(state.extra, "global_batch")
        if batch not in (None, self.job.global_batch):
            stderr().print(f"steps now take {self.job.global_batch} samples, they took {batch}")
        before, goes_on = state.of_steps, self.step < self.job.steps
        varies = self.job.schedule.kind != "constant"
        if before not in (None, self.job.steps) and varies and goes_on:
            stderr().print(
                f"the schedule of the learning rate now ends at step {self.job.steps}, it "
                f"ended at step {before}: the rate may jump here"
            )

    def _stop(self) -> None:
        self._tell_of_last_split()
        path = self.save()
        self.keeping.forget()
        raise Interrupted(
            f"stopped after step {self.step} of {self.job.steps}",
            where=str(path),
            fix="go on with the same command and --resume",
        )

    def _not_finite(self, what: str, value: float, cursor: dict[str, Any]) -> None:
        """The weights are still those of before the step; so is what is saved, unless they are
        spoilt already."""
        self.engine.take_back_step()
        ranks = self.context.ranks
        who = " and ".join(ranks.names[r] for r in self.engine.exchanged.bad_losses)
        wrong = f"the {what} of step {self.step + 1} is {value}"
        if not self.engine.finite():
            raise spoilt(wrong, who)
        path = self.save(cursor)
        self.keeping.forget()
        if math.isnan(value) and what == "loss" and not who:  # all losses are good: 0 of 0 tokens
            some = self.loader.last_indices[:8].tolist()
            raise without_labels(self.step + 1, ranks.names[ranks.rank], some, path)
        raise overflowed(wrong, who, path)

    def _summary(self, path: Path) -> Summary:
        """Collective."""
        self._telling.of_all_steps()
        counting = self.taken.counting
        step_s, losses = self.taken.step_s(counting), self.taken.losses
        predicted = self.plan.prediction.step_s if self.plan.prediction else None
        return Summary(
            steps=self.step,
            loss=losses[-1] if losses else None,
            tokens_per_s=self.taken.tokens_per_s(counting),
            step_s=step_s,
            predicted_step_s=predicted,
            prediction_error=predicted / step_s - 1 if predicted and step_s else None,
            overruns=sum(c.overruns for c in self._telling.classes),
            classes=[asdict(c) for c in self._telling.classes],
            devices=[asdict(r) for r in self._telling.records],
            losses=losses,
            checkpoint=str(path),
        )


def _tell_of_unused(names: list[str]) -> None:
    """A head of another task, say, is left out on purpose; a wrong prefix is not."""
    if names:
        stderr().print(f"the weights hold tensors without a place: {some_of(names)}")
