"""A plan says what it was weighed against."""

from __future__ import annotations

import io

import pytest
from profiles import GIB, Card, Network, block, curve, fleet, line, profile, steady
from rich.console import Console

from gpumix.planner.explain import plan
from gpumix.spec.errors import InputError, NoFeasiblePlanError
from gpumix.spec.plan import Plan
from gpumix.train.tables import plan_table, why


def two_classes(slow=3.0, **changes):
    cards = [Card("fast", 1, GIB, steady(1.0)), Card("slow", 1, GIB, steady(slow))]
    return profile(cards, **changes)


def test_the_alternatives_and_why_they_lost():
    best = plan(two_classes(), 8)
    found = {a.strategy: a for a in best.alternatives}
    assert set(found) == {"even", "only fast", "only slow"}
    assert found["even"].step_s == pytest.approx(2 * best.prediction.step_s)
    assert found["even"].why.startswith("2.00 times the step time: slow-0 (slow) computes 4")
    assert found["only fast"].step_s == pytest.approx(8 / 6 * best.prediction.step_s)


def test_an_even_plan_is_held_against_the_optimal_one():
    even = plan(two_classes(), 8, strategy="even")
    optimal = next(a for a in even.alternatives if a.strategy == "optimal")
    assert optimal.step_s == pytest.approx(even.prediction.step_s / 2)
    assert optimal.why.startswith("faster")


def test_mixing_that_does_not_pay_is_said():
    wire = Network(gather={"broadcast": curve(50.0)}, reduce={"all_to_all": curve(50.0)})
    best = plan(two_classes(network=wire), 8)
    alone = next(a for a in best.alternatives if a.strategy == "only fast")
    assert alone.step_s < best.prediction.step_s
    assert alone.why.startswith("faster than the chosen plan")


def test_an_alternative_that_does_not_fit_says_by_how_much():
    best = plan(fleet(4), 64)
    assert all(a.step_s is None for a in best.alternatives)
    assert all("short of" in a.why for a in best.alternatives)


def test_one_class_has_no_subsets():
    best = plan(profile([Card("c", 2, GIB, steady(1.0))]), 8)
    assert [a.strategy for a in best.alternatives] == ["even"]
    assert best.alternatives[0].why.startswith("as fast")


def test_a_plan_survives_its_file(tmp_path):
    best = plan(fleet(8), 100)
    best.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == best


def test_workers_stand_in_rank_order():
    setting = two_classes()
    devices = tuple(
        d.model_copy(update={"host": host}) for d, host in zip(setting.cluster.devices, "ba")
    )
    cluster = setting.cluster.model_copy(update={"devices": devices})
    best = plan(setting.model_copy(update={"cluster": cluster}), 8)
    assert [(w.host, w.device) for w in best.workers] == [("a", "slow-0"), ("b", "fast-0")]


def test_an_unknown_strategy_is_refused():
    with pytest.raises(InputError, match="no strategy 'magic'"):
        plan(two_classes(), 8, strategy="magic")


def test_no_plan_at_all_is_an_error():
    with pytest.raises(NoFeasiblePlanError):
        plan(fleet(4, memory_factor=0.2), 64)


# -- in words --------------------------------------------------------------------------------------


def test_whether_mixing_pays_is_said_first():
    first, second, *_ = why(plan(two_classes(), 8))
    assert first == "mixing pays: 1.33 times as fast as only fast, the best single class"
    assert second.endswith("what binds: compute of fast, slow")


def test_that_mixing_does_not_pay_comes_with_what_to_do():
    wire = Network(gather={"broadcast": curve(50.0)}, reduce={"all_to_all": curve(50.0)})
    first, second, *_ = why(plan(two_classes(network=wire), 8))
    assert first.startswith("mixing does not pay: only fast takes")
    assert "give the job a cluster of that class" in first
    assert "; the network (" in second


def test_memory_that_binds_is_named():
    cards = [Card("roomy", 1, GIB, steady(3.0)), Card("tight", 1, 60_000, steady(1.0))]
    made = plan(profile(cards, kinds=[block(kept=line(1_000))]), 32)
    assert "memory of tight" in why(made)[1]
    assert "roomy" in why(made)[1].split("memory of")[0]


def test_a_device_without_samples_is_idle():
    made = plan(two_classes(slow=100.0), 1)
    assert [w.samples for w in made.workers] == [1, 0]
    assert made.prediction.workers[1].busy_s == 0


def test_the_table_shows_every_class_with_its_part():
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(plan_table(plan(two_classes(), 8)))
    rows = console.export_text().splitlines()
    fast = next(row for row in rows if row.startswith("│ fast"))
    assert [cell.strip() for cell in fast.split("│")[1:-1]][:4] == ["fast", "1", "6", "6 x 1"]
    assert fast.rstrip("│ ").endswith("100%")
