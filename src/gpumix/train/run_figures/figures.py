"""Figures of a run: step time, tokens/s, distance from the plan, remaining time, and each class's
busy share, utilization and memory.

Every view shows these values: the table during training, the summary, `gpumix top`, the report,
`--json`, `progress.json` and the trackers. All of them are computed here, from the records of
`metrics.jsonl`. Pure.

Steps that count are the newest `FIGURE_STEPS` by the plan of the last start and with the current
batch size, without the first `WARM_UP_STEPS` after each start. If none is left, those by the plan
count, else all. A step's time has no pauses: evaluations and checkpoints are between steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from statistics import fmean
from typing import Any

from gpumix.schema.plan.plan import Plan
from gpumix.train.elastic.plan_change import EVENT as PLAN_EVENT
from gpumix.train.elastic.plan_change import apply_split
from gpumix.train.run_figures.history import FIGURE_STEPS, History, HistoryEvent
from gpumix.train.run_log.metrics import (
    WARM_UP_STEPS,
    ClassRecord,
    StepRecord,
    average_windows,
    compute_median_s,
)

RESTART_EVENT, RESUME_EVENT = "restart", "resume"
NAMES = (
    "step_s",
    "tokens_per_s",
    "predicted_step_s",
    "slower_than_planned",
    "remaining_s",
    "counted_steps",
)


class RunFigures:
    """Figures of a run, each computed when it is first asked for; None for unknown.

    Args:
        history: the records so far.
        plan: of the last start.
        steps: number of steps of the whole run, if known.
    """

    def __init__(self, history: History, plan: Plan, steps: int | None = None) -> None:
        self.history, self.plan, self._steps = history, plan, steps
        self.predicted_step_s = None if plan.prediction is None else plan.prediction.step_s

    @cached_property
    def _counted(self) -> Sequence[StepRecord]:
        return select_counted_steps(self.history)

    @property
    def counted_steps(self) -> int:
        """Number of steps behind the figures."""
        return len(self._counted)

    @cached_property
    def step_s(self) -> float | None:
        """Time of the median step."""
        return compute_median_s(one.step_s for one in self._counted) or None

    @cached_property
    def step_tokens(self) -> float | None:
        """Tokens of a mean step, without padding."""
        if not self._counted:
            return None
        return fmean(one.tokens_per_s * one.step_s for one in self._counted)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of a mean step over the time of the median one."""
        if self.step_tokens is None or not self.step_s:
            return None
        return self.step_tokens / self.step_s

    @property
    def slower_than_planned(self) -> float | None:
        """Measured over planned step time, minus 1; negative if steps are faster."""
        if not self.step_s or not self.predicted_step_s:
            return None
        return self.step_s / self.predicted_step_s - 1

    @property
    def remaining_s(self) -> float | None:
        """Time of the remaining steps."""
        if self._steps is None or self.step_s is None:
            return None
        return max(0, self._steps - self.history.steps[-1].step) * self.step_s

    @cached_property
    def classes(self) -> tuple[ClassRecord, ...]:
        """Record of each device class over the windows of the counted steps: mean shares, rates at
        the median step, peaks of all the time by the plan, counters since the last start."""
        return compute_class_figures(self.history)

    @cached_property
    def last_live_split(self) -> HistoryEvent | None:
        """The latest plan change, if made while training, in the time since the last start."""
        changes = [one for one in self.history.events if one.event == PLAN_EVENT]
        return changes[-1] if changes and changes[-1].told.get("live") is True else None

    @cached_property
    def plan_now(self) -> Plan:
        """The plan with current samples and shares."""
        if self.last_live_split is None:
            return self.plan
        return apply_split(self.plan, self.last_live_split.told)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures of the run as a whole, by name."""
        return {name: getattr(self, name) for name in NAMES}


def select_counted_steps(history: History) -> Sequence[StepRecord]:
    """Return the steps that count."""
    newest, other_plan = history.steps[-FIGURE_STEPS:], find_last_other_plan_step(history)
    alike = [one for one in newest if one.step > other_plan]
    starts = {0, other_plan, *_find_starts(history)}
    cold = {start + n for start in starts for n in range(1, WARM_UP_STEPS + 1)}
    return [one for one in alike if one.step not in cold] or alike or newest


def find_last_other_plan_step(history: History) -> int:
    """Return the last step by a plan other than the last start's, or with another batch size than
    now; 0 if none. Rebalancing during the run makes no new plan: devices keep their work."""
    newest = history.steps[-FIGURE_STEPS:]
    batches = (one.step for one in newest if one.samples != newest[-1].samples)
    starts = (
        one.step
        for one in history.events
        if one.event == PLAN_EVENT and one.told.get("live") is False
    )
    return max(*batches, *starts, 0, 0)


def _find_starts(history: History) -> Sequence[int]:
    """Return the steps from which the run started again."""
    found = []
    for one in history.events:
        since = one.number("resumed_from") if one.event == RESTART_EVENT else None
        if since is not None:
            found.append(int(since))
        elif one.event == RESUME_EVENT:
            found.append(one.step)
    return found


def compute_class_figures(history: History) -> tuple[ClassRecord, ...]:
    """Return the record of each class; see `RunFigures.classes`."""
    if not history.windows:
        return ()
    other_plan = find_last_other_plan_step(history)
    counted = select_counted_steps(history)
    numbers, times = [one.step for one in counted], [one.step_s for one in counted]
    step_s = compute_median_s(times)
    found: dict[str, list[tuple[int, ClassRecord]]] = {}
    begin = 0
    for window in history.windows:
        end = bisect_right(numbers, window.step)
        if window.step > other_plan:
            pace = compute_median_s(times[begin:end]) / step_s if step_s else 0.0
            for one in window.classes:
                weighted = end - begin, _scale_rates(one, pace or 1.0)
                found.setdefault(one.device_class, []).append(weighted)
        begin = end
    return tuple(_combine(found.get(last.device_class), last) for last in history.classes)


def _scale_rates(one: ClassRecord, pace: float) -> ClassRecord:
    """Return a record with rates as of the run's median step, of which the window's own is `pace`
    times as long: so they agree with the run's tokens/s."""
    mfu, hfu = (None if rate is None else rate * pace for rate in (one.mfu, one.hfu))
    return replace(one, tokens_per_s=one.tokens_per_s * pace, mfu=mfu, hfu=hfu)


def _combine(weighted: Sequence[tuple[int, ClassRecord]] | None, last: ClassRecord) -> ClassRecord:
    if not weighted or not any(steps for steps, _ in weighted):
        return last
    steps, records = zip(*weighted)
    return average_windows(records, steps)


def compute_planned_busy(plan: Plan) -> dict[str, float]:
    """Return the planned busy share of each class: the mean over its devices."""
    found: dict[str, list[float]] = {}
    for rank, worker in enumerate(plan.workers):
        expected = plan.expected_of(rank)
        if expected is not None and plan.prediction is not None and plan.prediction.step_s:
            share = expected.busy_s / plan.prediction.step_s
            found.setdefault(worker.device_class, []).append(share)
    return {name: fmean(shares) for name, shares in found.items()}
