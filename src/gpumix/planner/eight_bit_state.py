"""Plans with AdamW's state in 8 bits, where a job allows it and nothing fits in fp32. Pure.

It changes what is computed, so nobody gets it who has not allowed it.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from gpumix.planner.plan import plan
from gpumix.schema.errors import NoFeasiblePlanError
from gpumix.schema.job.search_space import EVERYTHING, Space
from gpumix.schema.plan.optimizer_state import ADAMW_8BIT_SLOWDOWN, ADAMW_BYTES, EIGHT_BIT_OPTIMIZER
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import ClassProfile, Profile


def plan_with_allowed(
    profile: Profile,
    global_batch_size: int,
    *,
    strategy: str = "optimal",
    space: Space = EVERYTHING,
    allow: Collection[str] = (),
    detailed: bool = True,
) -> Plan:
    """Return `plan`'s plan; with the optimizer's state in 8 bits if that is allowed, and no plan
    fits without.

    Raises:
        InputError, NoFeasiblePlanError: as `plan`, of the state in fp32.
    """
    make = partial(plan, strategy=strategy, space=space, detailed=detailed)
    try:
        return make(profile, global_batch_size)
    except NoFeasiblePlanError as error:
        is_adamw = profile.optimizer_bytes_per_element == ADAMW_BYTES
        if EIGHT_BIT_OPTIMIZER not in allow or not is_adamw:
            raise
        try:
            return make(quantise_state(profile), global_batch_size)
        except NoFeasiblePlanError:
            raise error from None


def match_profile(profile: Profile, made: Plan) -> Profile:
    """Return the profile with the optimizer's state as the plan has it."""
    is_narrower = made.optimizer_state == "8bit" and profile.optimizer_state != "8bit"
    return quantise_state(profile) if is_narrower else profile


def quantise_state(profile: Profile) -> Profile:
    """Return the profile of AdamW in fp32 for its state in 8 bits: smaller, slower to update, and
    not for tensor-parallel groups."""
    return profile.model_copy(
        update={
            "optimizer_state": "8bit",
            "optimizer_bytes_per_element": profile.model.quantised_adamw_bytes,
            "classes": tuple(map(_slow_down, profile.classes)),
            "tp_profiles": (),
        }
    )


def _slow_down(of_class: ClassProfile) -> ClassProfile:
    on_host = of_class.host_optimizer_s_per_element
    return of_class.model_copy(
        update={
            "optimizer_s_per_element": of_class.optimizer_s_per_element * ADAMW_8BIT_SLOWDOWN,
            "host_optimizer_s_per_element": on_host and on_host * ADAMW_8BIT_SLOWDOWN,
        }
    )
