"""What ranks are started for: profile a cluster, train a job, try a plan."""

from __future__ import annotations

from functools import partial

from gpumix.profiler.cluster import ClusterProfiler
from gpumix.spec.cluster import Device
from gpumix.spec.errors import InputError
from gpumix.spec.plan import Plan, Stage
from gpumix.spec.profile import Profile
from gpumix.train.context import Task, joined
from gpumix.train.launch import Seat
from gpumix.train.loop import Summary, Trainer, Trial
from gpumix.train.optimizer import trial_optimizer
from gpumix.train.tables import stderr


def profile(seat: Seat, task: Task, devices: tuple[Device, ...], fresh: bool) -> Profile:
    """Measure what is not in the cache. Every rank returns the profile."""
    with joined(seat, task) as context:
        profiler = ClusterProfiler(
            task.job,
            task.cluster,
            folder=task.folder,
            ranks=context.ranks,
            devices=devices,
            runtime=context.runtime,
            fresh=fresh,
        )
        return profiler.run(
            context.batch, partial(trial_optimizer, task.job.optimizer), stderr().print
        )


def train(seat: Seat, task: Task, plan: Plan, devices: tuple[Device, ...], resume: bool) -> Summary:
    """Train the job by the plan. Every rank returns the summary."""
    with joined(seat, task) as context:
        return Trainer(context, in_rank_order(plan, devices), resume=resume).run()


def in_rank_order(plan: Plan, devices: tuple[Device, ...]) -> Plan:
    """The plan with its workers in the order of the ranks' devices.

    Raises:
        InputError: the plan was made for other devices.
    """
    by_device = {w.device: w for w in plan.workers}
    here = {d.id for d in devices}
    if set(by_device) != here:
        missing = sorted(set(by_device) - here)
        extra = sorted(here - set(by_device))
        raise InputError(
            "the plan was made for other devices",
            why=f"missing here: {', '.join(missing) or 'none'}; not in the plan: "
            f"{', '.join(extra) or 'none'}",
            fix="make a plan for these devices: gpumix plan JOB.yaml",
        )
    workers = tuple(by_device[d.id] for d in devices)
    stage = Stage(units=plan.stages[0].units, workers=workers)
    return plan.model_copy(update={"stages": (stage,)})


def try_out(seat: Seat, task: Task, plan: Plan, devices: tuple[Device, ...], steps: int) -> Trial:
    """Train a few steps by the plan, for its speed and memory. Every rank returns the trial."""
    with joined(seat, task) as context:
        return Trainer(context, in_rank_order(plan, devices)).try_out(steps)
