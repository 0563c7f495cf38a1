"""Some of the attacks of `benchmarks/attacks.py`, one of each way; and that they can succeed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.attacks.attacked import Attack, Place, Swapping, attempt, turns
from helpers.attacks.command_attacks import every as command_attacks
from helpers.attacks.file_attacks import every as file_attacks
from helpers.attacks.job_attacks import every as job_attacks
from helpers.attacks.state_attacks import every as state_attacks
from helpers.attacks.strangers import as_root
from helpers.attacks.word_attacks import every as word_attacks
from helpers.extended import every_second, left_out

CHOSEN = (
    "squatting: memory, link", "squatting: memory, link inside", "squatting: memory, pipe",
    "links: .report.html.{pid}.part", "links: .metrics.jsonl.part", "links: .lock, resumed",
    "links: metrics.jsonl, resumed", "links: folder checkpoints", "links: checkpoint step-1.part",
    "leaks: metrics.jsonl, report", "leaks: a whole progress",
    "races: append", "races: replace", "races: read", "races: folder, remove",
    "races: folder, write inside",
    "foreign programs: theirs", "foreign programs: folder and file", "foreign programs: link",
    "special files: metrics.jsonl, kernel", "special files: plan.json, pipe",
    "size: plan.json, report", "size: metrics.jsonl, report", "size: metrics.jsonl, resume",
    "no UTF-8: metrics.jsonl, resume", "no UTF-8: metrics.jsonl, report",
    "names of folders: b'\\xff\\xfe', report", "names of folders: b'\\x1b]0;title\\x07', top",
    "names of folders: job, train",
    "checkpoints: forged, shape [0, 4611686018427387904]", "checkpoints: __0_0.distcp, size",
    "checkpoints: checkpoint.json, size", "checkpoints: forged, 300,000 empty tensors",
    "checkpoints: moved and linked back", "checkpoints: __0_0.distcp, pickle",
    "ports: store, noise", "ports: store, slow",
    "odd numbers: everywhere 1e+308", "odd numbers: progress's time 1e+308",
    "weights: model.safetensors, sparse", "weights: index, above", "weights: index, long",
    "configurations: kernels of a hub", "saved datasets: state a number",
    "saved datasets: state of root", "saved datasets: rows pipe", "saved datasets: info other",
    "init: 'm\"\"\"\\nopen(\"PWNED\", \"w\")\\n\"\"\"'", "caches of models: b'\\xff\\xfe'",
    "compiled code: file", "trackers: tensorboard is a link", "trackers: positions are a link",
    "trackers: a log has no end", "trackers: position 5",
)  # fmt: skip
# Of these ways others are usual cases.
FURTHER = (
    "squatting: memory, link",
    "links: .report.html.{pid}.part", "links: metrics.jsonl, resumed", "links: .lock, resumed",
    "links: checkpoint step-1.part", "leaks: metrics.jsonl, report",
    "races: replace", "races: folder, remove", "races: folder, write inside",
    "foreign programs: theirs", "foreign programs: folder and file", "foreign programs: link",
    "special files: metrics.jsonl, kernel",
    "size: metrics.jsonl, report", "size: metrics.jsonl, resume", "no UTF-8: metrics.jsonl, report",
    "names of folders: b'\\xff\\xfe', report", "names of folders: job, train",
    "checkpoints: forged, 300,000 empty tensors", "checkpoints: checkpoint.json, size",
    "odd numbers: progress's time 1e+308", "links: folder checkpoints",
    "races: read", "no UTF-8: metrics.jsonl, resume",
    "orders to terminals: rank's input_limit 5",
    "weights: index, above", "saved datasets: state of root", "saved datasets: info other",
    "trackers: position 5",
)  # fmt: skip
# Of these kinds one of so many, and the first, the fourth, ... of these as usual cases.
SOME = {"hosts in templates": 7, "hosts to ssh": 9, "values in templates": 13,
        "orders to terminals": 11}  # fmt: skip


def chosen() -> list[Attack]:
    every = [*file_attacks(), *word_attacks(), *state_attacks(), *job_attacks()]
    every += command_attacks()
    assert len({one.id for one in every}) == len(every)
    found = [one for one in every if one.id in CHOSEN]
    assert {one.id for one in found} == set(CHOSEN)
    for kind, part in SOME.items():
        found += [one for one in every if one.kind == kind][::part]
    return found


def further(attacks: list[Attack]) -> list[Attack]:
    """The extended ones."""
    found = [one for one in attacks if one.id in FURTHER]
    for kind in SOME:
        of_kind = [one for one in attacks if one.kind == kind]
        found += [one for number, one in enumerate(of_kind) if number % 3]
    return found


# Made once: of two that are made alike, neither is the other.
ATTACKS = chosen()


@pytest.fixture
def place() -> Iterator[Path]:
    """Where another user can go, unlike the folders that pytest makes."""
    folder = Path(tempfile.mkdtemp(prefix="attacked-"))
    folder.chmod(0o755)
    yield folder / "place"
    shutil.rmtree(folder)


@pytest.mark.slow
@as_root
@pytest.mark.parametrize(
    "attack",
    left_out(ATTACKS, further(ATTACKS)),
    ids=lambda attack: attack.id,
)
def test_it_does_no_harm(place, attack):
    outcome = attempt(attack, place)
    assert (outcome.harm, outcome.hung, outcome.bug) == ("", False, "")


def _as_plain_python_writes(place: Place) -> str:
    name = place.run / "file"

    def swap() -> None:
        name.unlink(missing_ok=True)
        name.symlink_to(place.secret)

    place.run.chmod(0o777)
    with Swapping(swap, lambda: name.unlink(), lambda: name.touch(mode=0o666)):
        for _ in turns(20):
            try:
                name.write_text("written by the user")
            except OSError:
                continue
            if place.state() != place.before:
                break
    return ""


def _as_it_was_removed(place: Place) -> str:
    (place.run / "folder").symlink_to(place.home / "folder")
    for inside in (place.run / "folder").iterdir():
        if inside.is_dir():
            shutil.rmtree(inside)
    return ""


@as_root
@pytest.mark.parametrize("act", every_second([_as_it_was_removed, _as_plain_python_writes]))
def test_it_would_do_harm_to_plain_python(place, act):
    assert attempt(Attack("controls", "plain", act), place).harm == "the user's home has changed"


@pytest.mark.parametrize(
    ("act", "told"),
    [
        (lambda place: "a\x1b[2Jb", "the terminal was given"),
        (lambda place: f"{place.secret.read_text()}", "the user's secret was shown"),
        (lambda place: str((place.root / "PWNED").touch()), "code of the stranger ran"),
    ],
)
def test_harm_is_seen(place, act, told):
    assert told in attempt(Attack("controls", "harm", act), place).harm


def test_who_hangs_and_who_calls_a_bug_is_seen(place):
    hanging = attempt(Attack("controls", "hangs", lambda _: str(list(turns(60)))), place, 1.0)
    assert hanging.hung
    shutil.rmtree(place)
    dying = attempt(Attack("controls", "dies", lambda _: os._exit(3)), place)
    assert "died" in dying.bug
    shutil.rmtree(place)
    calling = attempt(Attack("controls", "raises", lambda _: str(1 / 0)), place)
    assert "ZeroDivisionError" in calling.bug
