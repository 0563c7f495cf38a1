"""Errors that cross from one process to another, and how they are shown."""

from __future__ import annotations

import json
import pickle

import pytest

from gpumix.engine.model.forward_coroutine import ModelError
from gpumix.schema.errors import (
    GpumixError,
    InputError,
    MachineError,
    OutOfMemory,
    PlanOutdated,
    RankInterrupted,
    RankLost,
    rebuild_error,
)
from gpumix.train.checkpoint.manifest import Damaged

WORDS = {"code": "broken", "where": "here", "why": "because", "fix": "do that"}
ERRORS = [
    *(cls("it broke", **WORDS) for cls in (GpumixError, InputError, MachineError, ModelError)),
    *(cls("it broke", **WORDS) for cls in (Damaged, RankInterrupted)),
    RankLost("it broke", **WORDS, device="a", device_class="c"),
    OutOfMemory("it broke", **WORDS, device="a", device_class="c", fragmented=True, obtainable=0.5),
    PlanOutdated("it broke", **WORDS, slower={"a": 2.0}, step_s=0.5),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("way", ["words", "pickle"])
def test_an_error_is_what_it_was(error, way):
    if way == "words":
        other = rebuild_error(json.loads(json.dumps(error.as_dict())))
    else:
        other = pickle.loads(pickle.dumps(error))
    assert type(other) is type(error)
    assert vars(other) == vars(error)
    assert str(other) == str(error)


def test_a_class_that_is_not_known_is_an_error_all_the_same():
    told = GpumixError("it broke", **WORDS).as_dict() | {"error": "SystemExit"}
    assert type(rebuild_error(told)) is GpumixError


def test_what_a_terminal_would_obey_is_written_out():
    said = str(InputError("no '\x1b[31m'", where="a\rb", fix="one\ntwo\tthree \x9bé"))
    assert said == "a\\rb: no '\\x1b[31m'\n  fix: one\ntwo\tthree \\x9bé"
