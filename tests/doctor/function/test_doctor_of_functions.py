"""`gpumix doctor module:function`: as a user calls it, and its windows, processes of their own."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from gpumix.doctor.function.function_patient import list_imports, open_function_patient
from gpumix.schema.errors import InputError, TrainingError
from helpers.errors import raises
from helpers.extended import left_out
from helpers.processes import commands
from helpers.runs.jobs import gpumix

SCRIPT = """
import os
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def train(steps=10**6, beside=lambda: None):
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    x = torch.randn(256, 8)
    while True:
        for (batch,) in DataLoader(TensorDataset(x), batch_size=32, shuffle=True):
            loss = model(batch).square().mean()
            sgd.zero_grad(); loss.backward(); sgd.step()
            beside()
            steps -= 1
            if not steps:
                return

def untidy():
    cell, head = nn.LSTMCell(8, 8), nn.Linear(8, 1)
    parameters = [*cell.parameters(), *head.parameters()]
    x = torch.randn(4, 40, 8)
    while True:
        adam = torch.optim.Adam(parameters)
        state = None
        for t in range(40):
            state = cell(x[:, t], state)
        head(state[0]).square().mean().backward()
        adam.step()
        time.sleep(0.02)  # writes its log

class Remote(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.full((8,), float(index % 7))

def fetching():
    model = nn.Linear(8, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    for batch in DataLoader(Remote(), batch_size=8):
        sgd.zero_grad(); model(batch).square().mean().backward(); sgd.step()

def no_steps():
    print("here I am")

def yielding():
    yield train(100)

async def later():
    train(100)

def few_steps():
    train(6)

def some_steps():
    train(9)

def stubborn():
    while True:
        try:
            train()
        except BaseException:
            pass

def hangs():
    print("I wait")
    time.sleep(1000)

def dies():
    print("good bye", flush=True)
    os._exit(7)

def broken():
    train(beside=lambda: None + 1)

def wants(more):
    train()
"""


def line_of(text: str) -> str:
    """The place of the one line of the script that holds `text`."""
    (number,) = (n for n, line in enumerate(SCRIPT.splitlines(), 1) if text in line)
    return f"script.py:{number}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("scripts")
    (place / "script.py").write_text(SCRIPT)
    return place


def window(folder: Path, name: str, steps: int = 4, patience_s: float = 60.0):
    """Of a function of the script, and what it showed."""
    with open_function_patient(
        f"script:{name}", folder, steps=steps, patience_s=patience_s
    ) as patient:
        patient.least_s = 0.0
        found = patient.window()
        return found, patient.windows[-1]


@pytest.mark.slow
def test_windows_are_processes_of_their_own(folder):
    """Random numbers are the same in each, so are losses; seconds are of its steps."""
    one, first = window(folder, "train")
    _, second = window(folder, "train")
    assert first.steps == second.steps == 4
    assert one.trained_s == first.seconds and one.step_s == first.seconds / 4
    assert first.losses == second.losses and len(first.losses) == 8  # with those of the warm-up
    assert first.samples == 32 and first.models[0].name == "Sequential"
    assert first.models[0].place.endswith(line_of("loss = model"))


@pytest.mark.slow
def test_what_the_first_look_shows(folder):
    """Operations of a step and their lines, lines between steps, optimizers by their line."""
    with open_function_patient("script:untidy", folder, steps=4) as patient:
        seen = patient.first
        assert seen is not None and seen.operations is not None
        assert patient.operations == seen.operations.total > seen.operations.forward
        (loop,) = seen.operations.lines
        assert loop.repeats == 40 and loop.place.endswith(line_of("cell(x"))
        assert seen.between[0].place.endswith(line_of("writes its log"))
        assert seen.between[0].what == "time.sleep(0.02)  # writes its log"
        assert seen.optimizers[0].remade == seen.steps
        patient.window()
        (changed,) = [one for one in patient.suspects() if one.name == "remade_optimizer"]
        reused = patient.with_changes(changed.changes)
        reused.window()
        assert reused.windows[-1].steps >= 4
        told = {one.name: one.text for one in reused.remarks()}
    assert line_of("torch.optim.Adam(parameters)") in told["remade_optimizer"]


@pytest.mark.extended
@pytest.mark.slow
def test_functions_that_end_by_themselves_or_do_not_want_to(folder):
    assert window(folder, "some_steps", steps=40)[1].steps == 5  # nine, without the warm-up
    assert window(folder, "stubborn")[1].steps == 4
    with raises(InputError, code="function-ended-early", what="6 steps"):
        window(folder, "few_steps")


@pytest.mark.slow
@pytest.mark.extended
def test_functions_that_never_step(folder):
    with raises(InputError, code="function-timeout", what="2 s") as told:
        window(folder, "hangs", patience_s=2.0)
    assert "I wait" not in told.value.what


@pytest.mark.slow
def test_functions_that_die(folder):
    with raises(TrainingError, code="function-process-ended", what=7) as told:
        window(folder, "dies")
    assert "good bye" in told.value.why


@pytest.mark.extended
@pytest.mark.slow
def test_what_slows_a_function_down_is_found_with_its_line(folder):
    options = ("--json", "--pairs", "3", "--steps", "6", "--only", "workers")
    begun_s = time.perf_counter()
    done = gpumix("doctor", "script:fetching", *options, folder=folder, timeout_s=200)
    passed_s = time.perf_counter() - begun_s
    assert done.code == 0, done.err
    assert done.err.startswith("script:fetching runs several times, a few steps each")
    assert done.json()["trained_s"] < done.json()["seconds"] < passed_s
    (finding,) = done.json()["findings"]
    assert finding["name"] == "workers" and finding["gain"] > 1.02
    assert finding["fix"].endswith(line_of("DataLoader(Remote"))
    assert done.json()["input_share"] > 0.5
    assert "leaked" not in done.err


NOT_EXAMINED = [
    ("no_steps", {"code": "function-without-step"}, ""),
    ("yielding", {"code": "function-trains-nothing", "what": "generator"}, ""),
    ("later", {"code": "function-trains-nothing", "what": "coroutine"}, ""),
    (
        "broken",
        {"code": "job-code-failed", "what": "TypeError: unsupported operand"},
        line_of("None + 1") + " in <lambda>",
    ),
    ("nowhere", {"code": "factory-function-missing", "what": ("script", "nowhere")}, "script.py"),
    ("wants", {"code": "factory-arguments-invalid"}, ""),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "what", "where"), left_out(NOT_EXAMINED, [*NOT_EXAMINED[:3], NOT_EXAMINED[5]])
)
def test_what_cannot_be_examined(folder, name, what, where):
    with raises(InputError, **what) as told:
        window(folder, name)
    assert where in told.value.where


@pytest.mark.parametrize("option", ["--apply", "--set=steps=3"])
def test_options_for_jobs(tmp_path, option):
    done = gpumix("doctor", "script:train", option, folder=tmp_path)
    assert done.code == 2 and "is for jobs" in done.err
    assert "Traceback" not in done.err and done.out == ""


def test_what_a_script_imports():
    source = "import torch, a.b as c\nfrom transformers.models import x\ndef f():\n  import late\n"
    assert list_imports(source) == {"torch", "a", "transformers", "late"}


WORK = """
import os, subprocess, sys
from gpumix.doctor.function.function_patient import group_cpu_s
loop = "for n in range(3_000_000): pass"
seen = [group_cpu_s(os.getpgrp())]
exec(loop)
seen.append(group_cpu_s(os.getpgrp()))
subprocess.run([sys.executable, "-c", loop])
seen.append(group_cpu_s(os.getpgrp()))
print(seen)
"""


def test_seconds_of_cores_of_a_group_of_processes(tmp_path):
    """Those of a child that has ended stay: the workers of a loader end with their epoch."""
    (tmp_path / "work.py").write_text(WORK)
    env = commands.environment(tmp_path / "cache")
    done = commands.run([sys.executable, "work.py"], folder=tmp_path, env=env, timeout_s=100)
    begun, looped, ended = done.json()
    assert begun < looped < ended
