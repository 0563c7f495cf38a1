"""Time and memory of any plan, against a walk through its step in plain loops."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.cost.predict import predict
from helpers.draws import examples
from helpers.plans.naive import peak_bytes, step_seconds, update_seconds, worker_seconds
from helpers.plans.random_plans import plans_of_all_kinds, profiles_of_all_kinds

about = partial(pytest.approx, rel=1e-9, abs=1e-15)
LAST_DIGITS = 8  # bytes: each of several amounts is rounded up, some from just above a whole one
MANY = examples(10)


@MANY
@given(profiles_of_all_kinds(), st.data())
def test_the_step_takes_what_a_walk_through_it_takes(profile, data):
    plan = data.draw(plans_of_all_kinds(profile))
    found = predict(profile, plan)
    for rank, worker in enumerate(found.workers):
        forward, backward = worker_seconds(profile, plan, rank)
        assert worker.forward_s == about(forward)
        assert worker.backward_s == about(backward)
        assert worker.optimizer_s == about(update_seconds(profile, plan, rank))
    assert found.step_s == about(step_seconds(profile, plan))


@MANY
@given(profiles_of_all_kinds(), st.data())
def test_the_peak_is_the_highest_moment_of_a_walk(profile, data):
    plan = data.draw(plans_of_all_kinds(profile))
    for rank, worker in enumerate(predict(profile, plan).workers):
        device, host = peak_bytes(profile, plan, rank)
        assert worker.peak_bytes == pytest.approx(device, abs=LAST_DIGITS)
        assert worker.host_bytes == pytest.approx(host, abs=LAST_DIGITS)
        if plan.workers[rank].samples == 0:
            causes = ("activations", "boundary gradients", "working set")
            assert [worker.memory_bytes[cause] for cause in causes] == [0, 0, 0]
