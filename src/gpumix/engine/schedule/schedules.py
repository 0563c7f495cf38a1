"""Schedules of a rank: the orders in which micro-batches go through units, behind one interface."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gpumix.cost.pipeline_schedule import Action
from gpumix.engine.batch.batch_split import Loss, MicroBatchTask
from gpumix.engine.comm.communicator import Communicator
from gpumix.engine.model.forward_coroutine import UnitCallHandlers
from gpumix.engine.offload.host_offload import OffloadStore
from gpumix.engine.schedule import layered, pipeline_parallel, sequential
from gpumix.engine.schedule.micro_batch import (
    MicroBatch,
    close_micro_batches,
    select_kept_graphs,
)
from gpumix.engine.schedule.pipeline_parallel import InFlightMicroBatch, PipelineStage, StageInputs
from gpumix.engine.sharding.bucket import Bucket, BucketReductions, GradientProgress
from gpumix.engine.unit.sharded_units import ShardedUnits
from gpumix.schema.plan.stage import Worker

# Exchanges (summed loss, count) of each micro-batch; returns the scale of gradients, when known.
Exchange = Callable[[list[Loss]], Callable[[], torch.Tensor]]
Done = Callable[[Bucket], None]  # called with a bucket whose gradient is in its pieces


@dataclass(frozen=True)
class StepTasks:
    """Tasks of a rank in a training step.

    Attributes:
        micro_batches: of this rank, in order.
        rows: places of each micro-batch's samples in the global batch.
        scale: factor of each loss before its backward, a scalar.
        exchange: called once with all losses of the rank; see `Exchange`.
        done: called with each finished bucket; None: buckets are not needed before the end.
    """

    micro_batches: list[MicroBatchTask]
    rows: Sequence[range]
    scale: torch.Tensor
    exchange: Exchange
    done: Done | None


@dataclass(frozen=True)
class Schedule(ABC):
    """Schedule of the micro-batches of a rank.

    Attributes:
        worker: of this rank, in the first of its stages.
        dtype: of computation.
        host: keeps inputs of units on the host.
        in_order: whether each unit takes micro-batches in order, because it updates buffers.
    """

    worker: Worker
    dtype: torch.dtype
    host: OffloadStore
    in_order: bool

    @abstractmethod
    def run_step(self, step: StepTasks) -> None:
        """Run forward and backward of micro-batches, and reduce gradients."""

    @abstractmethod
    def run_forward(self, cut: list[MicroBatchTask], rows: Sequence[range]) -> list[Loss]:
        """Run forward of micro-batches; return (summed loss, count) of each."""

    def run_repeatedly(
        self,
        cut: list[MicroBatchTask],
        rows: Sequence[range],
        is_any: Callable[[bool], bool],
    ) -> tuple[list[Loss], bool]:
        """Run forward of micro-batches that may call the model several times.

        Args:
            is_any: whether an argument is true on any rank. Collective.

        Returns:
            (summed loss, count) of each; whether a unit was called again on any rank, which is
                possible with one stage.
        """
        return self.run_forward(cut, rows), False

    def _make_micro_batch(
        self,
        parts: ShardedUnits,
        cut: list[MicroBatchTask],
        place: int,
        *,
        keep: bool,
        stage: PipelineStage | None = None,
        entry: StageInputs | None = None,
    ) -> MicroBatch:
        """Make the micro-batch at `place` of `cut`; `keep`: for backward, in the mode of the
        stage's worker."""
        worker = self.worker if stage is None else stage.worker
        keeps = select_kept_graphs(worker, len(parts.calls), place, len(cut))
        return MicroBatch(
            cut[place].compute_loss,
            calls=parts.calls,
            randomness=cut[place].randomness,
            compute_dtype=self.dtype,
            keeps=keeps if keep else lambda call: False,
            host=self.host if keep and worker.mode.boundary == "host" else None,
            entry=entry,
        )


@dataclass(frozen=True)
class LayeredSchedule(Schedule):
    """Unit k of every micro-batch, then unit k + 1 of any: see `engine.schedule.layered`.

    Attributes:
        leaves_out: whether the model may skip its last units, and so reach the head early.
        waves: parts of the micro-batches that go forward and backward one after another. Ranks
            gather and reduce in each wave, also ranks without a micro-batch in it.
    """

    parts: ShardedUnits
    leaves_out: bool
    waves: int

    def run_step(self, step: StepTasks) -> None:
        parts, cut = self.parts, step.micro_batches
        batches = [self._make_micro_batch(parts, cut, n, keep=True) for n in range(len(cut))]
        with close_micro_batches(batches), contextlib.ExitStack() as stack:
            if self.leaves_out and parts.head is not None:
                stack.enter_context(parts.head.whole())
            if self.waves == 1:
                results, turns, begun = self._run_until_head(batches, step)
                reductions = self._make_reductions(step.exchange(results), step.done)
                layered.backward(parts, turns, reductions, begun)
                layered.finish_reductions([parts], reductions, begun)
            else:
                self._run_waves(batches, step)

    def _run_until_head(
        self, batches: Sequence[MicroBatch], step: StepTasks
    ) -> tuple[list[Loss], layered.MicroBatchOrder, GradientProgress]:
        """Run micro-batches forward, and backward through the head."""
        turns = layered.MicroBatchOrder(batches, in_order=self.in_order)
        begun = GradientProgress()
        layered.forward(self.parts, turns, keep=True)
        return layered.run_head(self.parts, turns, step.scale.float(), begun), turns, begun

    def _run_waves(self, batches: Sequence[MicroBatch], step: StepTasks) -> None:
        """Run one wave after another. Sums of gradients are added up over waves, and scaled at the
        end."""
        every: list[Loss] = []
        for wave in range(self.waves):
            begin, end = (len(batches) * n // self.waves for n in (wave, wave + 1))
            results, turns, begun = self._run_until_head(batches[begin:end], step)
            every += results
            reductions = self._make_reductions(None, None)
            layered.backward(self.parts, turns, reductions, begun)
            layered.finish_reductions([self.parts], reductions, begun)
        gradient_scale = step.exchange(every)
        gradient_scale()
        for bucket in self.parts.buckets:
            bucket.settle(gradient_scale)
            if step.done is not None:
                step.done(bucket)

    def run_forward(self, cut: list[MicroBatchTask], rows: Sequence[range]) -> list[Loss]:
        parts = self.parts
        batches = [self._make_micro_batch(parts, cut, n, keep=False) for n in range(len(cut))]
        # With full parameters here, one after another, for the lowest memory use.
        whole = parts.division.whole_parameters and len(batches) > 1
        results: list[Loss] = []
        with close_micro_batches(batches):
            for some in [[b] for b in batches] if whole else [batches]:
                turns = layered.MicroBatchOrder(some, in_order=self.in_order)
                layered.forward(parts, turns, keep=False)
                results += layered.run_head(parts, turns, None, GradientProgress())
        return results

    def run_repeatedly(
        self,
        cut: list[MicroBatchTask],
        rows: Sequence[range],
        is_any: Callable[[bool], bool],
    ) -> tuple[list[Loss], bool]:
        parts = self.parts
        batches = [self._make_micro_batch(parts, cut, n, keep=False) for n in range(len(cut))]
        with close_micro_batches(batches), contextlib.ExitStack() as stack:
            if self.leaves_out and parts.head is not None:
                stack.enter_context(parts.head.whole())
            if not parts.division.whole_parameters:
                return layered.run_repeatedly(parts, batches, is_any=is_any)
            # With full parameters here, one after another; ranks need not go together.
            results: list[Loss] = []
            repeats = False
            for some in [[b] for b in batches] or [[]]:
                found, again = layered.run_repeatedly(parts, some, is_any=lambda own: own)
                results, repeats = [*results, *found], repeats or again
            return results, is_any(repeats)

    def _make_reductions(
        self, gradient_scale: Callable[[], torch.Tensor] | None, done: Done | None
    ) -> BucketReductions:
        division = self.parts.division
        at_once = division.replicated and not division.others
        return BucketReductions(gradient_scale, at_once=at_once, done=done)


@dataclass(frozen=True)
class SequentialSchedule(LayeredSchedule):
    """One micro-batch after another: see `engine.schedule.sequential`.

    Attributes:
        calls: where the model's unit calls arrive.
    """

    calls: UnitCallHandlers

    def run_step(self, step: StepTasks) -> None:
        calls, cut = len(self.parts.calls), step.micro_batches
        batches = [
            sequential.InlineBatch(
                one.compute_loss,
                one.randomness,
                self.dtype,
                select_kept_graphs(self.worker, calls, place, len(cut)),
            )
            for place, one in enumerate(cut)
        ]
        sequential.run(
            self.parts,
            self.calls,
            batches,
            step.scale.float(),
            lambda results: self._make_reductions(step.exchange(results), step.done),
        )


@dataclass(frozen=True)
class PipelineSchedule(Schedule):
    """Micro-batches through the pipeline stages of a rank: see
    `engine.schedule.pipeline_parallel`.

    Attributes:
        actions: of this rank in a step.
        stages: of this rank.
        buckets: of all of its stages.
    """

    actions: Sequence[Action]
    comm: Communicator
    stages: Sequence[PipelineStage]
    buckets: Sequence[Bucket]

    def run_step(self, step: StepTasks) -> None:
        gradient_scale = step.exchange(self._run(step.micro_batches, step.rows, step.scale.float()))
        self.comm.record.meets("other stage")
        gradient_scale()
        self.comm.record.goes_on()
        for bucket in self.buckets:
            bucket.settle(gradient_scale)
            if step.done is not None:
                step.done(bucket)

    def run_forward(self, cut: list[MicroBatchTask], rows: Sequence[range]) -> list[Loss]:
        return self._run(cut, rows, None)

    def _run(
        self, cut: list[MicroBatchTask], rows: Sequence[range], scale: torch.Tensor | None
    ) -> list[Loss]:
        """Run this rank's part of the pipeline; without a `scale` of losses, forward only."""
        actions = self.actions
        if scale is None:
            actions = [action for action in actions if action.kind == "forward"]

        def make(stage: PipelineStage, number: int) -> InFlightMicroBatch:
            own = stage.batches.index(number)
            entry = StageInputs(stage, number, cut[own].looks)
            batch = self._make_micro_batch(
                stage.parts, cut, own, keep=scale is not None, stage=stage, entry=entry
            )
            return InFlightMicroBatch(number, batch, entry)

        empty = [number for number, own in zip(self.stages[0].batches, rows) if not own]
        return pipeline_parallel.PipelineStep(
            self.stages, actions, make, scale, in_order=self.in_order, empty=empty
        ).run()
