"""The engine: training steps of a model whose units are sharded over ranks by a plan.

The engine has no optimizer. `parameters()` are this rank's pieces; element-wise optimizers give the
same result on them as unsharded. Optimizers of full matrices need `layout()` too; others are
refused.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gpumix.cost.pipeline_schedule import MicroBatchSchedule
from gpumix.engine.access_between_steps import AccessBetweenSteps, BlockwiseEngine
from gpumix.engine.batch import batch_split
from gpumix.engine.batch.batch_split import BatchCutter, Loss, MicroBatchTask
from gpumix.engine.comm import collective_progress
from gpumix.engine.comm.communicator import Communicator
from gpumix.engine.comm.step_exchange import LossComposition, StepTable
from gpumix.engine.comm.wait_clock import WaitClock
from gpumix.engine.evaluation import EvaluatingEngine, Function
from gpumix.engine.loss.reduction import ObjectiveWithRule
from gpumix.engine.model import module_buffers
from gpumix.engine.model.forward_coroutine import UnitCallHandlers
from gpumix.engine.model.model_settings import find_layer_drop_rates, find_unit_conflicts
from gpumix.engine.model.module_buffers import BufferCopies
from gpumix.engine.model.rng import OtherGenerators, choose_forked_generators, get_generators
from gpumix.engine.offload.host_offload import OffloadStore
from gpumix.engine.optimizers import elementwise_check, overlapped_step
from gpumix.engine.optimizers.layout import JoinedGroups, LayoutPart, OptimizerLayout
from gpumix.engine.optimizers.overlapped_step import HostStepHooks, OverlappedUpdates
from gpumix.engine.rehearsal.rehearsing_engine import COMPARED_STEPS
from gpumix.engine.reshard import move_state, needs_state_move
from gpumix.engine.schedule.layered_schedule import LayeredSchedule, Schedule, StepTasks
from gpumix.engine.schedule.pipeline_parallel import PipelineSchedule, PipelineStage
from gpumix.engine.schedule.sequential_schedule import SequentialSchedule
from gpumix.engine.sharding.bucket import SampledGradientNorm, begin_step, release_buckets
from gpumix.engine.sharding.mixed_precision import TORCH_DTYPE, LossScaler
from gpumix.engine.sharding.parameter_index import ParameterIndex
from gpumix.engine.sharding.shard import Piece
from gpumix.engine.sharding.shard_layout import ShardLayout
from gpumix.engine.sharding.unit_discovery import make_untrainable_error
from gpumix.engine.sharding.unused_parameters import UnusedParameters
from gpumix.engine.step_state import MAX_UNDONE_STEPS, StepState, StepUndo
from gpumix.engine.tensor_parallel.parallelize import ModuleChanges
from gpumix.engine.unit.sharded_units import ShardedUnits
from gpumix.schema.errors import GpumixError, InputError, TrainingError, format_in_one_line
from gpumix.schema.plan.plan import Plan


@dataclass(frozen=True)
class ShardedParts:
    """Parts of a sharded model on a rank.

    Attributes:
        stages: units of each of the rank's stages.
        places: the rank's pipeline stages; empty if there is one stage of all.
        calls: where the model's unit calls arrive.
        changes: of modules, undone when the model is ordinary again.
        forwards: of units that override the forward of their class, by unit name.
    """

    stages: Sequence[ShardedUnits]
    places: Sequence[PipelineStage]
    inventory: ParameterIndex
    calls: UnitCallHandlers
    changes: ModuleChanges
    forwards: Mapping[str, Callable[..., Any]]


class Engine(EvaluatingEngine, BlockwiseEngine):
    """A model sharded over ranks by a plan, made by `prepare`.

    `ended`: the model is ordinary again. `notice` and `report` go to all ranks in the next step, at
    no extra cost, and arrive in `exchanged`. `copies` times copies.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        parts: ShardedParts,
        comm: Communicator,
        objective: ObjectiveWithRule,
        *,
        seed: int,
        couples: str = "",
    ) -> None:
        places = parts.places
        shared = places[0].shared if places else ()  # all ranks go through buckets in this order
        buckets = dict.fromkeys((*shared, *(b for one in parts.stages for b in one.buckets)))
        super().__init__(model, comm, list(buckets), parts.inventory)
        self.plan = plan
        self.notice = self.report = 0.0
        self.places = places
        self._parts = parts.stages[0]
        self._root_names = frozenset(
            piece.name
            for one in parts.stages
            for bucket in (one.before, *one.always_used_buckets, one.after)
            for piece in bucket.pieces
        )
        self._heads = [one.head for one in parts.stages if one.head is not None]
        self._calls = parts.calls
        self._reduces = objective
        self._couples = couples
        self._seed = seed
        self._worker = plan.workers[comm.rank]
        self._dtype = TORCH_DTYPE[self._worker.compute_dtype]
        # All ranks of a tensor-parallel group compute the same losses; the first one reports them.
        last = len(plan.stages) - 1
        computes_them = last in plan.stages_of(comm.rank)
        self.tells_losses = computes_them and plan.get_tp_group(comm.rank, last)[0] == comm.rank
        self._unused = UnusedParameters(comm, self._buckets, parts.inventory)
        tokens = float(plan.global_batch * plan.sequence_length)
        self._state = StepState(
            plan.rows_of(comm.rank),
            objective,
            trims=objective.trims,
            settled=objective.rule is not None,
            scaler=LossScaler(active=any(w.compute_dtype == "fp16" for w in plan.workers)),
            losses_counted=torch.full((), tokens, dtype=torch.float64, device=comm.device),
            own_norm=SampledGradientNorm(comm.device),
            exchanged=StepTable.of_zeros(comm.world),
            compares_samples=bool(places) or plan.uses_tensor_parallel,
        )
        self._observe_gradients(self._state.own_norm.see)
        self.keepers = module_buffers.find_buffer_owners(model)
        self._switches = find_unit_conflicts(model)
        self._leaves_out = bool(find_layer_drop_rates(model).on)
        self._forked = choose_forked_generators(self.device)
        self._others = OtherGenerators()
        self.changes = parts.changes
        self.outside = parts.calls.outside = AccessBetweenSteps(self, parts.forwards)
        self.reduction = objective.rule.name if objective.rule is not None else ""
        self._failed, self.ended = "", False
        self._updates: OverlappedUpdates | None = None
        self.copies = WaitClock(self.device)
        self._host = OffloadStore(self.device, self.copies)
        self._schedule, self._cutter = self._make_schedule(), self._make_cutter()
        elementwise_check.UpdateChecks(self)
        if self.state_on_host:
            HostStepHooks(self, self.parameters())

    # -- training ----------------------------------------------------------------------------------

    def step(
        self, batch: Any, optimizer: Optimizer | None = None, *, samples: int | None = None
    ) -> torch.Tensor:
        """Run forward, backward and gradient reduction of a global batch.

        Args:
            batch: this rank's share: a pytree of tensors whose first dimension is the plan's number
                of samples for this rank, which may be 0.
            optimizer: if it `may_update_early`, steps parameters as gradients are done, while
                others are computed. It must not be stepped again.
            samples: size of a global batch shorter than the plan's, as the last batch of an epoch
                may be; this rank's share is then given by `Plan.rows_of`.

        Returns:
            The loss of the global batch, equal on every rank: the sum of all losses over their
                count, without graph. Its gradients are in the pieces' `grad`.

        Raises:
            ModelError: the model cannot be run in units; the message names the unit.
            CommunicationError: another rank died or is late.
            InputError: the number of samples is not the plan's, larger than the plan's, or 0; or
                there is nothing to train.
            TrainingError: an earlier step failed on this rank, and there are other ranks.
        """
        if not self.trains:
            raise make_untrainable_error()
        if self._state.watch is not None or not self._state.settled:
            self.settle(batch, samples, in_step=True)
        return self._step(batch, optimizer, samples)

    def _step(
        self, batch: Any, optimizer: Optimizer | None = None, samples: int | None = None
    ) -> torch.Tensor:
        """Run a step by the known rule."""
        state = self._state
        # Exact for a mean loss if losses are counted as in the last step: gradients are then not
        # scaled again. The exact count is known when the heads are done.
        scale = state.scaler.scale / state.losses_counted
        updates = self._get_updates(optimizer)
        self._reduces.whole = samples or self.plan.global_batch
        with self._in_step():
            rows = state.rows if samples is None else self._rows_of_step(samples)
            cut = self._cut(batch, rows)
            state.computed = [(len(of_one), one.width) for of_one, one in zip(rows, cut)]
            if state.compares_samples:  # first: wrong samples may have lengths that no rank expects
                batch_split.compare_samples(self.comm, self.plan, batch, rows)
                state.compares_samples = False
            buffers = BufferCopies(self.keepers) if self.keepers else None
            undo = StepUndo(buffers, state.losses_counted)
            if self._buckets_on_host:
                self.round_ahead()
            tables: list[torch.Tensor] = []

            def exchange(results: list[Loss]) -> Callable[[], torch.Tensor]:
                table, gradient_scale = self._exchange_losses(results, scale)
                tables.append(table)
                return gradient_scale

            done = None if updates is None else updates.update
            with self._computing():
                self._schedule.run_step(StepTasks(cut, rows, scale, exchange, done))
            [table] = tables
            if self.comm.world > 1 or any(group.unused for group in self._unused.groups):
                self._unused.drop()
            if updates is not None:
                updates.finish()
            if self._unused.told is not None:
                self._unused.finish()
            if self.state_on_host:
                self.comm.transfers.arrived()  # complete before gradients are read
            release_buckets(self._buckets)
            if buffers is not None:
                buffers.keep_changed()
            state.undos = (*state.undos, undo)[-MAX_UNDONE_STEPS:]
            state.steps += 1
            state.exchanged = StepTable(table)
            if state.watch is not None:
                state.watch.note(state.steps, table)
            counted = table[:, 1].sum()
            state.losses_counted = torch.where(counted > 0, counted, state.losses_counted)
            if state.scaler.active:
                state.overflowed = self.drop_overflowed()
                state.scaler.update(overflow=state.overflowed)
        return table[:, 0].sum() / table[:, 1].sum()

    def replan(self, plan: Plan, optimizer: Optimizer | None = None) -> None:
        """Continue with `plan`, which may differ in the split of samples, or of a single stage's
        state. The state of `optimizer` moves too. All ranks call this between the same two steps;
        there are no gradients.

        Raises:
            InputError: the plans differ in more, or this state cannot be moved.
        """
        if needs_state_move(self.plan, plan):
            self._parts = replace(self._parts, layout=self._parts.layout.with_shares_of(plan))
            move_state(self._buckets, self._parts.layout, optimizer)
        if self.places:
            self.places[0].wires.replan(plan)
            self.places = [replace(place, plan=plan) for place in self.places]
        self.plan = plan
        self._worker = plan.workers[self.comm.rank]
        self._state.rows = plan.rows_of(self.comm.rank)
        self._schedule, self._cutter = self._make_schedule(), self._make_cutter()

    def __deepcopy__(self, _: object) -> Engine:
        """Return itself: processes and their shards have no second engine. Programs copy callbacks
        that lead to one."""
        return self

    @property
    def state_on_host(self) -> bool:
        """True if this rank's masters and optimizer state are offloaded to the host."""
        return self._parts.layout.on_host

    def may_update_early(self, optimizer: Optimizer) -> bool:
        """Return whether `optimizer` can step some parameters before all gradients are computed: it
        updates element-wise, and no gradient can overflow."""
        return overlapped_step.is_elementwise(optimizer) and not self._state.scaler.active

    def _get_updates(self, optimizer: Optimizer | None) -> OverlappedUpdates | None:
        if optimizer is None:
            return None
        if not self.may_update_early(optimizer):
            raise InputError(
                f"{type(optimizer).__name__} cannot step before all gradients are done",
                code="optimizer-step-too-early",
                fix="call engine.step(batch), then optimizer.step()",
            )
        if self._updates is None or self._updates.optimizer is not optimizer:
            arrivals = self.comm.transfers.to_host if self.state_on_host else None
            self._updates = OverlappedUpdates(optimizer, self._buckets, arrivals=arrivals)
        self._updates.guard = self._state.guard
        return self._updates

    def _make_schedule(self) -> Schedule:
        shared = self._worker, self._dtype, self._host, bool(self.keepers)
        if self.places:
            actions = MicroBatchSchedule.of(self.plan).actions_of(self.plan, self.comm.rank)
            return PipelineSchedule(*shared, actions, self.comm, self.places, self._buckets)
        in_one_stage = *shared, self._parts, self._leaves_out, self.plan.waves
        if self._worker.mode.order == "sequential":
            return SequentialSchedule(*in_one_stage, self._calls)
        return LayeredSchedule(*in_one_stage)

    def layout(self) -> OptimizerLayout:
        """Return the ranks storing each part of every parameter, for `gpumix.Adafactor` and
        `gpumix.Muon`. Work on full matrices is divided like samples, by the speed of ranks.
        Collective."""
        in_groups = self._join_tensor_parallel_groups()
        pieces: dict[int, list[Piece]] = {}
        layouts: dict[int, ShardLayout] = {}
        for group in self.groups():  # all ranks go through buckets, and so parts, in one order
            layout = group.layout
            key = id(in_groups.get(id(layout.comm), layout.comm))
            layouts[key] = layout
            pieces.setdefault(key, []).extend(group.pieces)
        parts = []
        for key, layout in layouts.items():
            comm, ranks = layout.comm, layout.ranks or range(layout.comm.world)
            joined = in_groups.get(id(comm))
            if joined is not None:
                parts.append(LayoutPart(pieces[key], joined.comm, joined.speeds, copied=True))
            elif layout.replicated:
                parts.append(LayoutPart(pieces[key], self.comm.alone()))
            else:
                speeds = [float(self.plan.workers[rank].samples) for rank in ranks]
                parts.append(LayoutPart(pieces[key], comm, speeds))
        return OptimizerLayout(parts, root=self._root_names)

    def _join_tensor_parallel_groups(self) -> dict[int, JoinedGroups]:
        """Return the ranks of all tensor-parallel groups of this rank's stages, by the id of each
        communicator that divides a part of the stage's state. Collective: makes process groups."""
        own = {place.stage: place.parts for place in self.places} or {0: self._parts}
        found = {}
        for number, stage in enumerate(self.plan.stages):
            ranks = tuple(sorted(self.plan.ranks_of(number)))
            comm = self.comm.among(ranks) if stage.tensor > 1 else None
            if comm is None:
                continue
            layout = own[number].layout
            speeds = {
                rank: self.plan.worker_of(rank, number).samples / len(group)
                for group in self.plan.list_tp_groups(number)
                for rank in group
            }
            joined = JoinedGroups(comm, tuple(speeds[rank] for rank in ranks))
            for one in (layout, *layout.others, layout.undivided):
                if one is not None:
                    found[id(one.comm)] = joined
        return found

    def end(self, why: str) -> None:
        """End training, and free the memory of parameters, gradients and masters."""
        self.ended, self._failed = True, why
        self._buckets, self._heads, self.places = [], [], ()
        del self._parts, self._schedule

    # -- inside ------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _in_step(self, *, trains: bool = True) -> Iterator[None]:
        """Discard a step whose body fails. With several ranks the engine cannot continue: the ranks
        are at different points of the step, and collectives would not match."""
        if self.ended:
            raise TrainingError(
                "the engine is at its end",
                code="engine-ended",
                why=self._failed,
                fix="prepare the model again",
            )
        if self._failed:
            raise TrainingError(
                f"an earlier step failed on rank {self.comm.rank}, the others are not where it is",
                code="earlier-step-failed",
                why=self._failed,
                fix="start all ranks again, from a checkpoint",
            )
        if self.outside.is_whole:
            self.outside.refuse_step()
        self.outside.in_step = True
        self._calls.begin_step()
        try:
            begin_step(self._buckets, trains=trains)
            with self._switches:
                yield
        except BaseException as error:
            if self.comm.world > 1:
                if isinstance(error, GpumixError) and not error.where:
                    error.where = f"rank {self.comm.rank}"
                self._failed = format_in_one_line(error)
            else:
                for bucket in self._buckets:
                    bucket.abandon()
            account = self.comm.words.after(error)
            if account is not error:
                raise account from error
            raise
        finally:
            self.outside.in_step = False
            collective_progress.compute_phase = "", ""

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """Run forward and backward of a step inside: nothing is drawn from the caller's generators,
        and some steps are compared and observed."""
        observed = self._state.steps in COMPARED_STEPS or self._others.are_used
        with (
            torch.random.fork_rng(**self._forked),
            torch.enable_grad(),
            self._compared() if observed else contextlib.nullcontext(),
        ):
            yield

    def _cut(
        self, batch: Any, rows: Sequence[range], objective: Function | None = None
    ) -> list[MicroBatchTask]:
        """Cut a batch into micro-batches, whose samples are `rows` of the global batch."""
        state = self._state
        trims = state.trims and objective in (None, state.objective)
        if objective is None:
            is_watched = state.watch is not None and self._reduces.is_watched
            objective = self._seen if is_watched else state.objective
        return self._cutter.cut(batch, rows, objective, state.steps, trims=trims)

    def _make_cutter(self) -> BatchCutter:
        return BatchCutter(
            self.model,
            self.comm.rank,
            self.device,
            self._dtype,
            channels_last=self._worker.efficiency.channels_last,
            seed=self._seed,
            generators=get_generators(self.device),
            others=self._others,
            copies=self.copies,
        )

    def _exchange_losses(
        self, results: list[Loss], scale: torch.Tensor, *, in_step: bool = True
    ) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
        """Exchange losses and counts. Returns the table and a function that waits for the table and
        returns the scale from gradients of losses * `scale` to the loss's gradient; 0 if no loss
        was counted."""
        state, composition = self._state, LossComposition()
        norm: torch.Tensor | float = 0.0
        if in_step:
            norm = state.own_norm.take() / state.scaler.scale
            composition = composition if state.watch is None else state.watch.take()
        row = StepTable.row(self.device, self.notice, self.report, norm, composition)
        for loss, count in results if self.tells_losses else ():
            row[0] += loss
            row[1] += count
        table, exchanged = self.comm.exchange(row, "exchange of losses")

        @functools.cache
        def gradient_scale() -> torch.Tensor:
            if not exchanged.is_over:
                exchanged.wait()
            counted = table[:, 1].sum() * scale
            made = torch.where(counted > 0, 1.0 / counted, 0.0).float()
            if in_step and state.guard is not None:
                state.guard.see(table[:, 0].sum() / table[:, 1].sum())
            return made

        return table, gradient_scale
