"""When there can be no plan of several stages, whatever fits: said before anything is searched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpumix.spec.cluster import Device
from gpumix.spec.errors import InputError
from gpumix.spec.profile import Profile
from gpumix.spec.space import Space

ONE_STAGE = "allow one stage: `strategy: optimal` without `least_stages`"

NEEDED = {"boundaries": "device", "orders": "layered", "state_on": "device", "shardings": "all"}
"""By field of a space, the value that all plans of several stages have."""


def refuse_one_stage(profile: Profile, devices: Sequence[Device]) -> None:
    """Raise an InputError where there can be no plan of several stages."""
    what, fix = "", ONE_STAGE
    if len(devices) < 2:
        what = "one device alone has one stage"
    elif len(set(profile.model.calls)) < 2:
        what = "a model of one unit has one stage"
    elif not profile.model.cuts:
        what = "wherever this model is cut, units before the cut are called again behind it"
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
