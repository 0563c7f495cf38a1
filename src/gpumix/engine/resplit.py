"""Whether a plan splits the samples anew and is another one in all else that an engine goes by."""

from __future__ import annotations

from typing import Any

from gpumix.spec.errors import InputError
from gpumix.spec.plan import Plan


def check_resplit(before: Plan, after: Plan) -> None:
    """Raise an InputError unless the plans, of one stage each, differ in nothing but samples."""
    if len(after.stages) == 1 and _but_samples(before) == _but_samples(after):
        return
    raise InputError(
        "a running engine takes only a plan of one stage that splits the samples anew",
        fix="save a checkpoint, and load it into an engine with that plan",
    )


def _but_samples(plan: Plan) -> list[Any]:
    unsplit = {"samples": 0, "micro_batch": 0}
    stages = [
        s.model_copy(update={"workers": tuple(w.model_copy(update=unsplit) for w in s.workers)})
        for s in plan.stages
    ]
    unsaid = {"stages": (), "prediction": None, "reasons": None}
    return [*stages, plan.model_copy(update=unsaid)]
