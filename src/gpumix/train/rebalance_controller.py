"""Rebalancing of a run's samples among ranks during training; `rebalancer` decides on the split."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import fmean, median

from gpumix.cost.input_time import compute_host_read_rates
from gpumix.cost.predict import predict
from gpumix.hardware.host.environment import torchrun_place
from gpumix.schema.errors import PlanOutdated
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile
from gpumix.schema.units import show_seconds
from gpumix.train.controller import plan_job
from gpumix.train.elastic.plan_change import make_rebalance_event
from gpumix.train.elastic.rebalance_memory import (
    MovableSplitLimits,
    PredictedSplitLimits,
    idle_paces,
    with_shares,
)
from gpumix.train.elastic.rebalancer import (
    WINDOW_STEPS,
    Rebalancer,
    SplitChange,
    SplitLimits,
)
from gpumix.train.elastic.replan_stages import MicroBatchExchange, StageReplanner
from gpumix.train.elastic.sample_dealer import with_samples
from gpumix.train.rank_setup.context import RankContext
from gpumix.train.run_log.metrics import RunEvent

# Observation starts at this step: the first steps take longer.
FIRST_STEPS = 3
# Steps measured after a change to report its effect.
MEASURED_STEPS = 5
# Without a profile the samples' part of the peak is unknown: the full peak is attributed to them.
USABLE_MEMORY_SHARE = 0.9


class RebalanceController:
    """A rank's part in rebalancing; all ranks change plans identically, at a common step.

    Attributes:
        plan: the plan of the next step.
        changes: number of times the samples were split again.
        outdated: the error to raise once the state is saved: the run should restart by another
            plan.

    Args:
        state_moves: whether the engine can move the state stored by a rank.
        step_before_s: step time by the previous plan, if the run started by this plan because
            devices took different times.
    """

    def __init__(
        self,
        plan: Plan,
        profile: Profile | None,
        context: RankContext,
        *,
        state_moves: bool,
        step_before_s: float | None = None,
    ) -> None:
        self.plan = self._planned = plan
        self._alone = len(plan.workers) == 1
        self._profile = profile
        self._context = context
        self._state_moves = state_moves and profile is not None
        self._rebalancer: Rebalancer | None = None
        self.changes = 0
        self._steps = 0
        # Number of steps before the last change and step time before it, until its effect is
        # reported.
        self._changed: tuple[int, float] | None = None
        if step_before_s is not None:
            self._changed = (FIRST_STEPS, step_before_s)
        self.outdated: PlanOutdated | None = None
        self._restaging: StageReplanner | None = None
        if len(plan.stages) > 1 and profile is not None:
            job = context.job
            self._restaging = StageReplanner(
                plan,
                profile,
                replan=partial(plan_job, job, leaving_out=torchrun_place() is None)
                if job.advanced.max_restarts
                else None,
                steps=job.max_steps,
            )

    def after_step(self, times: Sequence[float], compute_s: Sequence[float]) -> list[RunEvent]:
        """Decide on a new split. Collective once.

        Args:
            times: step times so far, in s.
            compute_s: computing time of each rank in the step before the last.
        """
        self._steps += 1
        if self._alone or self._steps < FIRST_STEPS:
            return []
        if len(self.plan.stages) > 1:
            return self._after_stages(times, compute_s)
        if self._rebalancer is None:
            self._rebalancer = self._watching()
        change = self._rebalancer.observe(compute_s)
        if change is None:
            return self._settled(times)
        told = self._adopt_plan(
            self._apply_change(change),
            change,
            times,
            what="a step's computing",
            moving_s=None if change.shares is None else change.moving_s,
        )
        if change.shares is not None:
            self._planned = self.plan
            self._rebalancer.go_on(self.plan, self._room())
        return told

    def _after_stages(self, times: Sequence[float], compute_s: Sequence[float]) -> list[RunEvent]:
        found = self._restaging.observe(compute_s) if self._restaging is not None else None
        if isinstance(found, PlanOutdated):
            found.step_s = _mean_recent_step_s(times)
            self.outdated = found
            return self.effect(times)
        if found is None:
            return self._settled(times)
        return self._adopt_plan(found.plan, found, times, what="a step")

    def _adopt_plan(
        self,
        plan: Plan,
        found: SplitChange | MicroBatchExchange,
        times: Sequence[float],
        *,
        what: str,
        moving_s: float | None = None,
    ) -> list[RunEvent]:
        """Adopt a plan splitting the samples again from the next step on; see
        `make_rebalance_event`."""
        before, self.plan = self.plan, plan
        self.changes += 1
        effect = self.effect(times)
        self._changed = (len(times), _mean_recent_step_s(times))
        told = make_rebalance_event(
            before,
            plan,
            found.why,
            what=what,
            before_s=found.before_s,
            after_s=found.after_s,
            moving_s=moving_s,
        )
        return [*effect, told]

    def _watching(self) -> Rebalancer:
        """Return the rebalancer. Collective without a profile."""
        plan, profile, steps = self._planned, self._profile, self._context.job.max_steps
        if profile is None or plan.prediction is None:
            return Rebalancer(plan, self._room(), steps=steps)
        return Rebalancer(
            plan,
            self._room(),
            steps=steps,
            read_per_s=compute_host_read_rates(profile),
            idle=idle_paces(profile, plan),
        )

    def _room(self) -> SplitLimits:
        """Return the room for samples. Collective without a profile."""
        if self._profile is None:
            return SplitLimits(self._limit_samples_by_peak())
        if self._state_moves:
            return MovableSplitLimits(self._profile, self._planned)
        return PredictedSplitLimits(self._profile, self._planned)

    def _limit_samples_by_peak(self) -> Sequence[int]:
        """Return the most samples for which each tensor-parallel group has memory, by peak memory
        so far. Collective."""
        (stage,) = self._planned.stages
        peak = self._context.runtime.peak_bytes()
        part = (
            USABLE_MEMORY_SHARE * self._context.runtime.memory_limit_bytes / peak if peak else 1.0
        )
        parts = [float(text) for text in self._context.ranks.gather("room", str(part))]
        if not peak:
            return [self._planned.global_batch] * len(stage.tp_groups)
        factors = [min(parts[rank] for rank in ranks) for ranks in self._planned.list_tp_groups(0)]
        now = [tp_group[0].samples for tp_group in stage.tp_groups]
        return [max(n, int(n * factor)) for n, factor in zip(now, factors)]

    def _apply_change(self, change: SplitChange) -> Plan:
        plan = with_samples(self._planned, change.samples)
        if change.shares is not None:
            plan = with_shares(plan, change.shares)
        if self._profile is None:
            return plan
        return plan.model_copy(update={"prediction": predict(self._profile, plan)})

    def _settled(self, times: Sequence[float]) -> list[RunEvent]:
        """Report the effect of the last change once enough steps are measured."""
        if self._changed is None or len(times) < self._changed[0] + MEASURED_STEPS:
            return []
        return self.effect(times)

    def effect(self, times: Sequence[float]) -> list[RunEvent]:
        """Report the effect of the last change, once, by however few steps: another change follows,
        or the run ends."""
        if self._changed is None or len(times) <= self._changed[0]:
            return []
        (since, before_s), self._changed = self._changed, None
        # The first step may take longer.
        measured = times[since + 1 :] or times[since:]
        after_s = median(measured)
        fields = {"step_s": after_s, "step_before_s": before_s, "steps": len(measured)}
        text = f"a step takes {show_seconds(after_s)} now, {show_seconds(before_s)} before"
        return [RunEvent("rebalanced", fields, text)]


def _mean_recent_step_s(times: Sequence[float]) -> float:
    return fmean(times[-WINDOW_STEPS:])
