"""Work of ranks: profile a cluster, train a job, try a plan."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

from torch import nn

from gpumix.engine.optimizers.parameter_groups import matches
from gpumix.engine.sharding.initial_weights import source_of
from gpumix.engine.sharding.unit_discovery import dissect
from gpumix.engine.tensor_parallel.plans import tensor_plan
from gpumix.profiler.cache.measurement_cache import MeasurementCache, reading_as
from gpumix.profiler.cluster import ClusterProfiler
from gpumix.profiler.input_pipeline import measure_input
from gpumix.profiler.subject import Shape, Subject
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.measurements import InputMeasurement
from gpumix.schema.profile.profile import Profile
from gpumix.train.checks.attention_heads import check_techniques
from gpumix.train.checks.job_warnings import of_data, of_schedule
from gpumix.train.checks.resume_check import check_goes_on
from gpumix.train.checks.stage_count import check_number
from gpumix.train.elastic.recovery import Restart
from gpumix.train.monitor.trial_hook import Watcher
from gpumix.train.processes.local_launcher import RankAddress
from gpumix.train.run_log import run_files
from gpumix.train.run_log.summary import Summary, TrialResult
from gpumix.train.run_log.terminal import stderr
from gpumix.train.run_manifest import RunRecord
from gpumix.train.trainer import Trainer
from gpumix.train.worker.context import Context, Task, joined
from gpumix.train.worker.model import model_of
from gpumix.train.worker.optimizer import trial_optimizer


def profile(
    seat: RankAddress, task: Task, devices: tuple[Device, ...], fresh: bool, resume: bool = False
) -> Profile:
    """Measure everything not in the cache, for a run that begins or (`resume`) continues. Every
    rank returns the profile."""
    job = task.job
    with joined(seat, task) as context:
        if resume:
            model = _model_to_measure(task)
            check_goes_on(context, model, dissect(model, job.model.units).fingerprint())
        cache = MeasurementCache(job, task.cluster, task.folder)
        own = cache.chosen[seat.device.device_class].efficiency
        subject = Subject(
            build=partial(_model_to_measure, task),
            make_batch=context.batch,
            optimizer_of=partial(trial_optimizer, job.optimizer, fused=own.fused_optimizer),
            shape=Shape(job.sequence_length, job.global_batch),
            budget_s=job.profile.budget,
            dtypes=cache.dtypes,
            units=job.model.units,
            compiled=cache.compiled,
            chosen=cache.chosen,
            tensor=job.model.tensor_plan,
            degrees=cache.degrees,
            sequence=job.techniques.sequence,
            must_divide=1 not in job.techniques.tensor,
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
        found = cache.named(profiler.run(stderr().print))
        inputs = _inputs(context, devices, cache, fresh=fresh)
        return reading_as(job, found.model_copy(update={"inputs": inputs.inputs}))


def _inputs(
    context: Context, devices: tuple[Device, ...], cache: MeasurementCache, *, fresh: bool
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


def _model_to_measure(task: Task) -> nn.Module:
    """Build the job's model. Foreign weights, parameter groups or tensor plans without a match, and
    more stages than units are reported now, not after the measurement."""
    spec = task.job.model
    model = model_of(spec, folder=task.folder, seed=task.job.seed)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    matches([group.match for group in task.job.optimizer.groups], trained)
    if spec.weights is not None:
        source_of(model, spec.weights)
    must_divide = 1 not in task.job.techniques.tensor
    if spec.tensor_plan is not None or must_divide:
        tensor_plan(model, spec.tensor_plan)
    if must_divide:
        check_techniques(getattr(model, "config", None), task.cluster, task.job.techniques)
    check_number(model, task.job, task.cluster)
    return model


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
    with joined(seat, task) as context:
        own = plan.for_devices([d.id for d in devices])
        trainer = Trainer(context, own, profile, resume=resume, restart=restart)
        if context.first:
            job = task.job
            odd = of_data(context.train_data, context.held_out, job.global_batch)
            for line in (*of_schedule(job), *odd):
                stderr().print(line, style="yellow")
            RunRecord.of(task).save(task.job.output / run_files.RUN)
            plan.save(task.job.output / run_files.PLAN)
            if profile is not None:
                profile.save(task.job.output / run_files.PROFILE)
        return trainer.run()


def try_out(
    seat: RankAddress,
    task: Task,
    plan: Plan,
    devices: tuple[Device, ...],
    steps: int,
    beside: bool = False,
    watcher: Watcher | None = None,
) -> TrialResult:
    """Train a few steps by the plan, to measure speed and memory; see `Trainer.try_out`. Every rank
    returns the trial."""
    with watcher or nullcontext(), joined(seat, task) as context:
        trainer = Trainer(context, plan.for_devices([d.id for d in devices]))
        return trainer.try_out(steps, beside=beside, watcher=watcher)
