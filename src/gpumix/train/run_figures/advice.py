"""Advice on a run: what to do next, why, and the command for it. Pure.

Each rule looks at the figures and events of the run and gives at most one piece of advice. Rules
stand in the order in which advice is shown: first what stops a run, then what costs most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gpumix.cost.input_time import MIN_STARVED_SHARE
from gpumix.schema.plan.explanation import MixingComparison
from gpumix.schema.units import format_count, show_seconds
from gpumix.train.run_figures.figures import RESTART_EVENT, RunFigures, compute_planned_busy
from gpumix.train.run_figures.history import HistoryEvent
from gpumix.train.run_figures.words import (
    FAR_OFF,
    describe_gap,
    format_fraction,
    is_far_off,
    join_names,
)
from gpumix.train.run_log.metrics import ClassRecord

MIN_STEPS = 3  # counted; fewer say little about speed
LONG_WAIT = 0.2  # part of a step spent waiting for other GPUs
WAIT_DOUBT = 0.05  # a wait this much longer than planned is no surprise
LITTLE_GAIN = 0.01  # of a GPU type: it may be of more use elsewhere
MOST_OF_EXCESS = 0.5  # part of the time beyond the plan that names its cause
NOTHING = "Nothing to do"
OPTIMAL = "optimal"  # the strategy that searches all plans


@dataclass(frozen=True)
class Advice:
    """Something to do, the reason, and a command if there is one. `urgent` advice is on a run that
    failed, or computes wrong results."""

    what: str
    why: str
    command: str = ""
    urgent: bool = False


@dataclass(frozen=True)
class AdvisedRun:
    """A run as far as advice depends on it.

    Attributes:
        state: as in `progress.json`; "planned" without one.
        why: reason of an early end.
        resumable: a checkpoint exists.
        job: the job's file; empty for a script, which no command of gpumix starts.
        plan_file: of the plan, for a run not started yet.
    """

    figures: RunFigures
    state: str = "training"
    why: str = ""
    resumable: bool = False
    job: str = ""
    plan_file: str = ""

    @property
    def known(self) -> bool:
        """Whether enough steps are done to judge the speed."""
        return self.figures.counted_steps >= MIN_STEPS

    def command(self, verb: str, options: str = "") -> str:
        return f"gpumix {verb} {self.job} {options}".rstrip() if self.job else ""


def advise(run: AdvisedRun) -> tuple[Advice, ...]:
    """Return what to do next, most important first; at least that there is nothing to do."""
    return tuple(one for rule in RULES if (one := rule(run)) is not None) or (_nothing(run),)


def is_nothing(advice: Sequence[Advice]) -> bool:
    return all(one.what == NOTHING for one in advice)


# -- rules -----------------------------------------------------------------------------------------


def _start_or_go_on(run: AdvisedRun) -> Advice | None:
    if run.state == "planned":
        plan = f"--plan {run.plan_file}" if run.plan_file else ""
        return Advice("Start the run", "it is planned, not trained", run.command("train", plan))
    resume = run.command("train", "--resume" if run.resumable else "")
    if run.state == "interrupted":
        how = "from its last checkpoint" if run.resumable else "from the beginning"
        return Advice(f"Continue the run {how}", run.why or "it was stopped", resume)
    if run.state == "failed":
        return Advice("Fix the error, then continue the run", run.why, resume, urgent=True)
    return None


def _replace_wrong_gpu(run: AdvisedRun) -> Advice | None:
    for event in _newest(run, "replay"):
        devices = event.told.get("devices")
        if event.told.get("sure") and isinstance(devices, list):
            names, off = " and ".join(map(str, devices)), event.number("deviation")
            by = "" if off is None else f" by {off:.0%}"
            why = f"its gradient of the same sample was off{by} at step {event.step}"
            return Advice(f"Stop using {names}: it computes wrong results", why, urgent=True)
    return None


def _leave_memory_free(run: AdvisedRun) -> Advice | None:
    full = [one for one in _newest(run, RESTART_EVENT) if "out of memory" in one.text("why")]
    if full:
        times = "once" if len(full) == 1 else f"{len(full)} times"
        why = f"a GPU ran out of memory {times}: {full[0].text('decided')}".rstrip(": ")
        return Advice("Leave more GPU memory free", why, run.command("profile", "--fresh"))
    short = [one for one in run.figures.classes if one.retries]
    if short:
        names = join_names(tuple(one.device_class for one in short))
        times = format_count(int(sum(one.retries for one in short)), "time")
        why = f"memory was so short that its allocator stopped the GPU to free some, {times}"
        return Advice(f"Set a smaller `memory` for {names} in the cluster file", why)
    return None


def _drop_gpus(run: AdvisedRun) -> Advice | None:
    reasons, step_s = run.figures.plan.reasons, run.figures.predicted_step_s
    if reasons is None or step_s is None:
        return None
    mixing = reasons.mixing
    if mixing is not None and mixing.left_out:
        names = join_names(mixing.left_out)
        return Advice(f"Use {names} for something else", "the plan is faster without it")
    if mixing is not None and not mixing.pays:
        return _drop_all_but_best(run, mixing, step_s)
    for worth in reasons.worth:
        if worth.whole is not None and worth.whole < LITTLE_GAIN:
            gain = (
                f"{-worth.whole:.1%} slower"
                if worth.whole < 0
                else f"only {worth.whole:.1%} faster"
            )
            return Advice(f"Drop {worth.device_class}", f"it makes the run {gain} (planned)")
    return None


def _drop_all_but_best(run: AdvisedRun, mixing: MixingComparison, step_s: float) -> Advice | None:
    assert mixing.speedup is not None, "mixing that does not pay is slower than something"
    plan, alone_s = run.figures.plan, mixing.speedup * step_s
    if run.known and (run.figures.step_s or 0.0) <= alone_s:
        return None  # measured, mixing pays
    why = (
        f"with {mixing.best_class} alone a step takes {show_seconds(alone_s)} instead of "
        f"{show_seconds(step_s)} (planned)"
    )
    if plan.strategy != OPTIMAL:
        command = run.command("train", f"--strategy {OPTIMAL}")
        return Advice(f"Use the strategy `{OPTIMAL}`, not `{plan.strategy}`", why, command)
    others = {worker.device_class for worker in plan.workers} - {mixing.best_class}
    command = run.command("train", "--strategy best-subset")
    return Advice(f"Drop {join_names(tuple(sorted(others)))}", why, command)


def _use_faster_split(run: AdvisedRun) -> Advice | None:
    step_s = run.figures.step_s
    for event in _newest(run, "compared"):
        other_s = event.number("step_s")
        if step_s and other_s and other_s < (1 - LITTLE_GAIN) * step_s:
            strategy = event.text("strategy")
            why = (
                f"a step took {show_seconds(other_s)} with it, and takes {show_seconds(step_s)} by "
                "this plan (both measured)"
            )
            command = run.command("train", f"--strategy {strategy}")
            return Advice(f"Use the strategy `{strategy}`", why, command)
    return None


def _speed_up(run: AdvisedRun) -> Advice | None:
    """Explain why steps take longer than planned."""
    figures, slower = run.figures, run.figures.slower_than_planned
    if not run.known or slower is None or not is_far_off(slower):
        return None
    if slower < 0:
        if figures.last_live_split is not None:
            return None  # the plan was improved while training
        why = f"steps are {describe_gap(slower)}: by new measurements the split may be better"
        return Advice("Profile again", why, run.command("profile", "--fresh"))
    assert figures.step_s is not None and figures.predicted_step_s is not None
    times = f"{show_seconds(figures.step_s)} instead of {show_seconds(figures.predicted_step_s)}"
    told = (
        f"steps are {describe_gap(slower)}" if slower < 1 else f"steps take {describe_gap(slower)}"
    )
    for cause in CAUSES:
        found = cause(run)
        if found is not None:
            return Advice(found.what, f"{told} ({times}), because {found.why}", found.command)
    why = f"{told} ({times}), and the measurements do not say why"
    return Advice("Find out why steps are slow", why, run.command("doctor"))


def _read_faster(run: AdvisedRun) -> Advice | None:
    if not run.known or _explains_slowness(run, _blame_data):
        return None
    waiting = [(_get_share(one, "input"), one) for one in run.figures.classes]
    found = [(share, one.device_class) for share, one in waiting if share > MIN_STARVED_SHARE]
    if not found:
        return None
    share, name = max(found)
    why = f"{name} waits for data in {format_fraction(share)} of each step"
    return Advice("Read the data faster", why, run.command("doctor"))


def _shorten_waits(run: AdvisedRun) -> Advice | None:
    if not run.known or _explains_slowness(run, _blame_waits):
        return None
    planned = compute_planned_busy(run.figures.plan)
    found = [
        (share, one.device_class)
        for one in run.figures.classes
        if one.samples and (share := _get_share(one, "communication")) >= LONG_WAIT
    ]
    if not found:
        return None
    (share, name), (least, _) = max(found), min(found)
    rest = len(run.figures.classes) - len(found)
    who = "most GPUs wait" if rest else "every GPU waits"
    who = f"{name} waits" if len(found) == 1 else who
    part = f"{share:.0%}" if f"{least:.0%}" == f"{share:.0%}" else f"{least:.0%} to {share:.0%}"
    why = f"{who} for other GPUs in {part} of each step"
    if name in planned and share <= 1 - planned[name] + WAIT_DOUBT:
        why += ", as planned: the links or the slowest GPU limit the speed"
    return Advice("Find out what the GPUs wait for", why, run.command("doctor"))


RULES: Sequence[Callable[[AdvisedRun], Advice | None]] = (
    _start_or_go_on,
    _replace_wrong_gpu,
    _leave_memory_free,
    _drop_gpus,
    _use_faster_split,
    _speed_up,
    _read_faster,
    _shorten_waits,
)


# -- causes of slow steps --------------------------------------------------------------------------


def _blame_machine(run: AdvisedRun) -> Advice | None:
    if not any(one.overruns for one in run.figures.classes):
        return None
    why = "this machine was too busy to emulate the GPUs at full speed"
    what = "Close other programs, then profile again"
    return Advice(what, why, run.command("profile", "--fresh"))


def _blame_clocks(run: AdvisedRun) -> Advice | None:
    for event in _newest(run, "clocks"):
        now, profiled = event.number("sm_mhz"), event.number("measured_sm_mhz")
        if now is not None and profiled is not None and now < profiled:
            why = (
                f"{event.text('device')} runs at {now:.0f} MHz, and was profiled at {profiled:.0f}"
            )
            what = "Check cooling and power limits of the GPUs"
            return Advice(what, why, "nvidia-smi -q -d PERFORMANCE,POWER")
    return None


def _blame_data(run: AdvisedRun) -> Advice | None:
    share, name = _find_longest(run, "input")
    if share < MOST_OF_EXCESS * _excess_share(run):
        return None
    why = f"{name} waits for data in {share:.0%} of each step"
    return Advice("Read the data faster", why, run.command("doctor"))


def _blame_waits(run: AdvisedRun) -> Advice | None:
    planned = compute_planned_busy(run.figures.plan)
    longest = max(
        (
            (_get_share(one, "communication") - (1 - planned[one.device_class]), one)
            for one in run.figures.classes
            if one.samples and one.device_class in planned
        ),
        key=lambda found: found[0],
        default=None,
    )
    if longest is None or longest[0] < MOST_OF_EXCESS * _excess_share(run):
        return None
    name = longest[1].device_class
    why = (
        f"{name} waits for other GPUs in {_get_share(longest[1], 'communication'):.0%} of each "
        f"step, planned were {1 - planned[name]:.0%}"
    )
    return Advice("Find out what the GPUs wait for", why, run.command("doctor"))


def _blame_compute(run: AdvisedRun) -> Advice | None:
    step_s, planned_s = run.figures.step_s or 0.0, run.figures.predicted_step_s or 0.0
    planned = compute_planned_busy(run.figures.plan)
    longer = [
        (one.busy_share * step_s - planned[one.device_class] * planned_s, one)
        for one in run.figures.classes
        if one.device_class in planned
    ]
    longest_s, one = max(longer, key=lambda found: found[0], default=(0.0, None))
    if one is None or longest_s < MOST_OF_EXCESS * (step_s - planned_s):
        return None
    why = (
        f"{one.device_class} computes for {show_seconds(one.busy_share * step_s)} of a step, "
        f"planned were {show_seconds(planned[one.device_class] * planned_s)}"
    )
    what = f"See whether another program uses {one.device_class}, then profile again"
    return Advice(what, why, run.command("profile", "--fresh"))


CAUSES: Sequence[Callable[[AdvisedRun], Advice | None]] = (
    _blame_machine,
    _blame_clocks,
    _blame_data,
    _blame_waits,
    _blame_compute,
)


def _explains_slowness(run: AdvisedRun, cause: Callable[[AdvisedRun], Advice | None]) -> bool:
    """Return whether `_speed_up` gives this cause already."""
    slower = run.figures.slower_than_planned
    if slower is None or slower <= FAR_OFF:
        return False
    return next((one for one in CAUSES if one(run) is not None), None) is cause


def _excess_share(run: AdvisedRun) -> float:
    """Return the part of a step beyond the planned time."""
    slower = run.figures.slower_than_planned or 0.0
    return slower / (1 + slower)


# -- helpers ---------------------------------------------------------------------------------------


def _nothing(run: AdvisedRun) -> Advice:
    if not run.known:
        return Advice(NOTHING, "too few steps are done to judge the speed")
    gap = describe_gap(run.figures.slower_than_planned)
    speed = f"steps are {gap}, " if gap else ""
    return Advice(NOTHING, f"{speed}no GPU waits for long, and memory sufficed")


def _newest(run: AdvisedRun, kind: str) -> Iterator[HistoryEvent]:
    return (one for one in reversed(run.figures.history.events) if one.event == kind)


def _get_share(one: ClassRecord, cause: str) -> float:
    share: float = getattr(one.shares, cause, 0.0)
    return share


def _find_longest(run: AdvisedRun, cause: str) -> tuple[float, str]:
    shares = [(_get_share(one, cause), one.device_class) for one in run.figures.classes]
    return max(shares, default=(0.0, ""))
