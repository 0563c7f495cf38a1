"""Values of torchmetrics for single steps: over all micro-batches of all ranks.

A metric's own value of a step is that of one micro-batch, and no mean of such values is the value
for all samples: of an F1 score, say. So a copy of each metric sees the micro-batches of one step,
and the ranks' states are put together as torchmetrics does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

from gpumix.engine.comm.communicator import Communicator
from gpumix.hardware.host.replaced_attributes import replace_attributes
from gpumix.schema.errors import InputError

TOGETHER = (dim_zero_sum, dim_zero_max, dim_zero_min)  # reductions of states of fixed shape


class StepMetrics:
    """Copies of a module's metrics that see a single step.

    A metric called with a single number, such as a mean loss, gets the number of the whole batch,
    once: `note` receives those of micro-batches, and `update` the one they combine to.

    Args:
        comm: of all ranks.
        note: called with the path of a metric and the number.
    """

    def __init__(
        self, module: nn.Module, comm: Communicator, note: Callable[[str, Any], None]
    ) -> None:
        self._module = module
        self._comm = comm
        self._note = note
        self._copies: dict[str, Metric] = {}
        self._compares = False

    @contextmanager
    def listening(self, *, compares: bool = False) -> Iterator[None]:
        """Show the copies what metrics are called with inside the context, from nothing on.

        Args:
            compares: note numbers only, in a comparison of samples that are no step.
        """
        self._compares = compares
        for copy in () if compares else self._copies.values():
            copy.reset()
        with ExitStack() as stack:
            for path, metric in self._module.named_modules():
                if isinstance(metric, Metric):
                    seen = self._seen(path, metric, metric.forward, metric.update)
                    stack.enter_context(replace_attributes(metric, **seen))
            yield

    def update(self, path: str, value: float, kind: str) -> None:
        """Update a metric with the number of a whole batch, on the first rank for all.

        Args:
            kind: of the numbers of micro-batches, see `kind_of`.
        """
        metric = self._metric(path)
        number = value if value % 1 and kind in ("int", "bool") else _as_kind(value, kind)
        if isinstance(number, Tensor):
            number = number.to(metric.device)
        for one in (metric, self._copy(path)):
            if self._comm.rank == 0:
                one.update(number)
            else:
                one._update_count, one._computed = one._update_count + 1, None

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

    def _seen(
        self,
        path: str,
        metric: Metric,
        forward: Callable[..., Any],
        update: Callable[..., Any],
    ) -> dict[str, Callable[..., Any]]:
        """Return what stands in for a metric's methods: functions, which copies of it share."""

        def seen_forward(*args: Any, **kwargs: Any) -> Any:
            if _is_number(args, kwargs):
                self._note(path, args[0])
                value = torch.as_tensor(args[0]).detach()
                vars(metric)["_forward_cache"] = value
                return value
            if not self._compares:
                with torch.no_grad():
                    self._copy(path).update(*args, **kwargs)
            return forward(*args, **kwargs)

        def seen_update(*args: Any, **kwargs: Any) -> Any:
            if _is_number(args, kwargs):
                self._note(path, args[0])
                return None
            return update(*args, **kwargs)

        return {"forward": seen_forward, "update": seen_update}

    def _copy(self, path: str) -> Metric:
        if path not in self._copies:
            copy = self._metric(path).clone()
            vars(copy).pop("forward", None)
            copy.reset()
            self._copies[path] = copy
        return self._copies[path]

    def _metric(self, path: str) -> Metric:
        metric = self._module.get_submodule(path)
        assert isinstance(metric, Metric)
        return metric

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
    """Raise InputError for a metric whose states are averaged over ranks with unlike samples."""
    for path, metric in module.named_modules():
        averages = isinstance(metric, Metric) and dim_zero_mean in metric._reductions.values()
        if averages and world > 1:
            raise InputError(
                f"the metric '{path}', a {type(metric).__name__}, averages states of ranks",
                code="metric-averages-ranks",
                why="ranks have unlike numbers of samples, which such a mean does not weigh",
                fix="keep sums and counts as its states: add_state(..., dist_reduce_fx='sum')",
            )


def kind_of(number: Any) -> str:
    """Return the type of a number, or the dtype of a tensor."""
    return str(number.dtype) if isinstance(number, Tensor) else type(number).__name__


def _as_kind(value: float, kind: str) -> Any:
    if kind.startswith("torch."):
        return torch.tensor(value, dtype=getattr(torch, kind.removeprefix("torch.")))
    return int(value) if kind in ("int", "bool") else value


def _is_number(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True for a single number, which no sample has by itself."""
    if len(args) != 1 or kwargs:
        return False
    return isinstance(args[0], int | float) or (isinstance(args[0], Tensor) and not args[0].dim())


def _is_packed(metric: Metric) -> bool:
    """Return True if all states have fixed shapes and are put together by sums and extremes."""
    of_tensors = all(isinstance(getattr(metric, name), Tensor) for name in metric._reductions)
    return of_tensors and all(one in TOGETHER for one in metric._reductions.values())
