"""When there can be no plan of several stages, whatever fits: said before anything is searched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpumix.spec.cluster import Device
from gpumix.spec.errors import InputError, NoFeasiblePlanError
from gpumix.spec.plan import Schedule
from gpumix.spec.profile import Profile
from gpumix.spec.space import Space

ONE_STAGE = "allow one stage: `strategy: optimal` without `least_stages`"

NEEDED = {"boundaries": "device", "orders": "layered", "state_on": "device", "shardings": "all"}
"""By field of a space, the value that all plans of several stages have."""

NEEDED_ALONE = {**NEEDED, "schedules": "1f1b", "zero_stages": 0, "tensor": 1}
"""The same where each stage has one device."""

NEEDED_BY: Mapping[str, Mapping[str, object]] = {"staged": NEEDED, "model": NEEDED_ALONE}
"""By strategy that makes no plan of one stage, what its plans have."""

CHOOSING = ("optimal", "staged")
"""Strategies that choose how many stages there are."""


def wants_stages(strategy: str, space: Space) -> bool:
    """Whether one stage alone is not enough."""
    return strategy in NEEDED_BY or space.least_stages > 1


def refuse_wanted(strategy: str, space: Space, devices: Sequence[Device]) -> None:
    """Raise an InputError where several stages are wanted, and the strategy, the devices or the
    space do not allow them, whatever the model."""
    if not wants_stages(strategy, space):
        return
    if strategy not in CHOOSING:
        refuse_least_stages(space)
    refuse_one_device(devices)
    refuse_without(space, NEEDED_BY.get(strategy, NEEDED))


def refuse_least_stages(space: Space) -> None:
    """Raise an InputError where a space has them, for a strategy that does not choose how many
    stages there are."""
    if space.least_stages > 1:
        raise InputError(
            "the strategy does not choose how many stages there are: 'least_stages' has no effect",
            fix="use `strategy: staged` or `optimal`",
        )


def refuse_number(space: Space, *, most_groups: int, units: int, rounds: int, degree: int) -> None:
    """Raise an InputError where there can be no plan of as many stages as a space wants.

    Args:
        most_groups: of devices, or of teams of `degree`.
        units: that the model can be cut between, and the one before them.
        rounds: stages that a group may have.
    """
    most = min(units, most_groups * rounds)
    if space.most_stages == 1:
        raise InputError(
            "there is no plan of several stages with most_stages 1",
            where="techniques.most_stages",
            fix=f"set techniques.most_stages to 2 or more, or {ONE_STAGE}",
        )
    if most_groups < 2:  # of one device alone `refuse_one_device` tells
        raise InputError(
            f"there is no plan of several stages: one team of {degree} alone has one stage",
            where="techniques.tensor",
            fix=f"allow `techniques: {{tensor: [1, {degree}]}}`, or {ONE_STAGE}",
        )
    if space.least_stages > most:
        teams = f"teams of {degree}" if degree > 1 else "devices"
        twice = f", of which each may have {rounds} stages" if rounds > 1 else ""
        raise InputError(
            f"there is no plan of {space.least_stages} stages: there are {most_groups} {teams}"
            f"{twice}, and {units} units",
            where="techniques.least_stages",
            fix=f"set techniques.least_stages to {max(1, most)} at most",
        )


class Refusal(NamedTuple):
    """Why there are no stages by a schedule, and what to do."""

    why: str
    fix: str


def refuse_schedules(refusals: Mapping[Schedule, Refusal]) -> NoFeasiblePlanError:
    """The error where none of the schedules has any stages."""
    every = dict.fromkeys(refusals.values())
    whose = {one: [name for name, why in refusals.items() if why == one] for one in every}
    return NoFeasiblePlanError(
        f"there is no plan of several stages by schedule {' or '.join(refusals)}",
        why="; ".join(f"{' and '.join(whose[one])}: {one.why}" for one in every)
        if len(every) > 1
        else next(iter(every)).why,
        fix=", or ".join(dict.fromkeys(one.fix for one in every)),
    )


def refuse_one_device(devices: Sequence[Device]) -> None:
    """Raise an InputError where there are no two."""
    if len(devices) < 2:
        raise InputError(
            "there is no plan of several stages: one device alone has one stage", fix=ONE_STAGE
        )


def refuse_one_unit(units: int) -> None:
    """Raise an InputError where a model has no two."""
    if units < 2:
        raise InputError(
            "there is no plan of several stages: a model of one unit has one stage", fix=ONE_STAGE
        )


def refuse_one_stage(profile: Profile, devices: Sequence[Device]) -> None:
    """Raise an InputError where there can be no plan of several stages."""
    refuse_one_device(devices)
    refuse_one_unit(len(set(profile.model.calls)))
    what, fix = "", ONE_STAGE
    if not profile.model.cuts:
        what = "wherever this model is cut, units before the cut are called again behind it"
    elif profile.model.no_stages:
        what = profile.model.no_stages
    elif not profile.model.needs:
        what = "the profile does not say what the model's units need of each other"
        fix += ", or profile again: `gpumix profile JOB.yaml --fresh`"
    if what:
        raise InputError(f"there is no plan of several stages: {what}", fix=fix)


def refuse_without(space: Space, needed: Mapping[str, object] = NEEDED) -> None:
    """Raise an InputError where a space leaves out what plans of several stages need.

    Args:
        needed: by field of the space, the value that it must have.
    """
    for name, value in needed.items():
        allowed = getattr(space, name)
        if value not in allowed:
            raise InputError(
                f"there is no plan of several stages with {name} "
                f"{' or '.join(map(str, allowed))}: it needs {value}",
                where=f"techniques.{name}",
                fix=f"allow `techniques: {{{name}: [{value}, ...]}}`, or {ONE_STAGE}",
            )
