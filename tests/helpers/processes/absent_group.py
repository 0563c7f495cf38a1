"""Ranks among many that are not there: what one of them does before a collective starts, and how it
finds its part of a plan. Nothing is sent: the backend's calls end at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from gpumix.engine.comm.communicator import Communicator, Pending
from gpumix.engine.sharding.parameter_slice import ParameterSlice
from gpumix.engine.sharding.shard import Shard, ShardMember, ShardMemory
from gpumix.engine.sharding.shard_layout import ShardLayout
from gpumix.schema.plan.batch_shares import get_batch_share, get_batch_workers, get_micro_batch_rows
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Stage, Worker

NUMEL = 81_920  # elements of the buffer: a model does not grow with the ranks
SENT = ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single",
        "reduce_scatter_tensor")  # fmt: skip
LOOK_UPS: dict[str, Callable[[Plan, int], object]] = {
    "workers": lambda plan, rank: plan.workers,
    "rows_of": lambda plan, rank: plan.rows_of(rank),
    "rows_of_short_batch": lambda plan, rank: get_micro_batch_rows(
        plan, rank, plan.global_batch - 1
    ),
    "share_of": get_batch_share,
    "workers_of": lambda plan, rank: get_batch_workers(plan),
    "get_tp_group": lambda plan, rank: plan.get_tp_group(rank, 0),
    "parts_of": lambda plan, rank: plan.parts_of(rank, 0),
    "stages_of": lambda plan, rank: plan.stages_of(rank),
    "worker_of": lambda plan, rank: plan.worker_of(rank, 0),
    "expected_of": lambda plan, rank: plan.expected_of(rank),
}


class AbsentGroup:
    """Stands where a process group is expected: it has a name and a backend, and sends nothing."""

    group_name = "absent"

    def _get_backend(self, device: torch.device) -> AbsentGroup:
        return self

    def name(self) -> str:
        return "nccl"

    def alltoall_base(self, *_: object) -> Done:
        return Done()


class Done:
    """A collective that is over."""

    def wait(self, *_: object) -> None:
        """There is nothing to wait for."""


@contextmanager
def backend_absent() -> Iterator[None]:
    """Inside, collectives begin and end at once."""
    with ExitStack() as stack:
        for name in SENT:
            stack.enter_context(patch(f"torch.distributed.{name}", _done, create=True))
        yield


def _done(*_: Any, **__: Any) -> Done:
    return Done()


def preparations(world: int, device: str = "cpu") -> dict[str, Callable[[], Pending]]:
    """What starts a collective of the last of `world` ranks, by its name; on the device "meta"
    without copying anything.

    The gather of unequal shares is not among them: in each of its forms a rank gives the backend a
    part, or a call, for each owner.
    """
    full = torch.zeros(NUMEL, device=device)
    equal, unequal = (shard_of(world, device, equal=equal) for equal in (True, False))
    return {
        "gather, equal shares": partial(equal.gather, full),
        "reduction, equal shares": lambda: equal.reduce(full, None)[0],
        "reduction, unequal shares": lambda: unequal.reduce(full, None)[0],
    }


def shard_of(world: int, device: str, *, equal: bool) -> Shard:
    """What the last of `world` ranks has of one vector, an equal share of which is its own; of two
    others, where shares are unequal, one has less and one more."""
    group: Any = AbsentGroup()
    shares = [1 / world] * world
    if not equal:
        shares[0], shares[1] = 0.5 / world, 1.5 / world
    comm = Communicator(group, rank=world - 1, world=world)
    parameter = torch.nn.Parameter(torch.zeros(NUMEL, device=device))
    return Shard(
        "block",
        [ShardMember("weight", parameter, ParameterSlice(parameter.shape))],
        ShardLayout(3, tuple(shares), comm, tuple(range(world))),
        ShardMemory(torch.device(device), torch.float32, torch.float32),
        lambda name, of, start, end: of.detach()[start:end],
    )


def plan_of(world: int, *, tensor: int = 1) -> Plan:
    """A plan of one stage with two samples for each rank, in micro-batches of one; with `tensor`
    above 1 for tensor-parallel groups of so many."""
    workers = tuple(
        Worker(
            device=f"gpu-{rank}",
            device_class="gpu",
            samples=2 * tensor,
            micro_batch=1,
            state_share=tensor / world,
        )
        for rank in range(world)
    )
    return Plan(
        strategy="even",
        model="none",
        sequence_length=16,
        global_batch=2 * world,
        stages=(Stage(units=("block",), workers=workers, tensor=tensor),),
    )
