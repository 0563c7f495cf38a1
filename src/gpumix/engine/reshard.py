"""Change of a running engine's plan: a new split of the samples, and new shares of the state.

With several stages, workers of a stage give each other whole micro-batches: the batch is cut as
before, so other stages send and take the same messages, to and from other ranks.

Ranks send each other the missing elements of each flat buffer, one buffer after another, so that at
most one buffer exists twice. Buffers used in steps stay in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from gpumix.engine.comm.communicator import Communicator
from gpumix.engine.offload.host_offload import allocate_on_host
from gpumix.engine.optimizers.overlapped_step import is_elementwise
from gpumix.engine.sharding.bucket import Bucket
from gpumix.engine.sharding.flat_group import reserve_reduction_memory
from gpumix.engine.sharding.shard import Shard
from gpumix.engine.sharding.shard_layout import ShardLayout
from gpumix.engine.sharding.state_dict import get_block_range, get_state_block
from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import Plan


def needs_state_move(before: Plan, after: Plan) -> bool:
    """Return True if two plans, apart from samples, differ in shares of the state.

    Raises:
        InputError: they differ in more, or in something that cannot change during training.
    """
    if _without_parts(before) != _without_parts(after) or not _has_same_micro_batches(
        before, after
    ):
        raise InputError(
            "a running engine can change only the split of the samples or of the state",
            code="reshard-of-other-change",
            why="in pipeline stages only whole micro-batches of a wave can move between workers",
            fix="save a checkpoint, and load it into an engine with that plan",
        )
    moved = [stage.shares for stage in before.stages] != [stage.shares for stage in after.stages]
    if moved and not can_move_state(after):
        raise InputError(
            "a running engine cannot move the state of this plan",
            code="reshard-unsupported",
            why="state can move where it is sharded over all ranks (ZeRO 1 to 3, sharding 'all', "
            "no tensor-parallel groups, one stage) by collectives that take any shares",
            fix="save a checkpoint, and load it into an engine with that plan",
        )
    return moved


def can_move_state(plan: Plan) -> bool:
    """Return True if ranks of a plan can give each other state during training."""
    forms = (plan.collectives.gather, plan.collectives.reduce)
    return (
        len(plan.stages) == 1
        and plan.zero_stage > 0
        and plan.sharding == "all"
        and not plan.uses_tensor_parallel
        and "native" not in forms
    )


def _without_parts(plan: Plan) -> list[Any]:
    undivided = {"samples": 0, "micro_batch": 0, "state_share": 0.0}
    stages = [
        s.model_copy(update={"workers": tuple(w.model_copy(update=undivided) for w in s.workers)})
        for s in plan.stages
    ]
    unsaid = {"stages": (), "prediction": None, "reasons": None}
    return [*stages, plan.model_copy(update=unsaid)]


def _has_same_micro_batches(before: Plan, after: Plan) -> bool:
    """Return True if all stages, if several, process equal micro-batches in equal waves."""
    if len(before.stages) == 1:
        return True
    cuts = [
        {tuple((one.wave, one.rows) for one in s.micro_batches(p.waves)) for s in p.stages}
        for p in (before, after)
    ]
    return cuts[0] == cuts[1]


def move_state(buckets: Sequence[Bucket], layout: ShardLayout, optimizer: Optimizer | None) -> None:
    """Divide the parameters of `buckets`, and the state of `optimizer`, by `layout`. Collective,
    between two steps, without gradients.

    Raises:
        InputError: the optimizer does not update each element by itself.
    """
    if optimizer is None or not is_elementwise(optimizer):
        what = "an optimizer that was not given" if optimizer is None else type(optimizer).__name__
        raise InputError(
            f"the state of {what} cannot be divided anew while a run trains",
            code="reshard-unsupported",
            fix="save a checkpoint, and load it into an engine with the other plan",
        )
    for bucket in buckets:
        for group in bucket.groups:
            for shard in group.shards:
                _move_shard(shard, layout, optimizer)
        bucket.values_changed()
    reserve_reduction_memory([group for bucket in buckets for group in bucket.trainable])


def _move_shard(shard: Shard, layout: ShardLayout, optimizer: Optimizer) -> None:
    before, after = shard.intervals.offsets, layout.intervals(shard.numels).offsets
    if before == after:
        return
    comm = layout.comm
    label = f"move of the state of unit '{shard.label}'"
    kept = {}
    for vector in list(_iterate_state_vectors(shard, optimizer)):
        states = [optimizer.state[shard.pieces[number].parameter] for number in vector.pieces]
        own = torch.cat([state.pop(vector.key) for state in states])
        old, new = (vector.locate(shard.numels, cuts) for cuts in (before, after))
        moved = _exchange_interval(own, old, new, comm, label)
        del own
        if layout.on_host:
            there = allocate_on_host(moved.numel(), moved.dtype, comm.device)
            moved = there.copy_(moved)
        kept[vector] = moved
    shard.divide(layout, _exchange_interval(shard.master, before, after, comm, label))
    for vector, flat in kept.items():
        pieces = [shard.pieces[number] for number in vector.pieces]
        ranges = [get_block_range(piece, vector.block) for piece in pieces]
        for piece, part in zip(pieces, flat.split([end - begin for begin, end in ranges])):
            optimizer.state[piece.parameter][vector.key] = part


class _StateVector(NamedTuple):
    """States of one name and dtype, of some of a shard's pieces, in a row: a value for every
    `block` elements."""

    key: str
    block: int
    pieces: tuple[int, ...]

    def locate(self, numels: Sequence[int], cuts: Sequence[int]) -> tuple[int, ...]:
        """Return the cuts of the vector, by those of the shard's parameters of `numels`."""
        begins = list(accumulate(numels, initial=0))
        return tuple(
            sum(-(-min(max(cut - begins[n], 0), numels[n]) // self.block) for n in self.pieces)
            for cut in cuts
        )


def _iterate_state_vectors(shard: Shard, optimizer: Optimizer) -> Iterator[_StateVector]:
    """Yield the vectors of a shard's state, equal on all ranks: each has a piece of every
    parameter, and has state of the parameters that ever had a gradient."""
    found: dict[tuple[str, str], list[int]] = {}
    for number, piece in enumerate(shard.pieces if shard.trainable else ()):
        for key, value in optimizer.state.get(piece.parameter, {}).items():
            in_blocks = get_state_block(optimizer, key) > 1
            if in_blocks or getattr(value, "shape", None) == piece.local.shape:
                found.setdefault((key, str(value.dtype)), []).append(number)
    for (key, _), numbers in sorted(found.items()):
        yield _StateVector(key, get_state_block(optimizer, key), tuple(numbers))


def _exchange_interval(
    own: torch.Tensor, before: Sequence[int], after: Sequence[int], comm: Communicator, label: str
) -> torch.Tensor:
    """Return this rank's interval by `after`, from `own` by `before`; both are buffer offsets."""
    rank = comm.rank
    given = [_count_overlap(before, rank, after, other) for other in range(comm.world)]
    taken = [_count_overlap(before, other, after, rank) for other in range(comm.world)]
    sent = own.to(comm.device)  # possibly from the host
    received, pending = comm.exchange_parts(sent, given, taken, label)
    pending.wait()
    return received.to(own.device)


def _count_overlap(before: Sequence[int], giver: int, after: Sequence[int], taker: int) -> int:
    """Count the elements that `giver` had and `taker` is to have."""
    low = max(before[giver], after[taker])
    return max(0, min(before[giver + 1], after[taker + 1]) - low)
