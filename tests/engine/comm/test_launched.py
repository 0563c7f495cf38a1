"""A program that makes no process group: processes of torchrun are ranks of one run, or refused."""

from __future__ import annotations

import os
import sys

import pytest
import torch
import torch.distributed as dist

from gpumix.engine.comm import init_distributed
from gpumix.engine.comm.init_distributed import ensure_process_group
from gpumix.engine.model.deferred_init import build
from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.processes import commands
from helpers.training.models import own_blocks, vectors

PLACE = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
}


@pytest.fixture
def calls(monkeypatch):
    """What is asked of torch, on a host of two GPUs; no group is made."""
    asked: list[tuple[str, object]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    torch_kind = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch_kind)
    monkeypatch.setattr(
        torch.accelerator, "set_device_index", lambda n: asked.append(("device", n))
    )
    monkeypatch.setattr(dist, "init_process_group", lambda kind: asked.append(("group", kind)))
    monkeypatch.setattr(init_distributed.atexit, "register", lambda work: None)
    for name in PLACE:
        monkeypatch.delenv(name, raising=False)
    return asked


def start(monkeypatch, **changes):
    for name, value in (PLACE | changes).items():
        if value:
            monkeypatch.setenv(name, value)


def test_a_process_that_was_started_alone_stays_alone(calls, monkeypatch):
    ensure_process_group(on_gpus=True)
    start(monkeypatch, WORLD_SIZE="1", RANK="0", LOCAL_RANK="0")
    ensure_process_group(on_gpus=True)
    assert calls == []


@pytest.mark.parametrize(
    ("on_gpus", "asked"),
    [(False, [("group", "gloo")]), (True, [("device", 1), ("group", "nccl")])],
)
def test_one_of_several_joins_the_others(calls, monkeypatch, on_gpus, asked):
    start(monkeypatch)
    ensure_process_group(on_gpus=on_gpus)
    assert calls == asked


def test_a_group_that_is_there_is_taken_as_it_is(calls, monkeypatch):
    start(monkeypatch)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    ensure_process_group(on_gpus=True)
    assert calls == []


def test_who_cannot_join_is_refused(calls, monkeypatch):
    start(monkeypatch, MASTER_PORT="")
    with raises(InputError, code="no-process-group", what=("WORLD_SIZE", 2)):
        ensure_process_group(on_gpus=False)
    start(monkeypatch, LOCAL_RANK="2")
    with raises(InputError, code="process-without-gpu", what=2):
        ensure_process_group(on_gpus=True)
    assert calls == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, 1),
        ({"RANK": "1"}, 0),
        ({"GPUMIX_APART": "1"}, 0),
        ({"GPUMIX_STARTS": "1"}, 0),
        ({"TORCHELASTIC_RUN_ID": ""}, 0),
    ],
)
def test_agents_that_anybody_reaches_are_told_of_once(calls, monkeypatch, capsys, changes, said):
    init_distributed.warn_of_open_agents.cache_clear()
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    start(monkeypatch, **({"RANK": "0", "TORCHELASTIC_RUN_ID": "one"} | changes))
    for there in (False, True):
        monkeypatch.setattr(dist, "is_initialized", lambda there=there: there)
        ensure_process_group(on_gpus=False)
    assert capsys.readouterr().err.count(init_distributed.OPEN_AGENTS_WARNING) == said


LOOP = """
import atexit
import os
from pathlib import Path

import torch
import gpumix
from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.schema.plan.stage import Stage, Worker
from helpers.training.models import own_blocks, vectors

@atexit.register  # called after what gpumix does at the end
def of_gloo() -> None:
    names = [(one / "comm").read_text() for one in Path("/proc/self/task").iterdir()]
    count = sum("gloo_runloop" in name for name in names)
    os.write(1, f"threads of rank {rank}: {count}\\n".encode())

model = gpumix.build(own_blocks, seed=0)
anatomy = split_into_units(model)
workers = tuple(
    Worker(device=f"d{n}", device_class="c", samples=n + 1, micro_batch=n + 1, state_share=0.5)
    for n in (0, 1)
)
stage = Stage(units=tuple(unit.name for unit in anatomy.units), workers=workers)
plan = gpumix.Plan(
    strategy="by hand", model=anatomy.fingerprint(), sequence_length=8, global_batch=3,
    stages=(stage,),
)
engine = gpumix.prepare(model, plan)
batch = vectors(3, torch.Generator().manual_seed(0))
rank = engine.comm.rank
own = {key: value[:1] if rank == 0 else value[1:] for key, value in batch.items()}
loss = engine.step(own).item()
os.write(1, f"rank {rank}: {loss:.6f}\\n".encode())  # at once: both write to one pipe
"""


@pytest.mark.extended
@pytest.mark.slow  # torchrun and two processes that import torch
def test_processes_of_torchrun_are_the_ranks_of_one_run(tmp_path):
    (tmp_path / "loop.py").write_text(LOOP)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    env = commands.environment(tmp_path) | own
    done = commands.run([*torchrun, "2", "loop.py"], folder=tmp_path, env=env, timeout_s=120)
    assert done.code == 0, done.err
    assert "destroy_process_group" not in done.err
    assert done.err.count(init_distributed.OPEN_AGENTS_WARNING) == 1
    told = dict(line.split(": ") for line in done.out.splitlines())
    assert [told.pop(f"threads of rank {rank}") for rank in (0, 1)] == ["0", "0"]
    assert told.keys() == {"rank 0", "rank 1"}

    model = build(own_blocks, seed=0)
    batch = vectors(3, torch.Generator().manual_seed(0))
    total, count = model(**batch)
    expected = (total / count).item()
    assert [float(loss) for loss in told.values()] == pytest.approx([expected] * 2, abs=1e-5)
