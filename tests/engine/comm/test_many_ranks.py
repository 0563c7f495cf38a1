"""Among many ranks a rank does no more by itself than among few: neither before a collective, nor
to find its part of a plan. Work is counted, not timed."""

from __future__ import annotations

import gc
import pickle
import sys
from collections import Counter
from functools import partial

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from gpumix.schema.plan.plan import Plan
from helpers.processes.absent_group import LOOK_UPS, backend_absent, plan_of, preparations

FEW, MANY = 8, 1024


class Operations(TorchDispatchMode):
    """Counts the operations on tensors inside, views among them."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def instructions_of(function):
    """How many instructions of Python `function` executes, in all that it calls; none of a
    finalizer that happens to run meanwhile."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count


def work_of_preparations(world):
    found = {}
    with backend_absent():
        for name, start in preparations(world).items():
            start().wait()  # memory that is borrowed is there from now on
            instructions = instructions_of(start)
            with Operations() as operations:
                pending = start()
            pending.wait()
            found[name] = (instructions, operations.counts)
    return found


def test_a_collective_is_prepared_among_many_ranks_as_among_few():
    few, many = work_of_preparations(FEW), work_of_preparations(MANY)
    assert many == few
    for _, operations in few.values():
        assert 0 < operations.total() < 20


def test_buffers_of_one_length_share_what_has_a_number_for_each_rank():
    with backend_absent():
        shard = preparations(FEW)["gather, equal shares"].func.__self__
    layout = shard._layout
    assert layout.intervals(shard.numels) is shard.intervals
    assert layout.intervals([shard.numel + 1]) is not shard.intervals


@pytest.mark.parametrize("tensor", [1, 4])
def test_a_rank_finds_its_part_of_a_plan_for_many_as_of_one_for_few(tensor):
    work = {}
    for world in (FEW, MANY):
        plan = plan_of(world, tensor=tensor)
        for name, look_up in LOOK_UPS.items():
            look_up(plan, 0)
            work[name, world] = instructions_of(partial(look_up, plan, world - 1))
    assert {name: work[name, MANY] for name in LOOK_UPS} == {
        name: work[name, FEW] for name in LOOK_UPS
    }


def test_a_copy_of_a_plan_has_no_look_ups_of_the_other():
    plan = plan_of(FEW)
    before = [plan.rows_of(rank) for rank in range(FEW)]
    (stage,) = plan.stages
    first, second, *rest = stage.workers
    more = first.model_copy(update={"samples": 3}), second.model_copy(update={"samples": 1})
    other = plan.model_copy(
        update={"stages": (stage.model_copy(update={"workers": (*more, *rest)}),)}
    )
    assert other.workers[0].samples == 3 and other.sizes[:2] == (3, 1)
    assert [sum(map(len, other.rows_of(rank))) for rank in range(3)] == [3, 1, 2]
    assert [plan.rows_of(rank) for rank in range(FEW)] == before
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan and vars(again).keys() == Plan.model_fields.keys()
