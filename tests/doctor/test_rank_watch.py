"""What is seen and changed inside of a job's ranks; code that they run is of this file."""

from __future__ import annotations

import json
import pickle
import sys

import pytest
import torch

from gpumix.doctor.rank_watch import RankObservations, RankWatch
from helpers.runs.jobs import gpumix, write_job

OWN = """
import time
import toys
import torch
from torch.nn import functional as F

class Slow:
    def __str__(self):
        time.sleep(0.03)
        return "what it knows"

class Chatty(toys.Toy):
    def forward(self, *args, **kwargs):
        print(Slow())
        x = torch.ones(2, 4, 4)
        weights = F.softmax(x @ x, -1)  # written out
        weights @ x
        return super().forward(*args, **kwargs)

def model():
    made = toys.model()
    made.__class__ = Chatty
    return made
"""


def step() -> None:
    x = torch.ones(2, 4, 4)
    print("a step")
    (x @ x).softmax(-1) @ x


def seen(inside: RankWatch) -> RankObservations:
    """Of two steps that count, and one that is looked at."""
    with inside:
        step()
        inside.begins()
        step()
        step()
        inside.ends()
        with inside.looking():
            step()
    return RankObservations.of(json.loads(json.dumps(inside.told())))


def test_lines_of_the_users_own(tmp_path):
    """As it goes to a rank, and comes back."""
    found = seen(pickle.loads(pickle.dumps(RankWatch({}, tmp_path / "log", gpu=False, looks=True))))
    (write,) = found.writes
    assert write.calls == 2 and "test_rank_watch.py" in write.place
    assert found.syncs == () and found.kernels_s is None
    (place,) = found.attention
    assert found.operations.total == found.operations.forward > 4
    assert "test_rank_watch.py" in place and place != write.place
    assert (tmp_path / "log").read_text() == 4 * "a step\n"


def test_attention_is_not_looked_at_where_code_is_compiled(tmp_path):
    inside = RankWatch({}, tmp_path / "log", gpu=False, looks=True, operations=False)
    assert seen(inside).attention == () and seen(inside).operations is None


def test_what_is_done_otherwise(tmp_path):
    inside = RankWatch({"quiet": True}, tmp_path / "log", gpu=False)
    seen(inside)
    with inside:
        sys.stdout.write("nor what is written without `print`")
    assert (tmp_path / "log").read_text() == ""


@pytest.mark.extended
@pytest.mark.slow
def test_a_job_with_code_of_its_own(tmp_path):
    """What its model prints is measured, and is code: nothing is written."""
    one = [{"class": "big", "accelerator": "cpu", "memory": "64 MiB"}]
    job = write_job(tmp_path, model={"factory": "chatty:model"}, cluster=one)
    (tmp_path / "chatty.py").write_text(OWN)
    options = ("--json", "--apply", "--pairs", "3", "--steps", "6", "--only", "prints")
    allowed = ("--allow", "chatty", "--allow", "toys")
    done = gpumix("doctor", job.name, *options, *allowed, folder=tmp_path, timeout_s=200)
    assert done.code == 0, done.err
    (finding,) = done.json()["findings"]
    assert finding["name"] == "prints" and "chatty.py:14" in finding["fix"]
    assert finding["gain_low"] > 1.0
    remarks = {one["name"]: one["text"] for one in done.json()["remarks"]}
    assert "chatty.py:16" in remarks["unfused_attention"] and done.json()["operations"] > 10
    assert "left to you: print every some steps" in " ".join(done.err.split())
    assert not (tmp_path / "job.tuned.yaml").exists()
