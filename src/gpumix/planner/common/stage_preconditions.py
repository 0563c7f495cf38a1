"""Cases without a plan of several stages, whatever fits: refused before any search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpumix.schema.cluster.cluster import Device
from gpumix.schema.errors import InputError, NoFeasiblePlanError
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.plan import Schedule
from gpumix.schema.profile.profile import Profile

ALLOW_ONE_STAGE_FIX = "allow one stage: `strategy: optimal` without `min_pipeline_stages`"

STAGED_TECHNIQUES = {
    "checkpoints_on": "device",
    "orders": "layered",
    "state_on": "device",
    "shardings": "all",
}
"""By field of a space, the value common to all plans of several stages."""

SINGLE_DEVICE_TECHNIQUES = {
    **STAGED_TECHNIQUES,
    "pipeline_schedules": "1f1b",
    "zero_stages": 0,
    "tensor_parallel_size": 1,
}
"""The values if each stage has one device."""

NEEDED_BY: Mapping[str, Mapping[str, object]] = {
    "staged": STAGED_TECHNIQUES,
    "model": SINGLE_DEVICE_TECHNIQUES,
}
"""The values for each strategy without plans of one stage."""

STAGE_CHOOSING_STRATEGIES = ("optimal", "staged")
"""Strategies choosing the number of stages."""


def needs_several_stages(strategy: str, space: Space) -> bool:
    """Return True if one stage alone is not enough."""
    return strategy in NEEDED_BY or space.min_pipeline_stages > 1


def check_wanted_stages(strategy: str, space: Space, devices: Sequence[Device]) -> None:
    """Raise an InputError if several stages are wanted, but ruled out for any model by the
    strategy, the devices or the space."""
    if not needs_several_stages(strategy, space):
        return
    if strategy not in STAGE_CHOOSING_STRATEGIES:
        refuse_least_stages(space)
    refuse_one_device(devices)
    check_space_includes(space, NEEDED_BY.get(strategy, STAGED_TECHNIQUES))


def refuse_least_stages(space: Space) -> None:
    """Raise an InputError if a space sets `min_pipeline_stages` for a strategy unable to choose."""
    if space.min_pipeline_stages > 1:
        raise InputError(
            "the strategy does not choose the number of stages: 'min_pipeline_stages' has no "
            "effect",
            code="pipeline-stages-without-effect",
            fix="use `strategy: staged` or `optimal`",
        )


def check_stage_count(
    space: Space, *, most_groups: int, units: int, rounds: int, degree: int
) -> None:
    """Raise an InputError if no plan can have as many stages as a space wants.

    Args:
        most_groups: of devices, or of tensor-parallel groups of `degree`.
        units: the most stages that the model can be cut into.
        rounds: the most stages of a group.
    """
    most = min(units, most_groups * rounds)
    if space.max_pipeline_stages == 1:
        raise InputError(
            "there is no plan of several stages with max_pipeline_stages 1",
            code="pipeline-stages-excluded",
            where="techniques.max_pipeline_stages",
            fix=f"set techniques.max_pipeline_stages to 2 or more, or {ALLOW_ONE_STAGE_FIX}",
        )
    if most_groups < 2:  # `refuse_one_device` covers a single device
        raise InputError(
            f"there is no plan of several stages: a single tensor-parallel group of {degree} "
            "has one stage",
            code="pipeline-of-one-group",
            where="techniques.tensor_parallel_size",
            fix=f"allow `techniques: {{tensor_parallel_size: [1, {degree}]}}`, or "
            f"{ALLOW_ONE_STAGE_FIX}",
        )
    if space.min_pipeline_stages > most:
        workers = f"tensor-parallel groups of {degree}" if degree > 1 else "devices"
        twice = f", of which each may have {rounds} stages" if rounds > 1 else ""
        raise InputError(
            f"there is no plan of {space.min_pipeline_stages} stages: there are {most_groups} "
            f"{workers}{twice}, and {units} units",
            code="pipeline-stages-too-many",
            where="techniques.min_pipeline_stages",
            fix=f"set techniques.min_pipeline_stages to {max(1, most)} at most",
        )


class Refusal(NamedTuple):
    """The reason why a schedule has no stages, and a fix."""

    why: str
    fix: str


def make_schedules_error(refusals: Mapping[Schedule, Refusal]) -> NoFeasiblePlanError:
    """Return the error for a job with no stages by any schedule."""
    every = dict.fromkeys(refusals.values())
    whose = {one: [name for name, why in refusals.items() if why == one] for one in every}
    return NoFeasiblePlanError(
        f"there is no plan of several stages by schedule {' or '.join(refusals)}",
        code="no-schedule-for-stages",
        why="; ".join(f"{' and '.join(whose[one])}: {one.why}" for one in every)
        if len(every) > 1
        else next(iter(every)).why,
        fix=", or ".join(dict.fromkeys(one.fix for one in every)),
    )


def refuse_one_device(devices: Sequence[Device]) -> None:
    """Raise an InputError for fewer than two devices."""
    if len(devices) < 2:
        raise InputError(
            "there is no plan of several stages: one device alone has one stage",
            code="pipeline-of-one-device",
            fix=ALLOW_ONE_STAGE_FIX,
        )


def refuse_one_unit(units: int) -> None:
    """Raise an InputError for a model of fewer than two units."""
    if units < 2:
        raise InputError(
            "there is no plan of several stages: a model of one unit has one stage",
            code="pipeline-of-one-unit",
            fix=ALLOW_ONE_STAGE_FIX,
        )


def refuse_one_stage(profile: Profile, devices: Sequence[Device]) -> None:
    """Raise an InputError if no plan can have several stages."""
    refuse_one_device(devices)
    refuse_one_unit(len(set(profile.model.calls)))
    what, code, fix = "", "", ALLOW_ONE_STAGE_FIX
    if not profile.model.cuts:
        code = "model-not-cuttable"
        what = "wherever this model is cut, units before the cut are called again behind it"
    elif profile.model.no_stages:
        what, code = profile.model.no_stages, "model-without-stages"
    elif not profile.model.needs:
        code = "profile-without-dataflow"
        what = "the profile does not say what the model's units need of each other"
        fix += ", or profile again: `gpumix profile JOB.yaml --fresh`"
    if what:
        raise InputError(f"there is no plan of several stages: {what}", code=code, fix=fix)


def check_space_includes(space: Space, needed: Mapping[str, object] = STAGED_TECHNIQUES) -> None:
    """Raise an InputError if a space leaves out the needs of plans of several stages.

    Args:
        needed: by field of the space, the value required.
    """
    for name, value in needed.items():
        allowed = getattr(space, name)
        if value not in allowed:
            raise InputError(
                f"there is no plan of several stages with {name} "
                f"{' or '.join(map(str, allowed))}: it needs {value}",
                code="pipeline-needs-setting",
                where=f"techniques.{name}",
                fix=f"allow `techniques: {{{name}: [{value}, ...]}}`, or {ALLOW_ONE_STAGE_FIX}",
            )
