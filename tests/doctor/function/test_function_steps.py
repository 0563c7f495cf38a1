"""How a function's steps are counted, and how it is ended."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from gpumix.doctor.function.observations import WindowLength
from gpumix.doctor.function.watching import steps as module
from gpumix.doctor.function.watching.steps import StepCounter, WindowDone

ENDS = ("ends", "leaves")


class Events:
    """What happened when, by the number of steps that were done."""

    def __init__(self, length: WindowLength, **more: Any) -> None:
        self.seen: list[tuple[str, int]] = []
        self.steps = StepCounter(
            length,
            **more,
            begins=lambda: self._note("begins"),
            ends=lambda: self._note("ends"),
            leaves=lambda: self._note("leaves"),
        )

    def _note(self, what: str) -> None:
        self.seen.append((what, self.steps.done))


@pytest.fixture
def hooked():
    """Steps of real optimizers, counted."""
    hooks = []

    def count(events: Events) -> Events:
        hooks.append(register_optimizer_step_post_hook(events.steps.step))
        return events

    yield count
    for hook in hooks:
        hook.remove()


def optimizer() -> torch.optim.Optimizer:
    return optimizer_of(parameter())


def parameter() -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return weight


def optimizer_of(weight: torch.nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.SGD([weight], lr=0.1)


def test_a_function_is_ended_once_enough_was_seen(hooked):
    events, sgd = hooked(Events(WindowLength(2, 3))), optimizer()
    with pytest.raises(WindowDone):
        while True:
            sgd.step()
    assert events.seen == [("begins", 2), ("ends", 5), ("leaves", 5)]
    assert events.steps.counted == 3 and events.steps.seconds > 0


def test_of_short_steps_there_are_more(hooked, monkeypatch):
    seconds = count()  # a second later each time that somebody looks
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    events, sgd = hooked(Events(WindowLength(1, 2, least_s=20))), optimizer()
    with pytest.raises(WindowDone):
        while True:
            sgd.step()
    assert 2 < events.steps.counted < 400 and events.steps.seconds >= 20
    assert events.seen == [("begins", 1), *((what, events.steps.done) for what in ENDS)]


def test_the_warm_up_lasts_until_steps_have_settled(hooked):
    asked = iter([False, False, True])
    events, sgd = hooked(Events(WindowLength(2, 3), settled=lambda: next(asked))), optimizer()
    with pytest.raises(WindowDone):
        while True:
            sgd.step()
    assert events.seen == [("begins", 4), ("ends", 7), ("leaves", 7)]


def test_what_catches_all_errors_does_not_catch_that(hooked):
    hooked(Events(WindowLength(1, 1)))
    sgd = optimizer()
    with pytest.raises(WindowDone):
        for _ in range(3):
            try:
                sgd.step()
            except Exception:
                pytest.fail("it was caught")


def test_steps_to_profile_come_behind(hooked):
    events, sgd = hooked(Events(WindowLength(1, 2, profiled=2))), optimizer()
    with pytest.raises(WindowDone):
        while True:
            sgd.step()
    assert events.seen == [("begins", 1), ("ends", 3), ("leaves", 5)]
    assert events.steps.counted == 2


def test_of_two_optimizers_the_first_counts(hooked):
    events, one, other = hooked(Events(WindowLength(1, 10))), optimizer(), optimizer()
    for _ in range(3):
        one.step()
        other.step()
    assert events.steps.done == 3


def test_an_optimizer_that_is_gone_makes_room_for_another(hooked):
    events, one = hooked(Events(WindowLength(1, 10))), optimizer()
    one.step()
    del one
    optimizer().step()
    assert events.steps.done == 2


def test_an_optimizer_made_in_each_step_is_counted_once_a_step(hooked):
    """Those before it may be alive still, as cycles of references are."""
    events, weight, kept = hooked(Events(WindowLength(1, 10))), parameter(), []
    for _ in range(3):
        optimizer_of(weight).step()
    for _ in range(3):
        kept.append(optimizer_of(weight))
        kept[-1].step()
    assert events.steps.done == 6


def test_of_two_that_are_made_in_each_step_the_first_counts(hooked):
    """Each is gone when the other one steps, and both are made by one line."""
    events, one, other = hooked(Events(WindowLength(1, 10))), parameter(), parameter()
    for _ in range(4):
        optimizer_of(one).step()
        optimizer_of(other).step()
    assert events.steps.done == 4


def test_another_phase_goes_on_with_another_optimizer(hooked):
    """Of parameters that were there before: its second step counts."""
    events, one, other = hooked(Events(WindowLength(1, 10))), parameter(), parameter()
    optimizer_of(one).step()
    second = optimizer_of(other)
    for _ in range(3):
        second.step()
    assert events.steps.done == 3


def test_a_function_that_ends_earlier(hooked):
    events, sgd = hooked(Events(WindowLength(2, 10))), optimizer()
    for _ in range(4):
        sgd.step()
    assert not events.steps.end_early()  # two steps say nothing
    sgd.step()
    assert events.steps.end_early()
    assert events.seen == [("begins", 2), ("ends", 5)] and events.steps.counted == 3
