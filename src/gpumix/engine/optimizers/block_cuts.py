"""Check that no cut goes through elements whose state an optimizer quantises together."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from torch.optim import Optimizer

from gpumix.engine.optimizers.adamw_8bit import AdamW8bit, is_state_quantised
from gpumix.engine.sharding.shard import Piece, Shard
from gpumix.schema.errors import InputError


def check_block_cuts(shards: Iterable[Shard], optimizer: Optimizer) -> None:
    """Check the cuts of trained vectors for an optimizer's blocks. All ranks that divide a vector
    find the same.

    Raises:
        InputError: a cut, or a part of a tensor-parallel group, goes through a block.
    """
    if not isinstance(optimizer, AdamW8bit):
        return
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for shard in shards:
        begins = accumulate(shard.numels, initial=0)
        for piece, begin in zip(shard.pieces, begins):
            group = groups.get(id(piece.parameter))
            if group is None or not is_state_quantised(piece.parameter, group):
                continue
            _check_parts(piece, optimizer.block)
            cuts = [cut - begin for cut in shard.cuts]
            _check_cuts(piece, cuts, optimizer.block)


def _check_cuts(piece: Piece, cuts: Iterable[int], block: int) -> None:
    for cut in cuts:
        if 0 < cut < piece.window.numel and cut % block:
            raise InputError(
                "the plan cuts through elements whose optimizer state is quantised together",
                code="plan-cuts-quantised-blocks",
                where=f"a share ends at element {cut} of parameter '{piece.name}'",
                why=f"AdamW8bit quantises blocks of {block} elements",
                fix="write `optimizer_state: 8bit` in the plan, which moves cuts to the ends of "
                "blocks; or plan for this optimizer",
            )


def _check_parts(piece: Piece, block: int) -> None:
    try:
        piece.window.of_blocks(block)
    except ValueError as error:
        raise InputError(
            "tensor parallelism divides elements whose optimizer state is quantised together",
            code="tensor-parallel-cuts-blocks",
            where=f"parameter '{piece.name}' of shape {tuple(piece.shape)}",
            why=f"AdamW8bit quantises blocks of {block} elements, and {error}",
            fix="plan without tensor parallelism, or use torch.optim.AdamW",
        ) from None
