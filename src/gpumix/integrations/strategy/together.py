"""What ranks tell each other on Lightning's behalf, in numbers and text, never in a pickle."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gpumix.engine.comm import Communicator
from gpumix.engine.groups import all_ranks
from gpumix.hardware.runtime import synchronize
from gpumix.integrations.gathering import all_texts
from gpumix.profiler.library import join
from gpumix.spec.errors import InputError

CPU = torch.device("cpu")


class Together:
    """The collectives of a strategy."""

    _device = CPU
    _comm: Communicator | None = None
    _in_step = False

    def meet(self) -> None:
        """All ranks are there. Collective."""
        if self._comm is None:
            self._device = join()
            self._comm = all_ranks(self._device)

    @contextmanager
    def inside_a_step(self) -> Iterator[None]:
        """Inside ranks compute unlike numbers of micro-batches, and none may wait for others."""
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    def _together(self) -> Communicator:
        if self._in_step:
            raise InputError(
                "a step of the module exchanges something with other ranks",
                why="ranks have unlike numbers of micro-batches, so others would wait for ever",
                fix="self.log what is to be known of all samples; exchange in a hook after the "
                "step, such as on_train_batch_end",
            )
        return self._comm or all_ranks(self._device)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        table = self._table(tensor)
        kind = str(reduce_op or "mean").rpartition(".")[2].lower()
        if kind in ("mean", "avg"):
            table = table if table.is_floating_point() else table.double()
            return table.mean(0)
        reduced: dict[str, Callable[..., Tensor]] = {
            "sum": torch.sum,
            "max": torch.amax,
            "min": torch.amin,
        }
        if kind not in reduced:
            raise InputError(f"reduce_op={reduce_op!r}", fix="take mean, sum, max or min")
        return reduced[kind](table, 0)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """[ranks, ...], without gradients."""
        return self._table(tensor)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        comm = self._together()
        try:
            own = json.dumps(obj if comm.rank == src else None, default=str)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"a {type(obj).__name__} cannot be told to other ranks", why=str(error)
            ) from error
        return json.loads(all_texts(own, comm, "broadcast for Lightning")[src])

    def barrier(self, name: str | None = None) -> None:
        comm = self._together()
        comm.all_reduce(torch.zeros(1, device=comm.device), name or "barrier of Lightning")
        synchronize(comm.device)

    def _table(self, tensor: Tensor) -> Tensor:
        comm = self._together()
        shape, device = tensor.shape, tensor.device
        row = tensor.detach().reshape(-1).to(comm.device)
        row = row.to(torch.uint8) if row.dtype == torch.bool else row
        table = comm.exchanged(row.contiguous(), "exchange for Lightning")
        return table.view(comm.world, *shape).to(device)
