"""A profile that is broken, has holes or cannot be true is one error that names file and place."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumix.planner.plan import plan as make_plan
from gpumix.schema.errors import InputError
from gpumix.schema.profile.profile import Profile
from helpers.attacks import mutants
from helpers.attacks.mutants import INFINITY, NAN, Keys, at, places
from helpers.draws import examples
from helpers.runs.verbs import gpumix, measured, refused, write_job

GOOD = json.loads(measured().model_dump_json())
TARDY = ("classes", 1)
TIMES = (*TARDY, "units", "block")
BUS = ("network", 0, "times")


def with_value(keys: Keys, value: Any, of: Any = GOOD) -> Any:
    """The good profile, or another document, with another value at `keys`."""
    return mutants.with_value(keys, value, of)


def without(keys: Keys, of: Any = GOOD) -> Any:
    return mutants.without(keys, of)


def twice(keys: Keys) -> Any:
    """The good profile with the first item of the list at `keys` once more."""
    return with_value(keys, [*at(GOOD, keys), at(GOOD, keys)[0]])


@pytest.fixture
def job(tmp_path):
    return write_job(tmp_path)


def told(job: Path, content: Any, verbs: Iterable[tuple[str, ...]] = (("plan",),)) -> str:
    """What is said of a profile by its file, in Python and by verbs."""
    path = job.with_name("profile.json")
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(InputError) as caught:
        Profile.load(path)
    error = caught.value
    assert error.where.startswith(str(path))
    assert "gpumix profile" in error.fix
    for verb in verbs:
        assert f"gpumix: {error}" in refused(*verb, job, "--profile", path)
    return str(error)


def test_the_profile_before_it_is_changed(job):
    path = job.with_name("profile.json")
    path.write_text(json.dumps(GOOD))
    assert Profile.load(path) == measured()
    assert gpumix("plan", job, "--profile", path, "--json").exit_code == 0


def test_every_verb_that_takes_a_profile_says_it(job):
    verbs = (("plan",), ("compare",), ("whatif", "--remove", "tardy"))
    assert "was not measured" in told(job, without(TARDY), verbs)


@pytest.mark.parametrize(
    ("content", "place", "said"),
    [
        (without((*TARDY, "units", "block")), "", "'block' was not measured on device class 'tar"),
        (without((*TARDY, "units", "(root)")), "", "'(root)' was not measured on device class 't"),
        (without(TARDY), "", "device class 'tardy' was not measured"),
        (twice(("classes",)), "", "device class 'quick' is described twice"),
        (twice(("network",)), "", "'gather of all ranks, native' is described twice"),
        (twice(("model", "kinds")), ": model", "unit kind 'block' is named twice"),
        (without(("model", "kinds", 0)), ": model.kinds", "of length 1 or more"),
        (with_value(("model", "kind_of_call", 1), "other"), ": model", "'other' is used but not"),
        (without(("model", "kind_of_call", 1)), ": model", "4 calls but 3 kinds of calls"),
        (twice(("cluster", "devices")), ": cluster", "device 'quick-0' is named twice"),
        (twice(("cluster", "classes")), ": cluster", "device class 'quick' is named twice"),
        (without(("cluster", "classes", 1)), ": cluster", "'tardy', which is not defined"),
        (without((*TARDY, "optimizer_s_per_element")),
         ": classes.1 (tardy).optimizer_s_per_element", "is missing"),
        (with_value((*TARDY, "largest_micro_batch"), 0),
         ": classes.1 (tardy).largest_micro_batch", "must be 1 or more"),
        (with_value((*TARDY, "optimizer_s_per_element"), NAN),
         ": classes.1 (tardy).optimizer_s_per_element", "finite number"),
        (with_value((*TIMES, "forward", "values", 0), -0.1),
         ": classes.1 (tardy).units.block.forward", "must not be negative, they are (-0.1,"),
        (with_value((*TIMES, "backward", "values", 1), NAN),
         ": classes.1 (tardy).units.block.backward.values.1", "finite number"),
        (with_value((*TIMES, "backward", "values", 2), INFINITY),
         ": classes.1 (tardy).units.block.backward.values.2", "finite number"),
        (without((*TIMES, "forward", "values", 0)),
         ": classes.1 (tardy).units.block.forward", "3 sizes but 2 values"),
        (with_value((*TIMES, "forward", "sizes", 2), 1.5),
         ": classes.1 (tardy).units.block.forward", "sizes must be positive and grow"),
        (with_value((*BUS, "sizes"), []),
         ": network.0 (gather).times.sizes", "of length 1 or more"),
        (with_value((*BUS, "values", 0), -1.0), ": network.0 (gather).times", "not be negative"),
        (with_value(("contention",), NAN), ": contention", "finite number"),
        (with_value(("collectives", "padding"), NAN), ": collectives.padding", "finite number"),
        (with_value(("step_overhead_s",), INFINITY), ": step_overhead_s", "finite number"),
        (with_value(("cluster", "network"), {"between": "0 GB/s"}),
         ": cluster.network.between", "more than 0 bytes a second"),
        (with_value(("cluster", "network"), {"inside": "-5 GB/s"}),
         ": cluster.network.inside", "is not a link"),
        (with_value(("cluster", "network"), {"exceptions": [{
            "where": "inside", "classes": ["tardy"], "link": "1 GB/s"}]}),
         ": cluster.network.exceptions.0.classes.1", "is missing"),
        (with_value(("schema_version",), 2), "", "a profile of schema 1 is wanted"),
        (json.dumps(GOOD)[:-40], "", "it is no JSON"),
        ("[" * 100_000, "", "not a valid profile"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_place(job, content, place, said):
    error = told(job, content).splitlines()[0]
    assert f"profile.json{place}: " in error
    assert said in error
    assert "Value error" not in error


@pytest.mark.parametrize("unit", ["block", "(root)"])
@pytest.mark.parametrize("what", ["forward", "backward"])
def test_a_time_that_falls_by_far_as_work_grows_is_refused(job, unit, what):
    times = {"sizes": [1, 2, 4], "values": [0.1, 0.3, 0.12]}
    error = told(job, with_value((*TARDY, "units", unit, what), times))
    assert "device class 'tardy'" in error
    assert f"{what} of unit '{unit}' takes 300 ms for 2 samples but 120 ms for 4" in error
    assert "measure again: `gpumix profile JOB.yaml --fresh`" in error


@pytest.mark.parametrize(
    "values",
    [[0.1, 0.16, 0.12], [1e-4, 9e-4, 2e-4], [0.2, 0.2, 0.2], [0.0, 0.0, 0.0]],
    ids=["a little", "below a millisecond", "flat", "none"],
)
def test_noise_in_times_is_no_error(job, values):
    path = job.with_name("profile.json")
    times = {"sizes": [1, 2, 4], "values": values}
    path.write_text(json.dumps(with_value((*TIMES, "forward"), times)))
    assert gpumix("plan", job, "--profile", path, "--json").exit_code == 0


def test_a_network_that_was_measured_at_one_size_is_enough(job):
    """Latency below that size, in proportion beyond it."""
    path = job.with_name("profile.json")
    path.write_text(json.dumps(with_value(BUS, {"sizes": [1e5], "values": [1e-3]})))
    assert gpumix("plan", job, "--profile", path, "--json").exit_code == 0


# -- anything --------------------------------------------------------------------------------------


def _negative(value: Any) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return -value if number else None


WHATIF = ("whatif", "--add", "1x quick", "--add", "t4", "--inside", "10GbE")
ODD = [None, True, "x", "", [], {}, -1, 0, 0.5, 1e300, 10**30, NAN, INFINITY]
CHANGES: list[Callable[[Keys, Any], Any]] = [
    without,
    lambda keys, of: with_value(keys, _negative(at(of, keys)), of),
    lambda keys, of: with_value(keys, [at(of, keys)], of),
    *(lambda keys, of, odd=odd: with_value(keys, odd, of) for odd in ODD),
]


@st.composite
def broken(draw: st.DrawFn, document: Any) -> str:
    """The text of a document in which something was changed, sometimes cut short."""
    change, place = draw(st.sampled_from(CHANGES)), draw(st.sampled_from(places(document)))
    text = json.dumps(change(place, document))
    return text[: int(draw(st.sampled_from([1.0, 1.0, 1.0, 0.5])) * len(text))]


def is_one_error_at_most(*arguments: str | Path) -> None:
    done = gpumix(*arguments)
    assert done.exit_code in (0, 2, 4), done.output
    assert done.stderr.count("gpumix: ") == (done.exit_code != 0)


@examples(20)
@given(broken(GOOD), st.sampled_from([("plan",), ("compare",), WHATIF]))
def test_whatever_a_profile_holds_no_verb_fails_otherwise(tmp_path, text, verb):
    """Among all plans that there are."""
    job = write_job(tmp_path, techniques={})
    path = job.with_name("profile.json")
    path.write_text(text)
    is_one_error_at_most(*verb, job, "--profile", path)


PLAN = json.loads(make_plan(measured(), 8).model_dump_json())


@examples(20)
@given(broken(PLAN), broken(GOOD), st.sampled_from(["plan", "profile"]))
def test_whatever_a_plan_or_its_profile_holds_no_replay_fails_otherwise(
    tmp_path, plan, profile, which
):
    texts = {"plan": json.dumps(PLAN), "profile": json.dumps(GOOD)}
    texts |= {which: {"plan": plan, "profile": profile}[which]}
    for name, text in texts.items():
        (tmp_path / f"{name}.json").write_text(text)
    is_one_error_at_most("simulate", tmp_path / "plan.json")
