"""Work of ranks: profile a cluster, train a job, try a plan."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.profiler.cache.measurement_cache import MeasurementCache, set_readers
from gpumix.profiler.cluster import ClusterProfiler
from gpumix.profiler.input_pipeline import measure_input
from gpumix.profiler.subject import Workload
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.measurements import InputMeasurement
from gpumix.schema.profile.profile import Profile
from gpumix.train.checks.job_contents import build_checked_model
from gpumix.train.checks.job_warnings import warn_of_data, warn_of_schedule
from gpumix.train.checks.resume_check import check_resume
from gpumix.train.console.terminal import get_stderr_console
from gpumix.train.elastic.recovery import Restart
from gpumix.train.monitor.trial_hook import TrialObserver
from gpumix.train.processes.local_launcher import RankAddress
from gpumix.train.rank_setup.context import RankContext, Task, join_run
from gpumix.train.rank_setup.optimizer import build_trial_optimizer
from gpumix.train.run_log import run_files
from gpumix.train.run_log.summary import Summary, TrialResult
from gpumix.train.run_manifest import RunRecord
from gpumix.train.trainer_builder import build_trainer


def profile(
    seat: RankAddress, task: Task, devices: tuple[Device, ...], fresh: bool, resume: bool = False
) -> Profile:
    """Measure everything not in the cache, for a run that begins or (`resume`) continues. Every
    rank returns the profile."""
    job = task.job
    with join_run(seat, task) as context:
        if resume:
            model = build_checked_model(job, task.cluster, task.folder)
            check_resume(context, model, split_into_units(model, job.model.units).fingerprint())
        cache = MeasurementCache(job, task.cluster, task.folder)
        own = cache.settings.get_chosen(seat.device.device_class).efficiency
        subject = Workload(
            build=partial(build_checked_model, job, task.cluster, task.folder),
            make_batch=context.batch,
            optimizer_of=partial(build_trial_optimizer, job.optimizer, fused=own.fused_optimizer),
            sequence_length=job.sequence_length,
            global_batch=job.global_batch_size,
            budget_s=job.advanced.profile_budget,
            settings=cache.settings,
            units=job.model.units,
            tensor=job.model.tensor_plan,
            degrees=cache.degrees,
            sequence=job.space.sequence_parallel,
            requires_tensor_parallel=1 not in job.space.tensor_parallel_size,
        )
        profiler = ClusterProfiler(
            subject,
            task.cluster,
            ranks=context.ranks,
            devices=devices,
            runtime=context.runtime,
            cache=cache,
            fresh=fresh,
        )
        found = cache.named(profiler.run(get_stderr_console().print))
        inputs = _measure_inputs(context, devices, cache, fresh=fresh)
        return set_readers(job, found.model_copy(update={"inputs": inputs.inputs}))


def _measure_inputs(
    context: RankContext, devices: tuple[Device, ...], cache: MeasurementCache, *, fresh: bool
) -> InputMeasurement:
    """Return the cost of reading samples, from the first rank's cache or measured. Collective."""
    cached = cache.inputs() if context.first and not fresh else None
    told = context.ranks.share("known inputs", cached.model_dump_json() if cached else None)
    if told:
        return InputMeasurement.model_validate_json(told)
    found = measure_input(
        context.train_data,
        context.task.cluster,
        devices,
        context.ranks,
        reading=context.reading,
    )
    measured = InputMeasurement(inputs=found)
    if context.first:
        cache.save_inputs(measured)
    return measured


def train(
    seat: RankAddress,
    task: Task,
    plan: Plan,
    profile: Profile | None,
    devices: tuple[Device, ...],
    resume: bool,
    restart: Restart | None = None,
) -> Summary:
    """Train the job by the plan. Every rank returns the summary.

    The run's folder gets the job, the plan and its profile, once nothing is in the way.
    """
    with join_run(seat, task) as context:
        own = plan.for_devices([d.id for d in devices])
        trainer = build_trainer(context, own, profile, resume=resume, restart=restart)
        if context.first:
            job = task.job
            odd = warn_of_data(context.train_data, context.held_out, job.global_batch_size)
            for line in (*warn_of_schedule(job), *odd):
                get_stderr_console().print(line, style="yellow")
            RunRecord.of(task).save(task.job.output_dir / run_files.RUN)
            plan.save(task.job.output_dir / run_files.PLAN)
            if profile is not None:
                profile.save(task.job.output_dir / run_files.PROFILE)
        return trainer.run()


def try_out(
    seat: RankAddress,
    task: Task,
    plan: Plan,
    devices: tuple[Device, ...],
    steps: int,
    beside: bool = False,
    watcher: TrialObserver | None = None,
) -> TrialResult:
    """Train a few steps by the plan, to measure speed and memory; see `Trainer.try_out`. Every rank
    returns the trial."""
    with watcher or nullcontext(), join_run(seat, task) as context:
        trainer = build_trainer(context, plan.for_devices([d.id for d in devices]))
        return trainer.try_out(steps, beside=beside, watcher=watcher)
