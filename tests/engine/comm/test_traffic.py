"""What a plan says beforehand of a step, its collectives and its peak, is what the engine does."""

from __future__ import annotations

import pytest

import gpumix
from gpumix.cost.predict import predict
from gpumix.cost.traffic import count_traffic
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Mode
from gpumix.schema.profile.profile import EndParameters, Profile
from helpers.extended import chosen
from helpers.training.counted_steps import (
    BESIDE_THE_MODEL_BYTES,
    VOCABULARY,
    WIDTH,
    counted,
    llama,
    profiled,
)
from helpers.training.reference import SEED, Share, plan_for

ENDS = {"before": ("model.embed_tokens.weight",), "after": ("lm_head.weight",)}

INLINE, KEEPING = Mode(order="sequential", recompute=False), Mode(recompute=False)
ONE_BY_ONE = Mode(order="sequential")
UNEVEN = [Share(3, 2, 1), Share(4, 1, 3), Share(0, 0, 2), Share(5, 3, 0)]
EVEN = [Share(4, 2, 1)] * 4
HOSTS = [Share(3, 2, (1, 3)[n % 2], host="ab"[n // 2]) for n in range(4)]
pytestmark = pytest.mark.extended
PLANS = {
    "stage 3": (UNEVEN, {}),
    "stage 3, two ranks, kept": ([Share(6, 2, 1, kept=7), Share(6, 2, 1, KEEPING)], {}),
    "stage 3, joined": (UNEVEN, {"stage": {"joined": 4}}),
    "stage 3, ends": (EVEN, {"stage": ENDS}),
    "stage 3, chunked cross-entropy": (UNEVEN, {"head": "chunked", "stage": ENDS}),
    "stage 3, state on hosts": (UNEVEN, {"on_host": (0, 2)}),
    "stage 1, state on hosts": (UNEVEN, {"on_host": (0, 1, 2, 3), "zero_stage": 1}),
    "parameters on the host": (UNEVEN, {"parameters_on": "host", "stage": ENDS}),
    "parameters on the host, two waves": (UNEVEN, {"parameters_on": "host", "waves": 2}),
    "parameters on hosts alike": (HOSTS, {"parameters_on": "host", "sharding": "host"}),
    "stage 2, joined, ends": (UNEVEN, {"zero_stage": 2, "stage": {"joined": 2, **ENDS}}),
    "stage 3, three waves": (UNEVEN, {"waves": 3}),
    "stage 3, two waves, ends, joined": (
        UNEVEN, {"waves": 2, "stage": {"joined": 2, **ENDS}}
    ),
    "stage 2, two waves": (UNEVEN, {"zero_stage": 2, "waves": 2}),
    "hosts alike, two waves": (HOSTS, {"sharding": "host", "waves": 2}),
    "stage 1": (
        [Share(4, 2, 1, ONE_BY_ONE), Share(3, 1, 2, INLINE), Share(4, 2, 3), Share(3, 1, 0)],
        {"zero_stage": 1},
    ),
    "stage 1, kept one by one": ([Share(5, 2, 1, ONE_BY_ONE, kept=8)] * 2, {"zero_stage": 1}),
    "stage 0": ([Share(4, 2, 1, INLINE), Share(3, 3, 2, ONE_BY_ONE)], {"zero_stage": 0}),
    "hosts alike": (HOSTS, {"sharding": "host"}),
    "hosts unlike": ([*HOSTS[:2], Share(3, 2, 1, host="b"), Share(1, 1, 1, host="b")],
                     {"sharding": "host", "zero_stage": 2}),
}  # fmt: skip


@pytest.fixture(scope="module")
def profile() -> Profile:
    profile = profiled()
    sizes = {"trainable": VOCABULARY * WIDTH}
    ends = {end: EndParameters(names=names, **sizes) for end, names in ENDS.items()}
    root = profile.model.root.model_copy(update=ends)
    return profile.model_copy(update={"model": profile.model.model_copy(update={"root": root})})


@pytest.fixture(scope="module")
def plans(request) -> dict[str, Plan]:
    model = gpumix.build(llama, SEED)
    return {
        name: plan_for(model, shares, **more)
        for name, (shares, more) in chosen(request, PLANS).items()
    }


@pytest.fixture(scope="module")
def done(plans):
    return counted(plans)


@pytest.mark.parametrize("case", PLANS)
def test_collectives_and_bytes_are_those_that_were_counted(profile, plans, done, case):
    expected = count_traffic(profile, plans[case])
    for rank, (counts, sizes, _) in zip(expected, done[case], strict=True):
        assert counts == dict(rank.counts)
        assert sizes == dict(rank.bytes)


@pytest.mark.parametrize("case", PLANS)
def test_the_peak_is_that_which_was_predicted(profile, plans, done, case):
    predicted = predict(profile, plans[case]).workers
    above = 1.01 if case == "stage 3, chunked cross-entropy" else 1.005
    for worker, (_, _, peak) in zip(predicted, done[case], strict=True):
        assert peak - BESIDE_THE_MODEL_BYTES <= worker.peak_bytes <= above * peak
