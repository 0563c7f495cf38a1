"""What to do next: each rule, by made-up runs."""

from __future__ import annotations

from typing import Any

import pytest

from gpumix.schema.plan.explanation import ClassWorth, MixingComparison
from gpumix.schema.plan.plan import Plan
from gpumix.train.run_figures.advice import NOTHING, Advice, AdvisedRun, advise, is_nothing
from gpumix.train.run_figures.figures import RunFigures, compute_planned_busy
from gpumix.train.run_figures.history import read_history
from helpers.runs.folders import event_line, planned, read, run_of, step_line

PLANNED_S = planned().prediction.step_s  # type: ignore[union-attr]
BUSY = compute_planned_busy(planned())
QUICK, TARDY = dict.fromkeys(worker.device_class for worker in planned().workers)


def shares(**told: float) -> dict[str, float]:
    rest = dict.fromkeys(("input", "communication", "copies", "other"), 0.0) | told
    return {"compute": 1.0 - sum(rest.values())} | rest


def classes(of_quick: dict[str, Any], of_tardy: dict[str, Any]) -> str:
    told = []
    for name, own in ((QUICK, of_quick), (TARDY, of_tardy)):
        spent = own.pop("shares", shares(communication=1 - BUSY[name]))
        told.append(
            {"device_class": name, "samples": 4, "shares": spent, "busy_share": spent["compute"]}
            | own
        )
    return event_line("classes", 9, classes=told)


def run(
    *lines: str, slower: float = 0.0, steps: int = 9, plan: Plan | None = None, **told: Any
) -> AdvisedRun:
    """A run of some steps, slower than planned by a part."""
    done = [step_line(n, step_s=(1 + slower) * PLANNED_S) for n in range(1, steps + 1)]
    figures = RunFigures(read_history([*done, *lines]), plan or without_reasons(), 20)
    return AdvisedRun(figures, job="job.yaml", **told)


def without_reasons() -> Plan:
    return planned().model_copy(update={"reasons": None})


def with_reasons(**told: Any) -> Plan:
    reasons = planned().reasons
    assert reasons is not None
    return planned().model_copy(update={"reasons": reasons.model_copy(update=told)})


def only(found: AdvisedRun) -> Advice:
    (one,) = advise(found)
    return one


def test_a_run_as_planned_needs_nothing():
    found = advise(run(classes({}, {})))
    assert is_nothing(found)
    assert (found[0].what, found[0].command) == (NOTHING, "")
    assert "as planned" in found[0].why


def test_a_few_steps_say_nothing():
    found = only(run(slower=3.0, steps=2))
    assert (found.what, found.why) == (NOTHING, "too few steps are done to judge the speed")


# -- states ----------------------------------------------------------------------------------------


def test_a_plan_is_to_be_trained():
    found = only(run(steps=0, state="planned", plan_file="plan.json"))
    assert found.what == "Start the run"
    assert found.command == "gpumix train job.yaml --plan plan.json"


@pytest.mark.parametrize(("resumable", "option"), [(True, " --resume"), (False, "")])
def test_a_run_that_was_stopped_goes_on(resumable, option):
    found = only(run(state="interrupted", why="stopped after step 9", resumable=resumable))
    assert found.what.startswith("Continue the run")
    assert (found.why, found.command) == ("stopped after step 9", f"gpumix train job.yaml{option}")


def test_an_error_comes_first_and_is_urgent():
    first, *_ = advise(run(slower=2.0, state="failed", why="the disk is full", resumable=True))
    assert (first.urgent, first.why) == (True, "the disk is full")
    assert first.command == "gpumix train job.yaml --resume"


def test_of_a_script_no_command_is_known():
    found = run(state="interrupted")
    assert only(AdvisedRun(found.figures, state="interrupted")).command == ""


# -- wrong results and memory ----------------------------------------------------------------------


def test_a_gpu_that_computes_wrong_results_is_not_to_be_used():
    sure = event_line("replay", 7, devices=["quick-0"], sure=True, deviation=0.5)
    found = only(run(sure))
    assert found.urgent and found.what == "Stop using quick-0: it computes wrong results"
    assert found.why == "its gradient of the same sample was off by 50% at step 7"
    unsure = event_line("replay", 7, devices=["quick-0", "tardy-0"], sure=False)
    assert is_nothing(advise(run(unsure)))


def test_restarts_for_want_of_memory():
    decided = "planning again, with 92% of the memory of class 'quick'"
    told = {"resumed_from": 3, "why": "out of memory", "decided": decided, "seconds": 3.0}
    restarts = [event_line("restart", step, **told) for step in (4, 5)]
    found = only(run(*restarts))
    assert found.what == "Leave more GPU memory free"
    assert found.why == f"a GPU ran out of memory 2 times: {decided}"
    assert found.command == "gpumix profile job.yaml --fresh"
    lost = event_line("restart", 4, **(told | {"why": "rank 1 died"}))
    assert is_nothing(advise(run(lost)))


def test_an_allocator_short_of_memory():
    found = only(run(classes({"retries": 3}, {})))
    assert QUICK in found.what and "`memory`" in found.what
    assert "3 times" in found.why


# -- which GPUs ------------------------------------------------------------------------------------


def test_mixing_that_does_not_pay_drops_the_other_gpus():
    mixing = MixingComparison(pays=False, best_class=QUICK, speedup=0.75)
    found = only(run(plan=with_reasons(mixing=mixing, worth=())))
    assert found.what == f"Drop {TARDY}"
    assert found.why.startswith(f"with {QUICK} alone a step takes ")
    assert found.command == "gpumix train job.yaml --strategy best-subset"


def test_measured_steps_may_show_that_mixing_pays():
    """Faster than the best GPU type alone is planned to be."""
    mixing = MixingComparison(pays=False, best_class=QUICK, speedup=0.97)
    slow, fast = (
        run(slower=part, plan=with_reasons(mixing=mixing, worth=())) for part in (0, -0.05)
    )
    assert only(slow).what == f"Drop {TARDY}"
    assert is_nothing(advise(fast))


def test_another_strategy_is_replaced_before_gpus_are_dropped():
    mixing = MixingComparison(pays=False, best_class=QUICK, speedup=0.75)
    plan = with_reasons(mixing=mixing, worth=()).model_copy(update={"strategy": "even"})
    found = only(run(plan=plan))
    assert found.what == "Use the strategy `optimal`, not `even`"
    assert found.command == "gpumix train job.yaml --strategy optimal"


def test_gpus_that_the_plan_leaves_out_are_free():
    mixing = MixingComparison(pays=True, best_class=QUICK, speedup=1.2, left_out=("old",))
    found = only(run(plan=with_reasons(mixing=mixing, worth=())))
    assert found.what == "Use old for something else"


@pytest.mark.parametrize(
    ("gain", "said"), [(-0.02, "2.0% slower"), (0.004, "only 0.4% faster"), (0.3, ""), (None, "")]
)
def test_a_gpu_type_of_little_use_is_dropped(gain, said):
    worth = (ClassWorth(device_class=TARDY, whole=gain, one_more=0.0),)
    found = only(run(plan=with_reasons(mixing=None, worth=worth)))
    assert (found.what == f"Drop {TARDY}") == bool(said)
    assert said in found.why


@pytest.mark.parametrize(("part", "better"), [(0.8, True), (0.995, False), (1.5, False)])
def test_a_strategy_measured_to_be_faster_is_to_be_used(part, better):
    found = only(run(event_line("compared", 9, strategy="even", step_s=part * PLANNED_S)))
    assert (found.command == "gpumix train job.yaml --strategy even") == better


# -- slow steps ------------------------------------------------------------------------------------


def test_steps_as_slow_as_planned_within_a_tenth_are_fine():
    assert is_nothing(advise(run(slower=0.09)))
    assert only(run(slower=-0.09)).what == NOTHING


def test_faster_steps_ask_for_another_profile():
    found = only(run(slower=-0.3))
    assert (found.what, found.command) == ("Profile again", "gpumix profile job.yaml --fresh")
    assert "30% faster than planned" in found.why
    assert is_nothing(advise(run(event_line("plan", 4, live=True), slower=-0.3)))  # rebalanced


def test_a_busy_machine_is_blamed_first():
    late = classes({"overruns": 7000}, {"overruns": 913})
    found = only(run(late, slower=0.77))
    assert found.what == "Close other programs, then profile again"
    assert found.why.startswith("steps are 77% slower than planned (")
    assert found.why.endswith("was too busy to emulate the GPUs at full speed")
    assert is_nothing(advise(run(late, slower=0.05)))  # it did no harm


def test_slow_clocks_are_blamed():
    clocks = event_line("clocks", 5, device="quick-0", sm_mhz=900.0, measured_sm_mhz=1700.0)
    found = only(run(clocks, slower=0.5))
    assert "quick-0 runs at 900 MHz" in found.why and found.command.startswith("nvidia-smi")
    faster = event_line("clocks", 5, device="quick-0", sm_mhz=1800.0, measured_sm_mhz=1700.0)
    assert "MHz" not in only(run(faster, slower=0.5)).why


def test_data_is_blamed_where_it_takes_most_of_the_excess():
    waiting = classes({"shares": shares(input=0.3)}, {"shares": shares(input=0.1)})
    found = only(run(waiting, slower=0.5))
    assert (found.what, found.command) == ("Read the data faster", "gpumix doctor job.yaml")
    assert f"because {QUICK} waits for data in 30% of each step" in found.why


def test_waits_beyond_the_planned_ones_are_blamed():
    longer = shares(communication=1 - BUSY[QUICK] + 0.3)
    found = only(run(classes({"shares": longer}, {}), slower=0.5))
    assert found.command == "gpumix doctor job.yaml"
    assert (
        f"{QUICK} waits for other GPUs in {longer['communication']:.0%} of each step" in found.why
    )
    assert f"planned were {1 - BUSY[QUICK]:.0%}" in found.why


def test_slow_computing_is_blamed():
    own = shares(communication=0.5 * (1 - BUSY[TARDY]))
    found = only(run(classes({"shares": shares()}, {"shares": own}), slower=1.5))
    assert "another program" in found.what
    assert "steps take 2.5× the planned time" in found.why
    assert found.command == "gpumix profile job.yaml --fresh"


def test_slowness_without_a_cause_is_for_the_doctor():
    found = only(run(slower=0.5))
    assert found.what == "Find out why steps are slow"
    assert found.command == "gpumix doctor job.yaml"


# -- waits -----------------------------------------------------------------------------------------


def test_long_waits_are_for_the_doctor_also_if_planned():
    own = {"shares": shares(communication=0.36)}, {"shares": shares(communication=0.39)}
    found = only(run(classes(*own)))
    assert found.what == "Find out what the GPUs wait for"
    assert "every GPU waits for other GPUs in 36% to 39% of each step" in found.why
    assert found.command == "gpumix doctor job.yaml"


def test_a_gpu_that_only_stores_may_wait():
    idle = {"samples": 0, "shares": shares(communication=0.99)}
    assert is_nothing(advise(run(classes({"shares": shares()}, idle))))


def test_short_waits_for_data_are_told_too():
    found = only(run(classes({"shares": shares(input=0.05)}, {"shares": shares()})))
    assert found.what == "Read the data faster"
    assert "5.0% of each step" in found.why


# -- where it is shown -----------------------------------------------------------------------------


def test_advice_is_the_first_box_of_the_page(tmp_path):
    lines = [step_line(n, step_s=2 * PLANNED_S) for n in range(1, 9)]
    found = run_of(tmp_path, lines, state="finished", step=8, steps=8)
    page = read(found)
    sections = [a["id"] for a in page.named("section")]
    assert sections[0] == "next"
    for one in found.advice:
        assert one.what in page.text and one.why in page.text and one.command in page.text
