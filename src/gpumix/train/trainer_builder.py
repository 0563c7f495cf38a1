"""Construction of a rank's trainer: model, engine, optimizer and data, and the state of an earlier
run that training resumes from."""

from __future__ import annotations

from torch import nn

from gpumix.data.loader import Loader
from gpumix.data.order.sampler import ByLength
from gpumix.engine.engine import Engine
from gpumix.engine.prepare import prepare
from gpumix.engine.sharding.initial_weights import find_unused_tensors
from gpumix.engine.sharding.state_dict import join_some_names
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile
from gpumix.train.checkpoint.manifest import get_job_number
from gpumix.train.checks.packed_documents import check_documents
from gpumix.train.checks.resume_check import check_resume
from gpumix.train.console.terminal import get_stderr_console
from gpumix.train.elastic.plan_change import load_parts_in_force
from gpumix.train.elastic.recovery import Restart
from gpumix.train.rank_setup.context import RankContext
from gpumix.train.rank_setup.model import attention_cost, build_model
from gpumix.train.rank_setup.optimizer import build_optimizer
from gpumix.train.run_log.loading import measure_loading
from gpumix.train.state_keeper import ResumedState, StateKeeper, TrainingParts
from gpumix.train.trainer import Trainer, TrainingStart


def build_trainer(
    context: RankContext,
    plan: Plan,
    profile: Profile | None = None,
    *,
    resume: bool = False,
    restart: Restart | None = None,
) -> Trainer:
    """Build the trainer of a rank. Collective.

    Args:
        context: this rank's device, peers and data.
        plan: the workers in the order of the ranks; `profile` is the plan's source, if known.
        resume: continue from the newest state.
        restart: reason for a restart of the run; it continues from the newest state, if there is
            any.

    Raises:
        InputError: the model, the optimizer or the data cannot be used, or there is no state to
            resume from.
    """
    job = context.job
    engine = _prepare_engine(context, plan, _build_model(context, plan, resume=resume))
    optimizer = build_optimizer(
        job.optimizer_of(plan.optimizer_state),
        engine.pieces(),
        engine.layout,
        names=engine.trained_names(),
        fused=plan.workers[context.ranks.rank].efficiency.fused_optimizer,
    )
    engine.check_optimizer(optimizer)
    loader = _open_loader(context, plan, attention_cost(engine.model))
    if job.data.packing == "documents":
        warning = check_documents(engine)
        if warning and context.first:
            get_stderr_console().print(warning)
    keeping = StateKeeper(context, plan, engine, optimizer, loader)
    start = TrainingStart(restart=restart)
    if resume or restart is not None:
        before = load_parts_in_force(job.output_dir, fresh=not resume) if context.first else None
        state = keeping.restore_newest_state(needed=restart is None)
        if state is not None and restart is not None:
            keeping.assume_losses(state)
        start = TrainingStart(state, before, restart)
        if context.first and state is not None:
            _print_resumed(context, state)
    context.runtime.reset_peak()
    parts = TrainingParts(engine, optimizer, loader, keeping)
    return Trainer(context, plan, parts, start, profile)


def _build_model(context: RankContext, plan: Plan, *, resume: bool) -> nn.Module:
    """Return the job's model, checked against the saved run on resume."""
    job = context.job
    model = build_model(job.model, folder=context.task.folder, seed=job.seed)
    if resume:
        check_resume(context, model, plan.model)
    if context.first and job.model.weights is not None:
        unused = find_unused_tensors(model, job.model.weights)
        if unused:  # a wrong prefix is a mistake, though another task's head is not
            names = join_some_names(unused)
            get_stderr_console().print(f"the weights hold tensors without a place: {names}")
    return model


def _prepare_engine(context: RankContext, plan: Plan, model: nn.Module) -> Engine:
    job = context.job
    with measure_loading() as meter:
        engine = prepare(
            model,
            plan,
            comm=context.ranks.communicator(plan),
            weights=job.model.weights,
            units=job.model.units,
            tensor=job.model.tensor_plan,
            seed=job.seed,
            couples=job.model.couples or "",
        )
    if job.model.weights is not None:
        told = meter.describe(engine)
        if context.first:
            get_stderr_console().print(told)
    return engine


def _open_loader(context: RankContext, plan: Plan, of_attention: float) -> Loader:
    """Return the loader of this rank's part of each batch."""
    job = context.job
    return Loader(
        context.train_data,
        plan,
        context.ranks.rank,
        seed=job.seed,
        device=context.runtime.torch_device,
        num_workers=job.data.num_workers,
        prefetch=job.data.prefetch,
        bad_samples=job.data.bad_samples,
        timeout_s=job.advanced.timeout,
        by_length=ByLength(job.data.bucketing, of_attention),
    )


def _print_resumed(context: RankContext, state: ResumedState) -> None:
    """Print where the run continues, and settings that differ from those of the saved run."""
    job, console = context.job, get_stderr_console()
    for damage in state.passed_over:
        console.print(f"passed over: {damage.where} is damaged: {damage.why}")
    console.print(f"going on from {state.where}")
    if job.advanced.trace_step is not None and job.advanced.trace_step <= state.step:
        console.print(f"step {job.advanced.trace_step} is done, and is not traced")
    batch = get_job_number(state.extra, "global_batch_size")
    if batch not in (None, job.global_batch_size):
        console.print(f"steps now take {job.global_batch_size} samples, they took {batch}")
    before, goes_on = state.of_steps, state.step < job.max_steps
    varies = job.lr_scheduler.type != "constant"
    if before not in (None, job.max_steps) and varies and goes_on:
        console.print(
            f"the schedule of the learning rate now ends at step {job.max_steps}, it ended at step "
            f"{before}: the rate may jump here"
        )
