"""Plans of a few settings as they were: a change of one must be on purpose."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpumix.planner.plan import plan
from gpumix.schema.errors import NoFeasiblePlanError
from gpumix.schema.plan.plan import Collectives
from gpumix.schema.profile.profile import Profile
from helpers.plans.profiles import (
    GIB,
    MIB,
    Card,
    Network,
    block,
    curve,
    fleet,
    line,
    profile,
    root,
    steady,
)


def two_cards() -> Profile:
    return profile([Card("fast", 1, GIB, steady(1e-3)), Card("slow", 1, GIB, steady(3e-3))])


def fast_but_small() -> Profile:
    """The fast cards have too little memory for a third of the state, and compute most."""
    cards = [
        Card("fast", 2, 12 * MIB, steady(1e-3, start=1e-4), framework=MIB),
        Card("roomy", 1, 60 * MIB, steady(4e-3), framework=MIB),
    ]
    kinds = [block(trainable=300_000, kept=line(2e5), gradient=line(2e5), backward=line(6e5))]
    return profile(cards, kinds=kinds, root_unit=root(40_000, kept=line(1e5), head=line(2e5)))


def slow_network() -> Profile:
    forms = {
        "native": curve(2e-3, 5e-2, sizes=(1e5, 1e7)),
        "list": curve(3e-3, 9e-2, sizes=(1e5, 1e7)),
    }
    network = Network(forms, forms, Collectives(gather="list", reduce="list"))
    cards = [
        Card("new", 1, GIB, steady(1e-3), optimizer_s_per_element=1e-9),
        Card("old", 3, GIB, steady(2e-3, start=1e-3), optimizer_s_per_element=4e-9),
    ]
    return profile(cards, kinds=[block(trainable=500_000)], network=network, overhead=1e-3)


SETTINGS: dict[str, tuple[Callable[[], Profile], int]] = {
    "two-cards": (two_cards, 32),
    "fast-but-small": (fast_but_small, 24),
    "slow-network": (slow_network, 20),
    "fleet-of-64": (fleet, 512),
}


def summary(setting: Profile, batch: int, strategy: str) -> object:
    try:
        made = plan(setting, batch, strategy=strategy)
    except NoFeasiblePlanError as error:
        return str(error)
    assert made.prediction is not None
    return {
        "collectives": made.collectives.model_dump(mode="json"),
        "step_s": made.prediction.step_s,
        "workers": [
            {
                "device": worker.device,
                "samples": worker.samples,
                "micro_batch": worker.micro_batch,
                "state_share": worker.state_share,
                "peak_bytes": float(expected.peak_bytes),
            }
            for worker, expected in zip(made.workers, made.prediction.workers)
        ],
        "reasons": made.reasons.model_dump(mode="json"),
    }


@pytest.mark.parametrize("strategy", ["even", "optimal"])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_plan_is_what_it_was(name, strategy, golden):
    make, batch = SETTINGS[name]
    golden(f"{name}.{strategy}", summary(make(), batch, strategy), rel=1e-9)
