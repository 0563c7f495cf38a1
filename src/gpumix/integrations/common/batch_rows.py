"""Rows of a batch belonging to this rank: by the plan, once a plan exists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gpumix.schema.errors import InputError
from gpumix.schema.plan.batch_shares import get_batch_share, get_micro_batch_rows
from gpumix.schema.plan.plan import Plan

if TYPE_CHECKING:  # workers of loaders import this module, without an engine
    from gpumix.engine.engine import Engine

RowAssignment = Callable[[int], Sequence[range]]
"""Rows of this rank in a global batch of a given size, micro-batch by micro-batch."""


class PlannedRows:
    """Rows by the plan of an engine made before the first batch is read; equal shares if no engine
    is made. A loader's worker receives the plan, and no other state of the program.

    Args:
        engine: returns the engine, or None.
        rows: of a plan, a rank and a number of samples.
        rank, world: of this process.
    """

    def __init__(
        self,
        engine: Callable[[], Engine | None],
        rows: Callable[[Plan, int, int], Sequence[range]],
        *,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self._engine = engine
        self._rows = rows
        self._equal = partial(split_rows_equally, world, rank)

    def __call__(self, samples: int) -> Sequence[range]:
        engine = self._engine()
        if engine is None:
            return self._equal(samples)
        return self._rows(engine.plan, engine.comm.rank, samples)

    def __reduce__(self) -> tuple[Any, ...]:
        engine = self._engine()
        if engine is None:
            return partial, (split_rows_equally, *self._equal.args)
        return partial, (self._rows, engine.plan, engine.comm.rank)


def split_rows_equally(world: int, rank: int, samples: int) -> Sequence[range]:
    """Return the rows of a rank without a plan, in equal shares."""
    return (range(samples * rank // world, samples * (rank + 1) // world),)


def get_evaluation_rows(plan: Plan, rank: int, samples: int) -> Sequence[range]:
    """Return a rank's rows of an evaluated batch."""
    return get_batch_share(plan, rank).rows(samples)


def get_loop_rows(plan: Plan, rank: int, samples: int) -> Sequence[range]:
    """Return a rank's rows of a loop's batch, which may be trained on.

    Raises:
        InputError: the batch is larger than the plan's.
    """
    if samples > plan.global_batch:
        raise InputError(
            f"a batch of {samples} samples of all ranks, by a plan for {plan.global_batch}",
            code="global-batch-mismatch",
            why="the plan is for the batches of the loader that accelerator.prepare was given "
            "first",
            fix="accelerator.prepare(model, optimizer, train_loader, eval_loader): first the one "
            "with the largest batches",
        )
    return get_micro_batch_rows(plan, rank, samples)
