"""Values of torchmetrics for single steps: over all micro-batches of all ranks.

A metric's own value of a step is that of one micro-batch, and no mean of such values is the value
for all samples: of an F1 score, say. So a copy of each metric sees the micro-batches of one step,
and the ranks' states are put together as torchmetrics does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

from gpumix.engine.comm.communicator import Communicator
from gpumix.schema.errors import InputError

TOGETHER = (dim_zero_sum, dim_zero_max, dim_zero_min)  # reductions of states of fixed shape


class StepMetrics:
    """Copies of a module's metrics that see a single step.

    Args:
        comm: of all ranks.
    """

    def __init__(self, module: nn.Module, comm: Communicator) -> None:
        self._module = module
        self._comm = comm
        self._copies: dict[str, Metric] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Show the copies what metrics are called with inside the context, from nothing on."""
        for copy in self._copies.values():
            copy.reset()
        metrics = [(p, m) for p, m in self._module.named_modules() if isinstance(m, Metric)]
        for path, metric in metrics:
            vars(metric)["forward"] = self._seen(path, metric.forward)
        try:
            yield
        finally:
            for _, metric in metrics:
                del vars(metric)["forward"]

    def values(self, paths: Sequence[str]) -> dict[str, Tensor]:
        """Return the step's value of each metric in `paths`. Collective, with equal paths on all
        ranks."""
        copies = {path: self._copy(path) for path in paths}
        packed = [path for path, copy in copies.items() if _is_packed(copy)]
        if packed and self._comm.world > 1:
            self._put_together([copies[path] for path in packed])
        found: dict[str, Tensor] = {}
        for path, copy in copies.items():
            copy._to_sync = path not in packed
            copy._computed = None
            copy._update_count = max(1, copy._update_count)  # this rank may have had no samples
            found[path] = copy.compute()
        return found

    def _seen(self, path: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def seen(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                self._copy(path).update(*args, **kwargs)
            return forward(*args, **kwargs)

        return seen

    def _copy(self, path: str) -> Metric:
        if path not in self._copies:
            metric = self._module.get_submodule(path)
            assert isinstance(metric, Metric)
            copy = metric.clone()
            vars(copy).pop("forward", None)
            copy.reset()
            self._copies[path] = copy
        return self._copies[path]

    def _put_together(self, copies: Sequence[Metric]) -> None:
        """Give each copy the states of all ranks."""
        states = [(copy, name) for copy in copies for name in copy._reductions]
        flat = [getattr(copy, name).detach().double().reshape(-1) for copy, name in states]
        row = torch.cat([part.to(self._comm.device) for part in flat])
        table = self._comm.exchanged(row, "exchange of metrics")
        for (copy, name), part in zip(states, table.split([len(p) for p in flat], dim=1)):
            own = getattr(copy, name)
            reduction = copy._reductions[name]
            assert callable(reduction), "one of TOGETHER"
            together = reduction(part.reshape(len(part), *own.shape))
            setattr(copy, name, together.to(own.device, own.dtype))


def refuse_means(module: nn.Module, world: int) -> None:
    """Refuse metrics whose states are averaged over ranks.

    Raises:
        InputError: there is one, and several ranks with unlike samples.
    """
    for path, metric in module.named_modules():
        averages = isinstance(metric, Metric) and dim_zero_mean in metric._reductions.values()
        if averages and world > 1:
            raise InputError(
                f"the metric '{path}', a {type(metric).__name__}, averages states of ranks",
                why="ranks have unlike numbers of samples, which such a mean does not weigh",
                fix="keep sums and counts as its states: add_state(..., dist_reduce_fx='sum')",
            )


def _is_packed(metric: Metric) -> bool:
    """Return True if all states have fixed shapes and are put together by sums and extremes."""
    of_tensors = all(isinstance(getattr(metric, name), Tensor) for name in metric._reductions)
    return of_tensors and all(one in TOGETHER for one in metric._reductions.values())
