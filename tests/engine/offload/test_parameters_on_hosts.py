"""Parameters in memory that the ranks of a host share: one copy a host, training as elsewhere."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gpumix.engine.comm import parameter_pool
from gpumix.engine.comm.communicator import CommunicationError
from gpumix.engine.comm.parameter_pool import ParameterPool, PooledVector
from gpumix.engine.comm.process_groups import make_communicator
from gpumix.engine.model.deferred_init import build
from gpumix.engine.optimizers.adamw_8bit import AdamW8bit
from gpumix.engine.prepare import prepare
from gpumix.hardware.host import shared_segment
from gpumix.schema.errors import MachineError
from gpumix.schema.plan.plan import Collectives, Plan, Prediction, WorkerPrediction
from gpumix.schema.plan.stage import Mode
from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.training import quantised as q
from helpers.training.models import ARCHITECTURES, partly_frozen_gpt2
from helpers.training.reference import (
    SEED,
    Case,
    Share,
    batches,
    engine_for,
    in_hosts,
    joined,
    own_rows,
    pieces_of,
    plan_for,
    train_alone,
    train_by_plans,
    worst_error,
)

GPT2 = ARCHITECTURES["gpt2"]
STEPS = 3
TOLERANCE = 2e-5
POOL = {"parameters_on": "host"}
UNEVEN = [Share(3, 2, 1), Share(2, 1, 0, Mode(recompute=False)), Share(4, 3, 3, kept=3)]
WAVES = [Share(3, 1, 1), Share(4, 2, 0), Share(0, 0, 2)]
TWO = [Share(3, 2, 1), Share(2, 1, 2)]


CASES: dict[str, Case] = {
    "uneven": ("gpt2", UNEVEN, POOL),
    "used again": ("bart", TWO, POOL),
    "own order": ("plain-own-blocks", UNEVEN, POOL),
    "one rank": ("gpt2", [Share(5, 2, 1)], POOL),
    "some only store": ("gpt2", WAVES, POOL),
    "waves": ("gpt2", WAVES, {**POOL, "waves": 3}),
    "joined": ("bart", TWO, {**POOL, "stage": {"joined": 2}}),
    "hosts alike": ("gpt2", in_hosts(1, 2, 1, 2), {**POOL, "sharding": "host"}),
    "hosts unlike": ("gpt2", in_hosts(1, 2, 3, 0), {**POOL, "sharding": "host"}),
    "through the host": ("gpt2", UNEVEN, {**POOL, "staged_on": "cpu"}),
}


@pytest.fixture(scope="module")
def trained():
    return train_by_plans(CASES, STEPS)


@pytest.mark.parametrize("case", left_out(CASES, ["own order", "joined", "hosts alike"]))
def test_it_trains_like_one_process(case, trained):
    name, shares, _ = CASES[case]
    expected = train_alone(ARCHITECTURES[name], sum(s.samples for s in shares), STEPS)
    assert worst_error(trained[case], expected) < TOLERANCE


FACTORIES = {"gpt2": GPT2.factory, "partly frozen": partly_frozen_gpt2}


def _train(name, shares, settings, early, optimizer_of):
    engine = engine_for(FACTORIES[name], shares, **settings)
    optimizer = optimizer_of(engine.parameters())
    losses = []
    for batch in batches(GPT2, sum(s.samples for s in shares), STEPS):
        rows = own_rows(batch, shares, engine.comm.rank)
        losses.append(engine.step(rows, optimizer if early else None).item())
        if not early:
            losses.append(engine.clip_grad_norm_(1.0).item())
            optimizer.step()
        optimizer.zero_grad()
        losses.append(engine.evaluate(rows).item())
    return losses, pieces_of(engine, only=engine.trained_names())


def _adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def _adamw_8bit(parameters):
    return AdamW8bit(parameters, lr=1e-3, min_8bit_size=256)


EXACT = [
    ("gpt2", {"compute_dtype": "fp32"}, True, _adamw),
    ("gpt2", {"compute_dtype": "bf16"}, False, _adamw),
    ("gpt2", {"compute_dtype": ["bf16", "fp32", "bf16"]}, True, _adamw),
    ("partly frozen", {"compute_dtype": "fp32"}, False, _adamw),
    ("partly frozen", {"compute_dtype": "bf16"}, True, _adamw),
    ("gpt2", {"optimizer_state": "8bit"}, False, _adamw_8bit),
]


@pytest.mark.parametrize(("name", "more", "early", "optimizer_of"), left_out(EXACT, EXACT[3:4]))
def test_it_is_to_the_last_bit_what_devices_do_with_state_on_their_hosts(
    name, more, early, optimizer_of
):
    found = {}
    for place in ("host", "device"):
        settings = {"parameters_on": place, "on_host": range(3), **more}
        ranks = run_ranks(_train, 3, name, UNEVEN, settings, early, optimizer_of)
        found[place] = ranks[0][0], joined([pieces for _, pieces in ranks])
    assert found["host"][0] == found["device"][0]
    for name, value in found["device"][1].items():
        assert (found["host"][1][name] == value).all(), name


def _count(shares):
    engine = engine_for(GPT2.factory, shares, **POOL)
    batch = next(batches(GPT2, sum(s.samples for s in shares), 1))
    engine.step(own_rows(batch, shares, engine.comm.rank))
    before = engine.comm.counts.copy(), engine.comm.bytes.copy()
    engine.step(own_rows(batch, shares, engine.comm.rank))
    sizes = {group.label: 4 * group.numel for group in engine.groups()}
    return (engine.comm.counts - before[0], engine.comm.bytes - before[1], sizes)


def test_blocks_come_twice_a_step_however_many_micro_batches_there_are():
    for counts, moved, sizes in run_ranks(_count, 3, [Share(6, 1, 1), Share(0, 0, 2), *TWO[:1]]):
        # Twice, but the last block and the root once; nothing goes between devices.
        assert counts["fetch"] == 2 * 3 - 1 + 1
        assert counts["put"] == 3 + 1
        assert not counts["gather"] and not counts["reduce"]
        once = sizes["(root)"] + sizes["transformer.h.2"]
        assert moved["fetch"] == 2 * sum(sizes.values()) - once
        assert moved["put"] == sum(sizes.values())


def _mapped():
    engine = engine_for(GPT2.factory, TWO, **POOL)
    text = Path("/proc/self/maps").read_text()
    lines = re.findall(r"(\w+)-(\w+) rw-s \S+ \S+ (\d+) .*gpumix-parameters", text)
    found = {inode: int(end, 16) - int(begin, 16) for begin, end, inode in lines}
    return found, sum(4 * group.numel for group in engine.groups())


def test_a_host_has_one_copy():
    (first, parameters), (second, _) = run_ranks(_mapped, 2)
    assert first == second
    rows = 2 * 2 * max(first.values())  # at most: two rooms of a row for each rank
    assert parameters <= sum(first.values()) <= parameters + rows + 4096 * len(first)


def _hide_open_files():
    """Where processes do not see each other's open files."""
    create = parameter_pool.create_segment

    @contextmanager
    def hidden(size, *, named):
        with create(size, named=named) as made:
            yield made if named else shared_segment.SegmentPlace(made.process, made.descriptor, 0)

    parameter_pool.create_segment = hidden


def _names():
    left = Path("/dev/shm").glob("gpumix-parameters-*")
    return {str(path) for path in left if path.stat().st_uid == os.geteuid()}


def _train_named():
    _hide_open_files()
    engine = engine_for(GPT2.factory, TWO, **POOL)
    batch = next(batches(GPT2, 5, 1))
    return engine.step(own_rows(batch, TWO, engine.comm.rank)).item(), _names()


def test_a_named_file_serves_where_open_files_are_hidden():
    before = _names()
    (loss, left), (other, _) = run_ranks(_train_named, 2)
    assert loss == other == pytest.approx(train_alone(GPT2, 5, STEPS).losses[0], rel=1e-5)
    assert left <= before


def _prepare_without(dead, how):
    """A rank ends before it opens the named file."""
    _hide_open_files()
    opened, rank = parameter_pool.map_segment, dist.get_rank()

    def end(place, *args, **kwargs):
        if place.token and rank == dead:
            os.kill(os.getpid(), how)
        return opened(place, *args, **kwargs)

    parameter_pool.map_segment = end
    try:
        engine_for(GPT2.factory, TWO, **POOL)
    except CommunicationError as error:
        return str(error), _names()
    return None


def test_no_name_is_left_when_a_rank_dies_while_memory_is_shared():
    before = _names()
    settings = {"timeout_s": 60, "group_timeout_s": 300}
    error, left = run_ranks(_prepare_without, 2, 1, signal.SIGKILL, mortal=[1], **settings)[0]
    assert "search for shared memory" in error
    assert left <= before
    # Of the rank that made it, the next run removes the name.
    run_ranks(_prepare_without, 2, 0, signal.SIGKILL, mortal=[0], **settings)
    assert _names() - before
    run_ranks(_train_named, 2)
    assert _names() <= before


def _prepare_below(limit, room):
    """With no more of something than so much beyond what this process has."""
    if dist.get_rank():
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        next_file = os.dup(0)  # the limit is one of numbers, of which some below may be free
        os.close(next_file)
        used = pages * os.sysconf("SC_PAGE_SIZE") if limit == resource.RLIMIT_AS else next_file
        resource.setrlimit(limit, (used + room, used + room))
    group = ParameterPool(make_communicator(torch.device("cpu"), Collectives()))
    try:
        group.allocate_vector(2**26, torch.float32)
    except MachineError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("limit", "room", "told"),
    [
        (resource.RLIMIT_AS, 2**27, "Cannot allocate memory"),
        (resource.RLIMIT_NOFILE, 0, "Too many open files"),
    ],
)
def test_a_limit_of_a_process_is_an_error_on_every_rank(limit, room, told):
    first, second = run_ranks(_prepare_below, 2, limit, room)
    assert "rank 1 of this host cannot have memory" in first
    assert "256.0 MiB of memory shared by the devices of this host cannot be mapped" in second
    assert told in second and "ulimit -v" in second


def _prepare_with(free_bytes):
    shared_segment.available_host_bytes = lambda: free_bytes
    try:
        engine_for(GPT2.factory, TWO, **POOL)
    except MachineError as error:
        return str(error)
    return None


def test_memory_that_is_not_there_is_an_error_on_every_rank():
    first, second = run_ranks(_prepare_with, 2, 2**10)
    assert "of the host's memory are needed for parameters, 1.0 KiB are free" in first
    assert "plan without `parameters_on: host`" in first
    assert "rank 0 of this host cannot have memory" in second


def _prepare_by(plan_json):
    try:
        prepare(build(GPT2.factory, SEED), Plan.model_validate_json(plan_json))
    except MachineError as error:
        return str(error)
    return None


def test_a_plan_that_keeps_more_than_is_free_is_refused_on_every_rank():
    plan = plan_for(build(GPT2.factory, SEED), TWO, **POOL)
    kept = [
        WorkerPrediction(
            device=worker.device,
            forward_s=1.0,
            backward_s=1.0,
            optimizer_s=1.0,
            busy_s=3.0,
            memory_bytes={},
            memory_limit_bytes=1,
            host_bytes=2**50,
        )
        for worker in plan.workers
    ]
    told = Prediction(step_s=3.0, tokens_per_s=1.0, exposed_communication_s=0.0, workers=kept)
    plan = plan.model_copy(update={"prediction": told})
    for error in run_ranks(_prepare_by, 2, plan.model_dump_json()):
        assert "the plan takes 2048.0 TiB of the memory of host 'localhost'" in error


def _step_without(dead):
    engine = engine_for(GPT2.factory, UNEVEN, **POOL)
    mine = own_rows(next(batches(GPT2, 9, 1)), UNEVEN, engine.comm.rank)
    engine.step(mine)
    if engine.comm.rank == dead:
        os._exit(1)
    try:
        engine.step(mine)
    except CommunicationError as error:
        return str(error)
    return None


def test_a_rank_that_dies_is_an_error_on_the_others():
    results = run_ranks(_step_without, 3, 1, timeout_s=60, group_timeout_s=300, mortal=[1])
    assert "failed" in results[0] and "failed" in results[2]


def _read_between(read, late_s):
    """Read the model after the gradients of a step and before its update. One rank copies late."""
    engine = engine_for(GPT2.factory, TWO, **POOL)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.5)
    whole = next(batches(GPT2, 5, 1))
    rows = own_rows(whole, TWO, engine.comm.rank)
    engine.step(rows)
    engine.evaluate(rows)  # the first one tries whether units are called again
    copy = PooledVector._copy

    def copy_late(vector, *args):
        time.sleep(late_s if engine.comm.rank else 0.0)
        copy(vector, *args)

    PooledVector._copy = copy_late
    if read == "outputs":
        found = engine.outputs(lambda model, part: model(part["input_ids"]).logits, rows)
        logits = torch.cat(list(found.values()))
    else:
        logits = engine.model(whole["input_ids"]).logits
    optimizer.step()
    return logits.detach().numpy()


@pytest.mark.parametrize("read", ["outputs", "call"])
def test_no_rank_updates_what_another_still_reads(read):
    expected, found = (run_ranks(_read_between, 2, read, late_s) for late_s in (0.0, 0.1))
    for of_rank, told in zip(found, expected):
        assert (of_rank == told).all()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    return q.save_base(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("base", left_out(q.CONFIGS, list(q.CONFIGS)[1:]))
def test_adapters_on_a_quantised_base_train_as_stock(folder, base):
    plan = q.plan_of(q.load_adapted(folder, base), q.SHARES[3], **POOL)
    found = q.merged(run_ranks(q.train_rank, 3, folder, base, plan))
    assert worst_error(found, q.train_stock(folder, base)) < 1e-4
