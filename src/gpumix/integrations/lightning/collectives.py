"""Collectives of ranks for Lightning, in numbers and text, never in a pickle."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from gpumix.engine.comm.communicator import Communicator
from gpumix.engine.comm.process_groups import make_communicator
from gpumix.engine.engine import Engine
from gpumix.hardware.runtime import synchronize
from gpumix.integrations.common.gather import gather_texts
from gpumix.profiler.api import join_ranks
from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import Plan

CPU = torch.device("cpu")
_log = logging.getLogger(__name__)


def is_output_rank(plan: Plan, rank: int) -> bool:
    """Return True for the first rank of a tensor-parallel group in the last stage: outputs of other
    ranks do not count."""
    stage = len(plan.stages) - 1
    return stage in plan.stages_of(rank) and plan.get_tp_group(rank, stage)[0] == rank


class StrategyCollectives:
    """Collectives of a strategy.

    Attributes:
        is_distributed: makes Lightning call the collectives.
    """

    is_distributed = True
    lightning_module: LightningModule | None
    _engine: Engine | None = None

    _device = CPU
    _comm: Communicator | None = None
    _in_step = False

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self._earlier_broadcasts: dict[tuple[int, str], str] = {}  # by rank, and its own text

    @property
    def plan(self) -> Plan | None:
        """The plan of the training, once made."""
        return None if self._engine is None else self._engine.plan

    def join_ranks(self) -> None:
        """Join the other ranks. Collective."""
        if self._comm is None:
            self._device = join_ranks()
            self._comm = make_communicator(self._device)

    @contextmanager
    def forbid_collectives(self) -> Iterator[None]:
        """Forbid collectives inside the context: ranks compute different numbers of micro-batches,
        and none may wait for another."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def _together(self) -> Communicator:
        if self._in_step:
            raise InputError(
                "a step of the module exchanges something with other ranks",
                code="collective-in-step",
                why="ranks have unlike numbers of micro-batches, so others would wait for ever",
                fix="self.log what is to be known of all samples; exchange in a hook after the "
                "step, such as on_train_batch_end",
            )
        return self._comm or make_communicator(self._device)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        table = self._counted(tensor)
        kind = str(reduce_op or "mean").rpartition(".")[2].lower()
        if kind in ("mean", "avg"):
            table = table if table.is_floating_point() else table.double()
            if not torch.allclose(table, table[:1].expand_as(table), equal_nan=True):
                self._report_unequal_values(table)
            return table.mean(0)
        reduced: dict[str, Callable[..., Tensor]] = {
            "sum": torch.sum,
            "max": torch.amax,
            "min": torch.amin,
        }
        if kind not in reduced:
            raise InputError(
                f"reduce_op={reduce_op!r}",
                code="reduce-op-unsupported",
                fix="take mean, sum, max or min",
            )
        return reduced[kind](table, 0)

    def _report_unequal_values(self, table: Tensor) -> None:
        """Report a mean over ranks of a value differing by rank; in an evaluation, where the value
        is of each rank's own samples, raise InputError."""
        module = self.lightning_module
        trainer: Any = None if module is None else module.trainer
        values = ", ".join(f"{float(value):.4g}" for value in table.reshape(len(table), -1)[:8, 0])
        problem = f"a mean over ranks is asked for, and their values differ: {values}"
        why = "each is of a rank's own samples, of which ranks have unlike numbers, by the plan"
        fix = (
            "self.log it in the step; or add up sums and counts, and put them together: "
            "self.all_gather(total).sum() / self.all_gather(count).sum()"
        )
        if trainer is not None and (trainer.evaluating or trainer.predicting):
            raise InputError(
                problem,
                code="mean-of-unequal-ranks",
                where="a hook behind the steps",
                why=why,
                fix=fix,
            )
        _log.warning("%s; where each is of a rank's own samples: %s", problem, fix)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        found = self._gather_table(torch.tensor(float(decision))).bool()
        return bool(found.all() if all else found.any())

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return [ranks, ...] of the ranks whose samples count, without gradients."""
        return self._counted(tensor)

    def _counted(self, tensor: Tensor) -> Tensor:
        """Return [ranks, ...] of counting ranks: of ranks computing equal samples only one
        counts."""
        table, plan = self._gather_table(tensor), self.plan
        return (
            table
            if plan is None
            else table[[r for r in range(len(table)) if is_output_rank(plan, r)]]
        )

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the value of rank `src`. Inside a step only earlier broadcasts are available, such
        as trainer.log_dir."""
        try:
            own = json.dumps(obj, default=str)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"a {type(obj).__name__} cannot be told to other ranks",
                code="object-not-broadcastable",
                why=str(error),
            ) from error
        if self._in_step and (src, own) in self._earlier_broadcasts:
            return json.loads(self._earlier_broadcasts[src, own])
        comm = self._together()
        texts = gather_texts(own if comm.rank == src else "", comm, "broadcast for Lightning")
        self._earlier_broadcasts[src, own] = texts[src]
        return json.loads(texts[src])

    def barrier(self, name: str | None = None) -> None:
        comm = self._together()
        comm.all_reduce(torch.zeros(1, device=comm.device), name or "barrier of Lightning")
        synchronize(comm.device)

    def _gather_table(self, tensor: Tensor) -> Tensor:
        comm = self._together()
        shape, device = tensor.shape, tensor.device
        row = tensor.detach().reshape(-1).to(comm.device)
        row = row.to(torch.uint8) if row.dtype == torch.bool else row
        table = comm.exchanged(row.contiguous(), "exchange for Lightning")
        return table.view(comm.world, *shape).to(device)
