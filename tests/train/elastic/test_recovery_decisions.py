"""After which failures a run starts again, and with what."""

from __future__ import annotations

import pytest

from gpumix.schema.cluster.cluster import Cluster, Device, DeviceClass
from gpumix.schema.errors import OutOfMemory, PlanOutdated, RankInterrupted, RankLost, TrainingError
from gpumix.schema.plan.plan import Plan, Prediction, WorkerPrediction
from gpumix.schema.plan.stage import Stage, Worker
from gpumix.train.elastic.recovery import LESS_MEMORY, Lessons, Recovery, Restart, complete_restart


def plan(peak: int = 0, framework: int = 0) -> Plan:
    """Of devices a and b; `peak` is what of 100 bytes is predicted, `framework` a part of it."""
    workers = tuple(
        Worker(device=name, device_class=f"class-{name}", samples=1, micro_batch=1, state_share=0.5)
        for name in "ab"
    )
    expected = tuple(
        WorkerPrediction(
            device=name,
            forward_s=1,
            backward_s=1,
            optimizer_s=1,
            busy_s=1,
            memory_bytes={"state": peak - framework, "framework": framework},
            memory_limit_bytes=100,
        )
        for name in "ab"
    )
    prediction = Prediction(step_s=1, tokens_per_s=1, exposed_communication_s=0, workers=expected)
    return Plan(
        strategy="by hand",
        model="m",
        sequence_length=8,
        global_batch=2,
        stages=(Stage(units=("unit",), workers=workers),),
        prediction=prediction if peak else None,
    )


def lost(device: str = "a") -> RankLost:
    return RankLost("its rank was lost", device=device, device_class=f"class-{device}")


def full(*, fragmented: bool = False, obtainable: float = 1.0) -> OutOfMemory:
    return OutOfMemory(
        "out of memory",
        device="a",
        device_class="class-a",
        fragmented=fragmented,
        obtainable=obtainable,
    )


def test_a_lost_rank_is_started_again():
    again = Recovery(3).after(lost(), 5, plan())
    assert not again.without
    assert not again.memory


def test_a_device_whose_rank_is_lost_twice_at_the_same_step_is_left_out():
    recovery = Recovery(3)
    recovery.after(lost("a"), 5, plan())
    assert not recovery.after(lost("b"), 5, plan()).without
    assert recovery.after(lost("a"), 5, plan()).without == {"a"}


def test_who_was_left_out_is_tried_once_more_when_the_run_starts_again_some_steps_later():
    recovery = Recovery(3)
    for _ in range(2):
        recovery.after(lost("a"), 5, plan())
    assert recovery.after(lost("b"), 5, plan()).without == {"a"}
    assert not recovery.after(lost("b"), 9, plan()).without
    again = recovery.after(lost("a"), 9, plan())
    assert again.without == {"a"}
    assert again.told == "device 'a' is left out: its rank was lost again"
    assert not recovery.after(outdated(b=2.0), 12, plan()).without


def test_a_step_between_forgives():
    recovery = Recovery(3)
    for step in range(20):
        assert not recovery.after(lost(), step, plan()).without


def test_the_only_device_is_not_left_out():
    recovery = Recovery(2)
    alone = plan().model_copy(update={"stages": ()})
    for _ in range(2):
        assert not recovery.after(lost(), 5, alone).without
    with pytest.raises(TrainingError) as caught:
        recovery.after(lost(), 5, alone)
    assert caught.value.what == "its rank was lost"
    assert caught.value.why == "that happened 3 times in a row"


def test_who_wants_no_restarts_gets_the_error_itself():
    error = lost()
    with pytest.raises(RankLost) as caught:
        Recovery(0).after(error, 5, plan())
    assert caught.value is error


def test_a_rank_that_was_asked_to_end_is_nobodys_fault():
    recovery = Recovery(3)
    for _ in range(3):
        assert not recovery.after(RankInterrupted("asked"), 5, plan()).without


def test_memory_that_was_not_enough_is_planned_with_less():
    recovery = Recovery(3)
    assert recovery.after(full(), 5, plan()).memory_by_class == {"class-a": LESS_MEMORY}


def test_so_much_less_that_the_plan_must_change():
    """By its own prediction it filled half of what there is: a little less changes nothing."""
    memory = Recovery(3).after(full(), 5, plan(peak=50)).memory_by_class
    assert memory["class-a"] < 0.5


def test_memory_that_another_process_holds_is_planned_without_at_once():
    memory = Recovery(3).after(full(obtainable=0.4), 5, plan(peak=95)).memory_by_class
    assert memory == {"class-a": 0.4}


def test_memory_of_the_framework_is_set_aside_once():
    """Here nobody else holds any, and plans leave room for the framework by themselves."""
    error, own = full(obtainable=0.8), plan(peak=95, framework=20)
    assert Recovery(3).after(error, 5, own).memory_by_class == {"class-a": LESS_MEMORY}
    error = full(obtainable=0.4)
    memory = Recovery(3).after(error, 5, own).memory_by_class
    assert memory == {"class-a": pytest.approx(0.6)}


def test_less_and_less_as_often_as_it_takes():
    recovery = Recovery(1)
    parts = [recovery.after(full(), 5, plan()).memory_by_class["class-a"] for _ in range(6)]
    assert parts == sorted(parts, reverse=True)
    assert parts[-1] < 0.65


def test_memory_in_pieces_is_tried_as_it_was_once():
    recovery = Recovery(3)
    assert not recovery.after(full(fragmented=True), 5, plan()).memory
    assert recovery.after(full(fragmented=True), 5, plan()).memory


def test_lessons_are_taken_up_by_other_processes():
    recovery = Recovery(3)
    recovery.after(full(), 5, plan(peak=50))
    restart = Restart("out of memory", 1.5, "planning again", 0.25)
    lessons = Lessons.from_text(recovery.lessons(restart).to_text())
    assert lessons.restart == restart
    taken_up = Recovery(3, lessons)
    assert taken_up.again.memory_by_class == recovery.again.memory_by_class
    # At the same step it was not the first time.
    assert taken_up.after(full(fragmented=True), 5, plan()).memory_by_class["class-a"] < 0.5


def test_who_was_left_out_is_known_to_those_who_take_the_run_up():
    recovery = Recovery(3)
    recovery.after(lost("a"), 5, plan())

    def told() -> Lessons:
        return Lessons.from_text(recovery.lessons(Restart("lost", 1.0)).to_text())

    recovery = Recovery(3, told())
    assert recovery.after(lost("a"), 5, plan()).without == {"a"}
    assert told().at(5).without == ("a",)
    assert Recovery(3, told().at(5)).again.without == {"a"}
    recovery = Recovery(3, told().at(9))  # tried once more
    assert not recovery.again.without
    assert recovery.after(lost("a"), 9, plan()).without == {"a"}


def cluster(hosts: dict[str, str]) -> Cluster:
    """By device."""
    one = DeviceClass(name="class", accelerator="cpu", memory_bytes=100)
    devices = [Device(id=name, device_class="class", host=host) for name, host in hosts.items()]
    return Cluster(classes=(one,), devices=tuple(devices))


def plan_on(hosts: dict[str, str]) -> Plan:
    """By device."""
    first = plan().workers[0]
    workers = tuple(
        first.model_copy(update={"device": name, "host": host, "state_share": 1 / len(hosts)})
        for name, host in hosts.items()
    )
    return plan().model_copy(update={"stages": (Stage(units=("unit",), workers=workers),)})


A, B, C = {"a-0": "a"}, {"b-0": "b", "b-1": "b"}, {"c-0": "c"}
JOINED, GONE = "2 devices joined: b-0 on host b, b-1 on host b", "no longer there: c-0 on host c"


@pytest.mark.parametrize(
    ("before", "now", "why", "decided"),
    [
        (A, A | B, JOINED, "trains on with 3 devices, by another plan"),
        (A | C, A, GONE, "trains on with 1 device, by another plan"),
        (A | C, A | B, f"{JOINED}; {GONE}", "trains on with 3 devices, by another plan"),
    ],
)
def test_who_takes_a_run_up_tells_of_devices_that_came_and_went(before, now, why, decided):
    """Beside what was learnt of a failure."""
    there, plans = cluster(now), (plan_on(before), plan_on(now))
    restart = complete_restart(Restart("", 1.0), *plans, there, there)
    assert (restart.why, restart.decided) == (why, decided)
    learnt = Restart("its rank was lost", 1.0, "starting again")
    restart = complete_restart(learnt, *plans, there, there)
    assert restart.why == f"its rank was lost; {why}"
    assert restart.decided == f"starting again; {decided}"


def test_who_takes_a_run_up_with_the_same_devices_tells_what_is_known_of_the_failure():
    there, same = cluster(A | B), plan_on(A | B)
    restart = complete_restart(Restart("", 1.0), same, same, there, there)
    assert restart.why == "a rank was lost, or failed: the same devices are there"
    assert restart.decided == "trains on with 3 devices, by the same plan"
    assert (
        complete_restart(Restart("no such token", 1.0), same, same, there, there).why
        == "no such token"
    )
    not_yet = complete_restart(Restart("", 1.0), None, same, there, there)
    assert not_yet.why == "it was ended before it trained"
    assert not_yet.decided == "trains with 3 devices, by its first plan"


def test_a_device_that_is_left_out_is_still_there():
    learnt = Restart("its rank was lost", 1.0, "device 'c-0' is left out")
    plans = plan_on(A | C), plan_on(A)
    assert complete_restart(learnt, *plans, cluster(A | C), cluster(A)) == learnt


def outdated(**slower: float) -> PlanOutdated:
    return PlanOutdated("device 'a' takes longer", slower=slower)


def test_other_times_of_devices_are_planned_with_and_add_up():
    """The next ones are told against a profile that knows of the first."""
    recovery = Recovery(1)
    assert dict(recovery.after(outdated(a=2.0), 5, plan()).slower) == {"a": 2.0}
    again = recovery.after(outdated(a=0.5, b=3.0), 5, plan())
    assert dict(again.slower) == {"a": 1.0, "b": 3.0}
    lessons = Lessons.from_text(recovery.lessons(Restart("slow", 1.0)).to_text())
    assert Recovery(1, lessons).again.slower == again.slower


def test_a_plan_that_is_outdated_is_no_failure():
    """It does not count among those in a row, and nothing that was learnt before is forgotten."""
    recovery = Recovery(1)
    recovery.after(full(), 5, plan())
    for _ in range(5):
        again = recovery.after(outdated(a=1.5), 5, plan())
    assert again.memory_by_class == {"class-a": LESS_MEMORY}
    recovery.after(lost(), 6, plan())
    with pytest.raises(TrainingError):
        recovery.after(lost(), 6, plan())


def test_who_wants_no_restarts_gets_none_for_a_better_plan():
    with pytest.raises(PlanOutdated):
        Recovery(0).after(outdated(a=2.0), 5, plan())


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"restart": 1, "memory": []}', "null"])
def test_what_holds_no_lessons(text):
    with pytest.raises(ValueError):
        Lessons.from_text(text)
