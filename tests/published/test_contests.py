"""The benchmarks on published data: their cases, and what their figures mean."""

from __future__ import annotations

from collections import Counter

import pytest

import planner_accuracy as accuracy
import planner_cephalo as cephalo
import planner_estimate as estimate
import planner_sailor as sailor
from published.cephalo import Setting
from published.sailor_runs import runs


def test_cases_are_of_4_to_64_devices_as_often_each():
    found = list(cephalo.cases())
    sizes = Counter(case.devices for case in found)
    assert set(sizes) == {4, 8, 16, 32, 64}
    assert max(sizes.values()) - min(sizes.values()) <= 1
    assert {len(case.counts) for case in found} == {2, 3}
    assert len({(case.setting, case.counts) for case in found}) == len(found)


def test_the_smaller_half_of_the_cases_runs_their_programme_on_the_whole_batch():
    exact = Counter(case.devices for case in cephalo.cases() if case.exact)
    every = Counter(case.devices for case in cephalo.cases())
    assert all(exact[devices] == every[devices] for devices in (4, 8, 16))
    assert 0 < exact[64] <= exact[32] < every[32]


def test_no_strategy_beats_the_optimum_in_a_case():
    case = next(case for case in cephalo.cases(["gpt_2.7b"]) if case.devices == 8)
    found = cephalo.outcome(case)
    assert not found.lost and not found.refused
    assert set(found.answers) == {"optimal", *cephalo.RIVALS}
    assert found.search_ratio is not None


def test_a_case_is_lost_to_a_faster_strategy_and_to_one_that_fits():
    case = next(cephalo.cases())
    fast, slow, none = (cephalo.Answer(step_s, 1.0) for step_s in (1.0, 2.0, None))
    others = dict.fromkeys(cephalo.RIVALS, slow)
    assert not cephalo.Outcome(case, others | {"optimal": fast}, None).lost
    assert cephalo.Outcome(case, others | {"optimal": slow, "even": fast}, None).lost
    assert cephalo.Outcome(case, others | {"optimal": none}, None).lost


@pytest.mark.parametrize(("cards", "published_s", "bound_s"), [((32, 96), 5.88, 3.19)])
def test_the_contest_is_won_within_what_the_cards_compute(cards, published_s, bound_s):
    assert sailor.compute_bound_s(*cards) == pytest.approx(bound_s, abs=0.005)
    assert bound_s < sailor.contest(*cards).step_s < published_s


@pytest.mark.slow
@pytest.mark.parametrize(("cards", "wanted_s"), [((80, 240), 1.8)])
def test_the_contest_is_won_by_far_if_all_that_the_planner_knows_is_weighed(cards, wanted_s):
    assert sailor.compute_bound_s(*cards) < sailor.weighed(*cards).step_s < wanted_s


def test_no_run_holds_more_than_was_predicted():
    outcomes = [accuracy.Outcome.of(run) for run in runs()]
    found = accuracy.figures(outcomes)
    assert (found["runs"], found["runs_alike"]) == (3, 7)
    assert found["memory_underestimates"] == 0
    assert found["time_mape"] < 0.08
    assert found["time_mape"] < found["time_mape_own_order"] < 0.12
    in_one = [o for o in outcomes if o.mixed and len(o.run.parts) == 1]
    assert all(abs(o.time_error) < 0.05 for o in in_one)


def test_all_cards_off_alike_are_right_once_rescaled():
    twice = [estimate.Case(gpu, Setting("llama_3b", "fp16"), (2.0, 2.0)) for gpu in ("l4", "t4")]
    found = estimate.figures([*twice, estimate.Case("l4", Setting("gpt_2.7b", "fp16"), (0.5,))])
    assert found["time_mape_llama"] == pytest.approx(1.0)
    assert found["time_mape_others"] == pytest.approx(0.5)
    assert found["time_mape_rescaled"] == pytest.approx(0.0)
    assert found["worst_class"] == "t4_fp16"
