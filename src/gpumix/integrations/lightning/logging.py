"""Values logged for micro-batches, combined to one value per batch, equal on all ranks.

Ranks have different numbers of micro-batches, possibly none, so a rank's value means nothing alone.
Values combine by a rule found by comparison (`combining`). Means run over the items of the
loss's mean on all ranks, or over `batch_size=` if given. Lightning receives values once, after the
step.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from gpumix.engine.comm.communicator import Communicator
from gpumix.engine.loss.loss_graph import find_denominators
from gpumix.integrations.common.forward import detach_leaf
from gpumix.integrations.common.gather import gather_texts
from gpumix.integrations.lightning.combining import (
    DIVIDED,
    LOSS,
    MAX,
    MEAN,
    MEANS,
    MIN,
    SAMPLES,
    SUM,
    CombiningRules,
    LoggedPart,
    find_fitting_rules,
)
from gpumix.integrations.lightning.step_metrics import StepMetrics, kind_of
from gpumix.schema.errors import InputError

_log = logging.getLogger(__name__)
REDUCED = "reduce_fx"
COMPARED = "comparison of logged values"
METRIC_KEY, EXPLICIT = "metric", "batch_size"
# A metric that gets this number, which is not logged by itself; and the number's type.
UPDATED, KIND = "updated", "kind"
PASSED_ON = ("prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx", REDUCED)


class LoggedValue(NamedTuple):
    """A logged value.

    Attributes:
        size: `batch_size`, if the module gives it.
        divided: the denominator in its graph; None if not read or unknown.
    """

    name: str
    value: Any
    settings: dict[str, Any]
    size: Any = None
    divided: Tensor | None = None


@dataclass
class MicroBatchLog:
    """Values logged for a micro-batch, with its weight and number of samples."""

    weight: Tensor
    samples: int
    values: list[LoggedValue] = field(default_factory=list)


# A micro-batch's forward is a coroutine, which may pause inside the module's step.
_current: ContextVar[MicroBatchLog | None] = ContextVar("gpumix_logged_micro_batch", default=None)


class StepLogs:
    """Logged values of a module's step: training, validation or test.

    Args:
        tells: this rank's values count: of ranks with equal samples only one rank's do.
        by_step: by default values are of single steps.
    """

    def __init__(
        self, module: LightningModule, comm: Communicator, *, tells: bool, by_step: bool
    ) -> None:
        self._module = module
        self._comm = comm
        self._tells = tells
        self._by_step = by_step
        self._known: dict[str, dict[str, Any]] = {}  # settings by name, equal on all ranks
        self._own: dict[str, dict[str, Any]] = {}
        self._seen: list[MicroBatchLog] = []
        self._ways = CombiningRules()
        self._metrics = StepMetrics(module, comm, self._note_update)

    @property
    def reads_graphs(self) -> bool:
        """True if values should be logged with their graphs."""
        return self._ways.needs_comparison or DIVIDED in self._ways.found

    @property
    def compares(self) -> bool:
        """True if another batch should be logged in parts, for `compare`."""
        return self._ways.needs_comparison

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Receive the module's logging calls inside the context."""
        self._seen = []
        self._module.log = self._note  # type: ignore[assignment, method-assign]
        try:
            with self._metrics.listening():
                yield
        finally:
            del self._module.log

    @contextmanager
    def micro_batch(self, weight: Tensor, samples: int) -> Iterator[MicroBatchLog]:
        """Receive values of a micro-batch inside the context; drop the values of a failed one."""
        with self._noted(weight, samples) as noted:
            yield noted
        if self._tells:
            self._seen.append(noted)

    @contextmanager
    def part(self, weight: Tensor, samples: int, told: list[LoggedPart]) -> Iterator[MicroBatchLog]:
        """Receive values of compared samples inside the context; append them to `told`."""
        with self._noted(weight, samples) as noted:
            yield noted
        values = {}
        for one in noted.values:
            self._own[one.name] = one.settings
            if not one.settings[METRIC_KEY]:
                weight = noted.weight if one.size is None else one.size
                divided = math.nan if one.divided is None else one.divided
                values[one.name] = _number(one.value), _number(weight), _number(divided)
        told.append(LoggedPart(values, samples, _number(noted.weight)))

    @contextmanager
    def _noted(self, weight: Tensor, samples: int) -> Iterator[MicroBatchLog]:
        noted = MicroBatchLog(weight.detach(), samples)
        token = _current.set(noted)
        try:
            yield noted
        finally:
            _current.reset(token)

    def compare(self, parts: Sequence[LoggedPart]) -> None:
        """Find the rules combining values of micro-batches. Collective.

        Args:
            parts: values of some samples, of the first and of the rest; empty on ranks that did not
                compute them.
        """
        found: dict[str, list[str]] = {}
        if parts:
            whole, first, others = parts
            reduced = {name: self._own[name][REDUCED] for name in whole.values}
            found = find_fitting_rules(whole, (first, others), reduced)
        every = [json.loads(text) for text in gather_texts(json.dumps(found), self._comm, COMPARED)]
        lost = self._ways.take(next(filter(None, every), {}))
        if lost and self._comm.rank == 0:
            _log.warning(
                "%s: no mean, sum, maximum or minimum of the values of micro-batches is that of a "
                "batch; it is combined by its reduce_fx, and depends on the plan. Log what adds "
                "up, and compute with it behind the epoch, or log a metric of torchmetrics",
                ", ".join(map(repr, lost)),
            )

    def _note(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        **settings: Any,
    ) -> None:
        noted = _current.get()
        assert noted is not None, "a step is computed micro-batch by micro-batch"
        weight = settings.get(EXPLICIT)
        own = self._settings(
            name, {**settings, "prog_bar": prog_bar, "logger": logger}, explicit=weight is not None
        )
        if not isinstance(value, Metric):
            noted.values.append(
                LoggedValue(name, detach_leaf(value), own, weight, self._divided(value))
            )
            return
        path = settings.get("metric_attribute") or _path_of(self._module, value)
        step = own["on_step"] if own["on_step"] is not None else self._by_step
        epoch = own["on_epoch"] if own["on_epoch"] is not None else not self._by_step
        both = step and epoch
        if step and value._forward_cache is not None:  # missing if the metric was only updated
            of_step = own | {"on_step": True, "on_epoch": False, METRIC_KEY: path}
            noted.values.append(LoggedValue(f"{name}_step" if both else name, 0.0, of_step, weight))
        if epoch:
            of_epoch = own | {"on_step": False, "on_epoch": True, METRIC_KEY: path}
            noted.values.append(
                LoggedValue(f"{name}_epoch" if both else name, 0.0, of_epoch, weight)
            )
        if both:  # callbacks find the epoch's value by the bare name
            of_callbacks = of_epoch | {"logger": False, "prog_bar": False}
            noted.values.append(LoggedValue(name, 0.0, of_callbacks, weight))

    def _note_update(self, path: str, value: Any) -> None:
        noted = _current.get()
        assert noted is not None, "a step is computed micro-batch by micro-batch"
        number = sum(one.settings[UPDATED] == path for one in noted.values)
        own = self._settings(path, {}, explicit=False) | {UPDATED: path, KIND: kind_of(value)}
        name = f"{path}, update {number + 1}"
        noted.values.append(LoggedValue(name, detach_leaf(value), own, None, self._divided(value)))

    def _divided(self, value: Any) -> Tensor | None:
        """Return the denominator in a value's graph, or None."""
        if not (isinstance(value, Tensor) and value.requires_grad and value.numel() == 1):
            return None
        if not self.reads_graphs:
            return None
        found = find_denominators(value)
        alike = found and all(torch.equal(one, found[0]) for one in found)
        return found[0] if alike else None

    def _settings(self, name: str, given: dict[str, Any], *, explicit: bool) -> dict[str, Any]:
        reduced = given.get(REDUCED, MEAN)
        reduced = reduced if isinstance(reduced, str) else getattr(reduced, "__name__", "")
        reduced = {"avg": MEAN}.get(reduced.lower(), reduced.lower())
        if reduced not in (MEAN, SUM, MAX, MIN):
            raise InputError(
                f"'{name}' is logged with a reduce_fx of its own",
                why="Lightning puts values of steps together by these alone",
                fix=f"take one of {MEAN}, {SUM}, {MAX}, {MIN}",
            )
        passed_on = {key: given.get(key) for key in PASSED_ON if given.get(key) is not None}
        named = {
            "on_step": None,
            "on_epoch": None,
            METRIC_KEY: None,
            UPDATED: None,
            EXPLICIT: explicit,
        }
        return named | passed_on | {REDUCED: reduced}

    # -- together ----------------------------------------------------------------------------------

    def publish(self, samples: int) -> None:
        """Pass values logged for a batch of `samples` to Lightning. Collective."""
        own = self._summed()
        table = self._exchanged(own)
        if table[:, 0].any():
            told = {name: self._own[name] for name in own}
            for text in gather_texts(json.dumps(told), self._comm, "names that are logged"):
                self._known = json.loads(text) | self._known
            table = self._exchanged(own)
        columns = table[:, 1:].reshape(len(table), -1, 3).unbind(dim=1)
        logged = [
            (*known, of_name.T)
            for known, of_name in zip(self._known.items(), columns)
            if (of_name[:, 1] > 0).any()
        ]
        updates = [one for one in logged if one[1][UPDATED]]
        for name, settings, (values, weights, _) in updates:
            value = self._combined(name, settings, values, weights)
            self._metrics.update(settings[UPDATED], value, settings[KIND])
        self._compute([settings for _, settings, _ in logged])
        for name, settings, (values, weights, sizes) in logged:
            if not settings[UPDATED]:
                size = int(sizes.sum()) if settings[EXPLICIT] else samples
                self._tell(name, settings, self._combined(name, settings, values, weights), size)

    def _combined(
        self, name: str, settings: dict[str, Any], values: Tensor, weights: Tensor
    ) -> float:
        """Return the value of all ranks."""
        way, there = self._way(name, settings), weights > 0
        values, weights = values[there], weights[there]
        if way in MEANS:
            return math.fsum(values.tolist()) / math.fsum(weights.tolist())
        return float(_reduce_values(way, values))

    def _compute(self, logged: Sequence[dict[str, Any]]) -> None:
        """Give metrics logged of steps this step's value, which Lightning asks them for."""
        paths = [one[METRIC_KEY] for one in logged if one[METRIC_KEY] and one["on_step"]]
        for path, value in self._metrics.values([*dict.fromkeys(paths)]).items():
            vars(self._module.get_submodule(path))["_forward_cache"] = value

    def _exchanged(self, own: dict[str, tuple[Tensor, ...]]) -> Tensor:
        """Return a table by rank: 1 if the rank has names not known to all; then value, weight and
        size of each name."""
        new = float(any(name not in self._known for name in own))
        nothing = (torch.zeros(()),) * 3
        pairs = [part for name in self._known for part in own.get(name, nothing)]
        row = torch.stack(
            [part.double().to(self._comm.device) for part in (torch.tensor(new), *pairs)]
        )
        table = self._comm.exchanged(row, "exchange of logged values")
        return table.cpu()

    def _summed(self) -> dict[str, tuple[Tensor, ...]]:
        """Return value, weight and size of this rank's micro-batches, by name."""
        by_name: dict[str, list[tuple[Tensor, ...]]] = {}
        for noted in self._seen:
            for one in noted.values:
                self._own[one.name] = one.settings
                size = 0 if one.size is None else one.size
                row = one.value, self._weight(one, noted), size
                by_name.setdefault(one.name, []).append(
                    tuple(torch.as_tensor(number).double() for number in row)
                )
        self._seen = []
        return {name: self._reduced(name, rows) for name, rows in by_name.items()}

    def _weight(self, one: LoggedValue, noted: MicroBatchLog) -> Any:
        """Return the weight of a micro-batch's value in a mean.

        Raises:
            InputError: the rule needs the graph's denominator, and the graph has none.
        """
        way = self._way(one.name, one.settings)
        if way == DIVIDED and one.divided is None:
            raise InputError(
                f"'{one.name}' is computed in another way than when it was logged first",
                why="what it is a mean over was read from its graph, which is another one now",
                fix="say what it is a mean over: self.log(..., batch_size=...)",
            )
        if way == DIVIDED:
            return one.divided
        if way == SAMPLES:
            return noted.samples
        if way == LOSS:
            return noted.weight
        return noted.weight if one.size is None else one.size

    def _way(self, name: str, settings: dict[str, Any]) -> str:
        return self._ways.of(name, settings[REDUCED])

    def _reduced(self, name: str, rows: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        device = rows[0][0].device
        values, weights, sizes = (torch.stack([n.to(device) for n in each]) for each in zip(*rows))
        way = self._way(name, self._own[name])
        if way in MEANS:
            # A mean of no labels is NaN, with weight 0.
            value = torch.where(weights > 0, values * weights, 0.0).sum()
            return value, weights.sum(), sizes.sum()
        return _reduce_values(way, values), torch.ones(()), sizes.sum()

    def _tell(self, name: str, settings: dict[str, Any], value: float, size: int) -> None:
        passed_on = {key: settings[key] for key in PASSED_ON if settings.get(key) is not None}
        told: Any = value
        if settings[
            METRIC_KEY
        ]:  # the metric itself, which Lightning resets at the end of the epoch
            told = self._module.get_submodule(settings[METRIC_KEY])
            passed_on["metric_attribute"] = settings[METRIC_KEY]
        LightningModule.log(self._module, name, told, batch_size=size, **passed_on)


def _number(value: Any) -> float:
    return float(torch.as_tensor(value))


def _reduce_values(way: str, values: Tensor) -> Tensor:
    return values.sum() if way == SUM else values.max() if way == MAX else values.min()


def ignore_log(name: str, value: Any, **settings: Any) -> None:
    """Log nothing; replaces `log` while devices are measured."""
    return


def _path_of(module: LightningModule, metric: Metric) -> str:
    found = next((path for path, one in module.named_modules() if one is metric), None)
    if found is None:
        raise InputError(
            f"a {type(metric).__name__} is logged that is no attribute of the module",
            fix="make it one in __init__: self.metric = ...",
        )
    return found
