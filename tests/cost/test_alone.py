"""What devices reach alone, against hand-made curves and the planner's own plan for one device."""

from __future__ import annotations

import pytest

from gpumix.cost.device_alone import compute_ideal_samples_per_s, compute_ideal_tokens_per_s
from gpumix.planner.plan import plan
from gpumix.schema.profile.profile import ROOT, Profile, UnitTimes
from helpers.plans.profiles import GIB, Card, block, curve, line, profile, root, steady

SIZES = (1, 2, 4)


def measured(*, largest: int | None = None) -> Profile:
    """Of two calls: a micro-batch of two is the fastest, and a kept graph is faster still."""
    times = UnitTimes(
        forward=curve(1.0, 1.4, 4.0, sizes=SIZES),
        backward=curve(3.0, 4.4, 12.0, sizes=SIZES),
        gradient=curve(2.0, 3.0, 8.0, sizes=SIZES),
    )
    of_root = UnitTimes(forward=curve(0.1, 0.2, 0.4, sizes=SIZES), backward=line(0.0))
    cards = [
        Card("curved", 1, GIB, {"block": times, ROOT: of_root}, largest=largest),
        Card("straight", 2, GIB, steady(0.5)),
    ]
    return profile(cards, kinds=[block(saved=line(1.0))], root_unit=root(), calls=["block"] * 2)


def test_the_fastest_micro_batch_and_mode_count():
    # Two calls, forward and backward of a kept graph, and the root, for two samples.
    assert compute_ideal_samples_per_s(measured(), "curved") == pytest.approx(
        2 / (2 * (1.4 + 3.0) + 0.2)
    )


def test_micro_batches_that_did_not_fit_do_not_count():
    found = compute_ideal_samples_per_s(measured(largest=1), "curved")
    assert found == pytest.approx(1 / (2 * (1.0 + 2.0) + 0.1))


def test_a_graph_that_was_not_measured_is_not_kept():
    assert compute_ideal_samples_per_s(measured(), "straight") == pytest.approx(
        1 / (2 * (0.5 + 1.5))
    )


def test_devices_add_up():
    found = measured()
    alone = {name: compute_ideal_samples_per_s(found, name) for name in ("curved", "straight")}
    both = compute_ideal_tokens_per_s(found, ["straight", "curved", "straight"])
    samples = alone["curved"] + 2 * alone["straight"]
    assert both == pytest.approx(samples * found.sequence_length)


@pytest.mark.parametrize("name", ["curved", "straight"])
def test_a_device_that_lacks_no_memory_reaches_it_by_its_plan(name):
    """Nothing is sent, and updates take no time here."""
    found = measured()
    device = found.cluster.members(name)[0].id
    only = found.model_copy(update={"cluster": found.cluster.only({device})})
    prediction = plan(only, 32).prediction
    assert prediction is not None
    assert prediction.tokens_per_s == pytest.approx(compute_ideal_tokens_per_s(only, [name]))
