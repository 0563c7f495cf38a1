"""A plan says what it was weighed against."""

from __future__ import annotations

import io
import json
import re
from functools import cache

import pytest
from rich.console import Console, RenderableType

from gpumix.planner.plan import compare_step_times, plan
from gpumix.schema.cluster.kernels import SettingChoice
from gpumix.schema.cluster.network import Network as Links
from gpumix.schema.errors import InputError, NoFeasiblePlanError
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Mode
from gpumix.train.console.tables import describe_mixing, efficiency_table, explain_plan, plan_table
from helpers.errors import raises
from helpers.plans.profiles import GIB, Card, Network, block, curve, fleet, line, profile, steady


def two_classes(slow=3.0, **changes):
    cards = [Card("fast", 1, GIB, steady(1.0)), Card("slow", 1, GIB, steady(slow))]
    return profile(cards, **changes)


@cache
def of_two_classes() -> Plan:
    return plan(two_classes(), 8)


def test_the_alternatives_and_why_they_lost():
    best = of_two_classes()
    found = {a.strategy: a for a in best.reasons.alternatives}
    assert set(found) == {"even", "only fast", "only slow"}
    assert found["even"].step_s == pytest.approx(2 * best.prediction.step_s)
    assert found["even"].why.startswith("2.00 times the step time: slow-0 (slow) computes 4")
    assert found["only fast"].step_s == pytest.approx(8 / 6 * best.prediction.step_s)


def test_an_even_plan_is_held_against_the_optimal_one():
    even = plan(two_classes(), 8, strategy="even")
    optimal = next(a for a in even.reasons.alternatives if a.strategy == "optimal")
    assert optimal.step_s == pytest.approx(even.prediction.step_s / 2)
    assert optimal.why.startswith("faster")


def test_mixing_that_does_not_pay_is_said():
    wire = Network(gather={"broadcast": curve(50.0)}, reduce={"all_to_all": curve(50.0)})
    best = plan(two_classes(network=wire), 8)
    alone = next(a for a in best.reasons.alternatives if a.strategy == "only fast")
    assert alone.step_s < best.prediction.step_s
    assert alone.why.startswith("faster than the chosen plan")


@cache
def of_a_small_fleet() -> Plan:
    """Of cards of which no kind alone holds the batch in one wave."""
    return plan(fleet(4), 64, space=Space(waves=False))


def test_an_alternative_that_does_not_fit_says_by_how_much():
    even, *others = of_a_small_fleet().reasons.alternatives
    alone = [other for other in others if other.strategy.startswith("only ")]
    assert alone and all(a.step_s is None for a in alone)
    assert all("short of" in a.why for a in alone)
    assert even.strategy == "even" and even.why.startswith("in 2 passes of 32 samples: ")


def test_one_class_has_no_subsets():
    best = plan(profile([Card("c", 2, GIB, steady(1.0))]), 8)
    assert [a.strategy for a in best.reasons.alternatives] == ["even"]
    assert best.reasons.alternatives[0].why.startswith("as fast")


def test_a_plan_survives_its_file(tmp_path):
    best = of_a_small_fleet()
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
    with raises(InputError, code="strategy-unknown", what="magic"):
        plan(two_classes(), 8, strategy="magic")


def test_no_plan_at_all_is_an_error():
    with pytest.raises(NoFeasiblePlanError):
        plan(fleet(4, memory_factor=0.2), 64)


# -- whether mixing pays ---------------------------------------------------------------------------


def test_mixing_is_held_against_the_best_class():
    found = of_two_classes().reasons.mixing
    assert (found.pays, found.best_class, found.left_out) == (True, "fast", ())
    assert found.speedup == pytest.approx(8 / 6)


def test_one_class_is_not_mixed():
    best = plan(profile([Card("c", 2, GIB, steady(1.0))]), 8)
    assert best.reasons.mixing is None
    assert explain_plan(best)[0].startswith("predicted")


def test_classes_that_cost_more_than_they_give_are_named():
    best = plan(on_two_hosts("100 B/s"), 8)
    found = best.reasons.mixing
    assert (found.pays, found.best_class, found.left_out) == (False, "fast", ("slow",))
    assert explain_plan(best)[0] == (
        "mixing does not pay: only fast trains, slow would cost more time than they save"
    )


def test_mixing_where_nobody_can_do_alone():
    found = of_a_small_fleet().reasons.mixing
    assert found.pays
    assert found.best_class is None
    assert found.speedup is None


# -- bottlenecks ---------------------------------------------------------------------------------


def on_two_hosts(link: str, slow: float = 3.0):
    """A fast and a slow card, each on a host of its own."""
    setting = two_classes(slow=slow)
    devices = tuple(
        d.model_copy(update={"host": host}) for d, host in zip(setting.cluster.devices, "ab")
    )
    network = Links(inside="900 GB/s", between=link)
    cluster = setting.cluster.model_copy(update={"devices": devices, "network": network})
    return setting.model_copy(update={"cluster": cluster, "network": ()})


def test_the_slow_link_is_named_as_it_was_stated():
    # Too slow to hide, not so slow that the slow card is left out.
    speeds = ("1 kB/s", "3 kB/s")
    mixed = [plan(on_two_hosts(speed, slow=1.0), 8) for speed in speeds]
    waiting = [p for p in mixed if len(p.workers) == 2 and p.reasons.binds.waiting > 0.03]
    assert waiting
    for made in waiting:
        assert made.reasons.binds.link.startswith("between hosts (")


def test_measured_links_are_told_apart_by_place_only():
    wire = Network(gather={"broadcast": curve(50.0)}, reduce={"all_to_all": curve(50.0)})
    best = plan(two_classes(network=wire), 8)
    assert best.reasons.binds.link == "inside hosts, as measured"
    assert best.reasons.binds.waiting > 0.5


def test_memory_that_binds_is_named():
    cards = [Card("roomy", 1, GIB, steady(3.0)), Card("tight", 1, 60_000, steady(1.0))]
    made = plan(profile(cards, kinds=[block(kept=line(1_000))]), 32)
    assert made.reasons.binds.memory == ("tight",)
    assert "roomy" in made.reasons.binds.compute


# -- what classes are worth ------------------------------------------------------------------------


def test_worth_is_what_planning_without_and_with_more_says():
    cards = [Card("fast", 2, GIB, steady(1.0)), Card("slow", 2, GIB, steady(3.0))]
    found = {w.device_class: w for w in plan(profile(cards), 24).reasons.worth}
    step = plan(profile(cards), 24).prediction.step_s
    for name, others, more in (
        ("fast", [Card("slow", 2, GIB, steady(3.0))], (3, 2)),
        ("slow", [Card("fast", 2, GIB, steady(1.0))], (2, 3)),
    ):
        without = plan(profile(others), 24).prediction.step_s
        counts = [Card(c.name, n, GIB, c.times) for c, n in zip(cards, more)]
        with_more = plan(profile(counts), 24).prediction.step_s
        assert found[name].whole == pytest.approx(without / step - 1)
        assert found[name].one_more == pytest.approx(step / with_more - 1)


def test_a_class_that_nothing_fits_without_is_needed():
    cards = [Card(name, 1, 600_000, steady(1.0)) for name in "ab"]
    made = plan(profile(cards, kinds=[block(trainable=10_000)]), 2)
    assert made.reasons.mixing.best_class is None
    assert [w.whole for w in made.reasons.worth] == [None, None]
    assert "needed" in shown(made)


def test_one_device_of_many_is_worth_little():
    found = plan(fleet(256), 4096).reasons.worth
    assert all(0 <= w.one_more < 0.02 for w in found)
    assert any(w.one_more > 0 for w in found)


# -- in words --------------------------------------------------------------------------------------


def shown(made: Plan) -> str:
    return shown_of(plan_table(made))


def shown_of(table: RenderableType) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def test_a_class_whose_worth_is_not_told_is_in_the_table():
    made = of_two_classes()
    told = made.reasons.model_copy(update={"worth": made.reasons.worth[:1]})
    assert "slow" in shown(made.model_copy(update={"reasons": told}))


def test_whether_mixing_pays_is_said_first():
    made = of_two_classes()
    first, second, third, *_ = explain_plan(made)
    assert first == "mixing pays: 1.33 times as fast as fast alone, the best GPU type"
    assert second.endswith("; no plan of those searched takes less")
    assert third == "bottleneck: compute of fast, slow"
    assert shown(made).startswith("mixing pays")


def test_a_small_gain_of_mixing_is_not_rounded_to_none():
    made = of_two_classes().reasons.mixing.model_copy(update={"speedup": 1.004})
    assert (
        describe_mixing(made)
        == "mixing hardly pays: 0.4% faster than fast alone, the best GPU type"
    )


def test_that_mixing_does_not_pay_comes_with_what_to_do():
    wire = Network(gather={"broadcast": curve(50.0)}, reduce={"all_to_all": curve(50.0)})
    lines = explain_plan(plan(two_classes(network=wire), 8))
    assert lines[0].startswith("mixing does not pay: with fast alone a step takes")
    assert "use a cluster of that type alone" in lines[0]
    assert "; links inside hosts, as measured (" in lines[2]


def test_a_device_without_samples_is_idle():
    made = plan(two_classes(slow=100.0), 1)
    assert [w.samples for w in made.workers] == [1, 0]
    assert made.prediction.workers[1].busy_s == 0


def test_the_table_shows_every_class_with_its_part():
    rows = shown(of_two_classes()).splitlines()
    fast = next(row for row in rows if row.startswith("fast"))
    cells = re.split(r"\s{2,}", fast.strip())
    assert cells[:4] == ["fast", "1", "6", "6 x 1"]
    assert cells[6] == "100%"
    assert cells[7].startswith("+")


def test_json_has_all_of_it():
    data = json.loads(of_two_classes().model_dump_json())
    assert set(data["reasons"]) == {
        "mixing",
        "hosts_left_out",
        "devices_left_out",
        "in_no_tp_group",
        "binds",
        "worth",
        "alternatives",
        "dtypes",
    }
    assert data["prediction"]["bound_s"] == pytest.approx(data["prediction"]["step_s"])


@pytest.mark.parametrize(
    ("step_s", "said"),
    [
        (0.5, "faster than the chosen plan: its step takes 50% of the time"),
        (1.0, "as fast as the chosen plan"),
        (1.0001, "less than 0.1% slower"),
        (1.05, "5.0% slower"),
        (2.0, "2.00 times the step time"),
    ],
)
def test_how_steps_compare_in_words(step_s, said):
    assert compare_step_times(step_s, 1.0) == said


def test_what_is_kept_and_where_stands_in_the_table():
    made = of_two_classes()
    ways = [{"kept_graphs": 1}, {"state_on": "host", "mode": Mode(head="chunked")}]
    workers = [w.model_copy(update=way) for w, way in zip(made.workers, ways)]
    stage = made.stages[0].model_copy(update={"workers": tuple(workers)})
    text = shown(made.model_copy(update={"stages": (stage,), "reasons": None}))
    for cell in ("recompute, 1 of", "graphs kept", "chunked", "cross-entropy"):
        assert cell in text
    assert "whole on" in text and "the host" in text


def test_tables_have_room_in_a_terminal_of_a_hundred_columns():
    """Also where there is no width to fit into: in a pipe."""
    made = of_two_classes()
    wide = made.model_copy(update={"reasons": None})
    ways = [{"kept_graphs": 1}, {"state_on": "host", "mode": Mode(head="chunked")}]
    workers = [w.model_copy(update=way) for w, way in zip(made.workers, ways)]
    stage = made.stages[0].model_copy(update={"workers": tuple(workers)})
    wide = wide.model_copy(update={"stages": (stage,)})
    rows = [line.rstrip() for line in shown(wide).splitlines()]
    rows = [row for row in rows if not row.startswith(("predicted: ", "ZeRO stage"))]
    assert len(rows) > 4 and max(map(len, rows)) <= 100


def test_classes_that_compute_alike_are_told_once():
    found = two_classes()
    choices = (SettingChoice(what="tf32", value="off", why="because"),)
    told = [c.model_copy(update={"choices": choices}) for c in found.classes]
    alike = found.model_copy(update={"classes": tuple(told)})
    assert shown_of(efficiency_table(alike)).count("because") == 1
    other = told[1].model_copy(update={"choices": (choices[0].model_copy(update={"value": "on"}),)})
    unlike = found.model_copy(update={"classes": (told[0], other)})
    assert shown_of(efficiency_table(unlike)).count("because") == 2
