"""Checks of a plan given to a run: made earlier for this job, and possibly edited since.

Its predictions may be outdated, so the plan is compared with the model and predicted again as far
as a profile is available; nothing is measured for it.
"""

from __future__ import annotations

from collections.abc import Callable

from gpumix.cost.model_match import FIX, check_settings_have_effect, check_units
from gpumix.cost.peak_memory import compute_usable_bytes
from gpumix.cost.predict import predict
from gpumix.hardware.estimates.stated_peak import find_stated_peak
from gpumix.hardware.estimates.what_if import scale_memory
from gpumix.schema.cluster.cluster import Cluster
from gpumix.schema.errors import InputError, NoFeasiblePlanError
from gpumix.schema.job.job import Job
from gpumix.schema.job.search_space import EVERYTHING
from gpumix.schema.plan.dtypes import choose_communication_dtype, choose_compute_dtypes
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile
from gpumix.schema.units import show_bytes, show_flops

MEMORY_TOLERANCE_SHARE = 0.02  # drivers reserve a little more or less of a GPU's memory


def check_plan_fits_job(plan: Plan, job: Job, cluster: Cluster) -> None:
    """Refuse a plan made for a different job.

    Raises:
        InputError: batch, length, precision or devices differ, or the engine cannot run the plan.
    """
    _check_devices(plan, cluster)
    check_settings_have_effect(plan)
    dtypes = choose_compute_dtypes(job.precision, cluster)
    for what, planned, wanted in (
        ("global_batch_size", plan.global_batch, job.global_batch_size),
        ("sequence_length", plan.sequence_length, job.sequence_length),
        *(("precision", w.compute_dtype, dtypes[w.device_class]) for w in plan.workers),
    ):
        if planned != wanted:
            raise InputError(
                f"the plan is for {what} {planned}, the job has {wanted}",
                code="plan-of-another-job",
                fix="make a plan for this job: gpumix plan JOB.yaml",
            )
    sent = choose_communication_dtype(w.compute_dtype for w in plan.workers)
    if plan.communication_dtype != sent:
        raise InputError(
            f"the plan's communication_dtype is {plan.communication_dtype}, what its devices "
            f"compute in makes it {sent}",
            code="plan-communication-dtype",
            why="with another dtype another model is trained",
            fix=f'set "communication_dtype" to "{sent}"',
        )
    space = EVERYTHING.model_copy(update={"tensor_parallel_size": plan.degrees})
    if missing := space.missing(plan):
        raise InputError(
            f"the engine does not run this plan: {missing}",
            code="plan-not-runnable",
            fix="make a plan that it runs: gpumix plan JOB.yaml",
        )


def _check_devices(plan: Plan, cluster: Cluster) -> None:
    """Refuse a plan whose devices have a different class or host in the cluster."""
    devices = {device.id: device for device in cluster.devices}
    for worker in plan.workers:
        device = devices[worker.device]
        for key, planned, there in (
            ("device_class", worker.device_class, device.device_class),
            ("host", worker.host, device.host),
        ):
            if planned != there:
                raise InputError(
                    f"the plan's device '{worker.device}' has {key} '{planned}', here it is "
                    f"'{there}'",
                    code="plan-of-other-devices",
                    fix=f'set its "{key}" to "{there}", or make a plan for this cluster: gpumix '
                    "plan JOB.yaml",
                )


def check_plan_fits_model(plan: Plan, profile: Profile) -> None:
    """Refuse a plan made for another model than the profile's.

    Raises:
        InputError: the profile is of another model, or the plan's units are not the model's.
    """
    if plan.model != profile.model.fingerprint:
        raise InputError(
            "the plan was made for another model",
            code="plan-of-another-model",
            where=f"plan for model {plan.model}, the job's is {profile.model.fingerprint}",
            fix=FIX,
        )
    check_units(plan, profile.model)


def predict_again(plan: Plan, profile: Profile, tell: Callable[[str], None]) -> Plan:
    """Return the plan with a new prediction. The plan's reasons are kept only if the prediction is
    unchanged.

    Args:
        tell: receives a line for people if the plan's own prediction is outdated.

    Raises:
        InputError: see `check_plan_fits_model`.
    """
    check_plan_fits_model(plan, profile)
    if plan.prediction is None:
        return plan
    try:
        expected = predict(profile, plan)
    except InputError as unknown:  # it uses something not measured: it may run nevertheless
        tell(f"nothing is known of how fast the plan is and whether it fits: {unknown.what}")
        return plan.model_copy(update={"prediction": None, "reasons": None})
    if expected == plan.prediction.model_copy(update={"bound_s": None}):
        return plan
    tell("what the plan foretells of itself does not hold: it is predicted again")
    return plan.model_copy(update={"prediction": expected, "reasons": None})


def describe_speed_changes(plan: Plan, cluster: Cluster) -> list[str]:
    """Return lines for people on classes computing faster or slower than stated by the plan."""
    found = []
    peaks = plan.prediction.peaks if plan.prediction is not None else {}
    for name, worker in sorted({w.device_class: w for w in plan.workers}.items()):
        was, here = peaks.get(name), cluster.class_named(name)
        own = find_stated_peak(here, worker.compute_dtype, tf32=worker.efficiency.tf32)
        if was is not None and own is not None and was.source != "measured" and was != own:
            found.append(
                f"class '{name}' computed {show_flops(was.flops_per_s)}, here it computes "
                f"{show_flops(own.flops_per_s)}"
            )
    return found


def limit_profile_memory(profile: Profile, cluster: Cluster) -> Profile:
    """Return the profile limited to each class's memory in the cluster: the class may have been
    profiled with more."""
    here = {one.name: one.memory_bytes for one in cluster.classes}
    parts = {
        one.name: here[one.name] / one.memory_bytes
        for one in profile.cluster.classes
        if here.get(one.name, one.memory_bytes) < one.memory_bytes * (1 - MEMORY_TOLERANCE_SHARE)
    }
    return scale_memory(profile, parts) if parts else profile


def check_plan_fits_memory(plan: Plan, cluster: Cluster) -> None:
    """Refuse a plan predicted not to fit into memory.

    Raises:
        NoFeasiblePlanError: a device lacks memory.
    """
    for expected in plan.prediction.workers if plan.prediction is not None else ():
        name = cluster.device(expected.device).device_class
        usable = compute_usable_bytes(cluster.class_named(name))
        if expected.peak_bytes > usable:
            raise NoFeasiblePlanError(
                f"the plan needs {show_bytes(expected.peak_bytes)} where "
                f"{show_bytes(usable)} may be used",
                code="plan-exceeds-memory",
                where=f"device '{expected.device}' of class '{name}'",
                fix="make a plan for this job: gpumix plan JOB.yaml",
            )


def describe_overruled_settings(plan: Plan, job: Job) -> list[str]:
    """Return lines for people on the job's settings for plans overruled by this plan."""
    lines = []
    if "strategy" in job.model_fields_set and job.strategy != plan.strategy:
        lines.append(
            f"the job's `strategy: {job.strategy}` has no effect: the plan that was given is of "
            f"strategy '{plan.strategy}'"
        )
    if unwanted := job.space.missing(plan):
        lines.append(
            f"the job's `techniques` have no effect: the plan that was given uses {unwanted}"
        )
    return lines
