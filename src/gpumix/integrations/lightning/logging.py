"""Values logged for micro-batches, combined to one value per batch, equal on all ranks.

Ranks have different numbers of micro-batches, possibly none, so a rank's value means nothing alone.
Values combine by a rule found by comparison (`logged_value_rules`). Means run over the items of the
loss's mean on all ranks, over `batch_size=` if given, over what the value's graph is divided by, or
over a count of something in the batch (`batch_counts`). Values of the rules that fitted so far are
exchanged; where they differ, the batch is compared again. Lightning receives values once, after the
step.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from gpumix.engine.batch.batch_split import count_samples
from gpumix.engine.comm.communicator import Communicator
from gpumix.engine.loss.loss_graph import find_denominators
from gpumix.integrations.common.forward import detach_leaf
from gpumix.integrations.common.gather import gather_texts
from gpumix.integrations.lightning.batch_counts import AllNames, count_in_batch
from gpumix.integrations.lightning.logged_value_rules import (
    DIVIDED,
    LOSS,
    MAX,
    MEAN,
    MIN,
    SAMPLES,
    SUM,
    UNWEIGHTED,
    CombiningRules,
    LoggedPart,
    find_fitting_rules,
    is_alike,
)
from gpumix.integrations.lightning.step_metrics import StepMetrics, kind_of
from gpumix.schema.errors import InputError

_log = logging.getLogger(__name__)
REDUCED = "reduce_fx"
COMPARED = "comparison of logged values"
METRIC_KEY, EXPLICIT = "metric", "batch_size"
# A metric that gets this number, which is not logged by itself; and the number's type.
UPDATED, KIND = "updated", "kind"
# Batches of an evaluation logged with graphs: the first ones and then one of several. Modules may
# keep what they log, and its graph with it.
GRAPH_BATCHES, GRAPH_EVERY = 8, 16
PASSED_ON = ("prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx", REDUCED)


class LoggedValue(NamedTuple):
    """A logged value.

    Attributes:
        size: `batch_size`, if the module gives it.
        divided: the denominator in its graph; NaN if not read or unknown.
    """

    name: str
    value: Any
    settings: dict[str, Any]
    size: Any = None
    divided: Tensor | float = math.nan


@dataclass
class MicroBatchLog:
    """Values logged for a micro-batch.

    Attributes:
        weight: of the loss.
        samples: number of samples.
        counts: of something in the batch, by name.
    """

    weight: Tensor
    samples: int
    counts: dict[str, Tensor]
    values: list[LoggedValue] = field(default_factory=list)

    def weights_of(self, one: LoggedValue) -> dict[str, Any]:
        """Return the weight of a value by each rule that is a mean."""
        own = {MEAN: self.weight, DIVIDED: one.divided, SAMPLES: self.samples, **self.counts}
        return own if one.size is None else own | {MEAN: one.size, LOSS: self.weight}


class CombinedValue(NamedTuple):
    """A value of a batch.

    Attributes:
        by_way: value and weight by each rule that fitted so far; NaN if unknown.
        number: number of micro-batches that logged it.
    """

    by_way: dict[str, tuple[float, float]]
    size: int
    number: int

    @property
    def values(self) -> list[float]:
        return [value for value, _ in self.by_way.values()]


# A micro-batch's forward is a coroutine, which may pause inside the module's step.
_current: ContextVar[MicroBatchLog | None] = ContextVar("gpumix_logged_micro_batch", default=None)


class StepLogs:
    """Logged values of a module's step: training, validation or test.

    Args:
        tells: this rank's values count: of ranks with equal samples only one rank's do.
        by_step: by default values are of single steps.
        is_cut: batches have several micro-batches.
    """

    def __init__(
        self,
        module: LightningModule,
        comm: Communicator,
        *,
        tells: bool,
        by_step: bool,
        is_cut: bool = True,
    ) -> None:
        self._module = module
        self._comm = comm
        self._tells = tells
        self._by_step = by_step
        self._is_cut = is_cut
        self._known: dict[str, dict[str, Any]] = {}  # settings by name, equal on all ranks
        self._own: dict[str, dict[str, Any]] = {}
        self._seen: list[MicroBatchLog] = []
        self._combined: dict[str, CombinedValue] = {}  # equal on all ranks
        self._reads_all = is_cut  # of the batch, whatever a value may be a mean over
        self._has_graphs = self._reads_values = True  # of the batch; of what is logged now
        self._batches = 0  # published
        self._ways = CombiningRules()
        self._warned: set[str] = set()
        self._metrics = StepMetrics(module, comm, self._note_update)

    @property
    def reads_graphs(self) -> bool:
        """True if values should be logged with their graphs."""
        if self._reads_all or self._ways.needs_graphs:
            return True
        is_due = self._by_step or self._batches < GRAPH_BATCHES or not self._batches % GRAPH_EVERY
        return DIVIDED in self._ways.found and is_due

    @property
    def unsettled(self) -> list[str]:
        """Names whose values of the batch differ by the rules that fitted so far, and may be
        compared; equal on all ranks."""
        return [
            name
            for name, one in self._combined.items()
            if self._ways.may_compare(name)
            and (self._ways.is_compared(name) or self._reads_all)
            and self._is_open(name, one)
        ]

    def _is_open(self, name: str, one: CombinedValue) -> bool:
        """Return whether the value of the batch differs by the rules that fitted so far."""
        if self._known[name][METRIC_KEY]:
            return False
        if not self._has_graphs and self._ways.of(name, MEAN) == [DIVIDED]:
            return True  # graphs alone tell, and were not read
        return not is_alike(one.values) if self._ways.is_compared(name) else one.number > 1

    @contextmanager
    def listening(self, *, compares: bool = False) -> Iterator[None]:
        """Receive the module's logging calls inside the context, those of a step or, with
        `compares`, of a comparison."""
        self._reads_values = compares or self.reads_graphs
        if not compares:
            self._seen = []
            self._has_graphs = self._reads_values
        self._module.log = self._note  # type: ignore[assignment, method-assign]
        try:
            with self._metrics.listening(compares=compares):
                yield
        finally:
            del self._module.log

    @contextmanager
    def micro_batch(self, weight: Tensor, batch: Any) -> Iterator[MicroBatchLog]:
        """Receive values of a micro-batch inside the context; drop the values of a failed one."""
        ways = AllNames() if self._reads_all else self._ways.found
        with self._noted(weight, batch, ways) as noted:
            yield noted
        if self._tells:
            self._seen.append(noted)

    @contextmanager
    def part(self, weight: Tensor, batch: Any, told: list[LoggedPart]) -> Iterator[MicroBatchLog]:
        """Receive values of compared samples inside the context; append them to `told`."""
        with self._noted(weight, batch, AllNames()) as noted:
            yield noted
        values, weights = {}, {}
        for one in noted.values:
            self._own[one.name] = one.settings
            if not one.settings[METRIC_KEY]:
                values[one.name] = _number(one.value)
                weights[one.name] = {way: _number(n) for way, n in noted.weights_of(one).items()}
        told.append(LoggedPart(values, weights))

    @contextmanager
    def _noted(self, weight: Tensor, batch: Any, ways: Container[str]) -> Iterator[MicroBatchLog]:
        noted = MicroBatchLog(weight.detach(), count_samples(batch), count_in_batch(batch, ways))
        token = _current.set(noted)
        try:
            yield noted
        finally:
            _current.reset(token)

    @property
    def is_new(self) -> bool:
        """True if values of the batch were never compared."""
        return not all(map(self._ways.is_compared, self.unsettled))

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
        lost: list[str] = []
        compared = self.unsettled
        unread = {name: self._ways.of(name, MEAN, reads_graphs=False)[0] for name in compared}
        for text in gather_texts(json.dumps(found), self._comm, COMPARED):
            lost += self._ways.take(json.loads(text), compared)
            compared = []
        self._warn(
            "%s: no mean, sum, maximum or minimum of the values of micro-batches is that of a "
            "batch; it is combined by its reduce_fx, and depends on the plan. Log what adds "
            "up, and compute with it behind the epoch, or log a metric of torchmetrics",
            lost,
        )
        if not self._by_step and self._batches >= GRAPH_BATCHES:
            # Values of batches without graphs, combined by a rule that does not hold.
            self._warn(
                "%s: what it is a mean over is seen in this batch for the first time; in earlier "
                "ones it may have been another number. Say it: self.log(..., batch_size=...), or "
                "log a metric of torchmetrics",
                [n for n, way in unread.items() if way not in self._ways.of(n, MEAN)],
            )

    def _warn(self, text: str, names: Sequence[str]) -> None:
        """Warn of logged names, if there are any, once for all ranks."""
        if names and self._comm.rank == 0:
            _log.warning(text, ", ".join(map(repr, names)))

    def warn_unsettled(self) -> None:
        """Warn of values of the batch that no comparison could tell, unless they were said to be
        means over `batch_size`."""
        for name, one in self._combined.items():
            is_told = self._known[name][EXPLICIT] or not any(map(math.isfinite, one.values))
            if is_told or name in self._warned or not self._is_open(name, one):
                continue
            self._warned.add(name)
            if self._comm.rank == 0:
                told = ", ".join(f"{value:.6g} ({way})" for way, (value, _) in one.by_way.items())
                _log.warning(
                    "'%s': how the value of a batch comes of those of micro-batches cannot be told "
                    "by the samples so far; it may be %s. The first is taken. Say what it is a "
                    "mean over, self.log(..., batch_size=...), or log a metric of torchmetrics",
                    name,
                    told,
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

    def _divided(self, value: Any) -> Tensor | float:
        """Return the denominator in a value's graph; NaN for several. Waits for no device."""
        is_read = self._reads_values and isinstance(value, Tensor) and value.numel() == 1
        if not (is_read and value.requires_grad):
            return math.nan
        found = find_denominators(value)
        if not found:
            return math.nan
        # A factor of 0 stands for a mean over nothing.
        first = torch.where(found[0].isinf(), 0.0, found[0])
        alike = torch.stack([one == found[0] for one in found]).all() if len(found) > 1 else None
        return first if alike is None else torch.where(alike, first, torch.nan)

    def _settings(self, name: str, given: dict[str, Any], *, explicit: bool) -> dict[str, Any]:
        reduced = given.get(REDUCED, MEAN)
        reduced = reduced if isinstance(reduced, str) else getattr(reduced, "__name__", "")
        reduced = {"avg": MEAN}.get(reduced.lower(), reduced.lower())
        if reduced not in (MEAN, SUM, MAX, MIN):
            raise InputError(
                f"'{name}' is logged with a reduce_fx of its own",
                code="reduce-fx-unsupported",
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

    def exchange(self) -> None:
        """Combine values logged for the batch on all ranks. Collective."""
        own = self._summed()
        table = self._exchanged(own)
        if table[:, 0].any():
            told = {name: self._own[name] for name in own}
            for text in gather_texts(json.dumps(told), self._comm, "names that are logged"):
                self._known = json.loads(text) | self._known
            table = self._exchanged(own)
        self._combined, begin = {}, 1
        for name in self._known:
            ways = self._rules_of(name)
            end = begin + 2 * len(ways) + 2
            of_name, begin = table[:, begin:end], end
            if of_name[:, -1].any():
                by_way = {
                    way: _combine(way, of_name[:, 2 * place], of_name[:, 2 * place + 1])
                    for place, way in enumerate(ways)
                }
                size, number = of_name[:, -2:].sum(0).tolist()
                self._combined[name] = CombinedValue(by_way, int(size), int(number))

    def publish(self, samples: int) -> None:
        """Pass combined values of a batch of `samples` to Lightning. Collective."""
        self._seen = []
        self._batches += 1
        self._reads_all = self._is_cut and not all(
            self._ways.is_compared(name) or own[METRIC_KEY] for name, own in self._known.items()
        )
        logged = [
            (name, self._known[name], value, one.size)
            for name, one in self._combined.items()
            if (value := self._value(name, one)) is not None
        ]
        self._combined = {}
        for _, settings, value, _ in logged:
            if settings[UPDATED]:
                self._metrics.update(settings[UPDATED], value, settings[KIND])
        self._compute([settings for _, settings, *_ in logged])
        for name, settings, value, size in logged:
            if not settings[UPDATED]:
                self._tell(name, settings, value, size if settings[EXPLICIT] else samples)

    def _value(self, name: str, one: CombinedValue) -> float | None:
        """Return the value by the likeliest rule; None if there was nothing to count."""
        known = [pair for pair in one.by_way.values() if not math.isnan(pair[1])]
        if not known:
            raise InputError(
                f"'{name}' is computed in another way than when it was logged first",
                code="logged-value-changed",
                why="what it is a mean over was read from its graph or its batch, which is another "
                "one now",
                fix="say what it is a mean over: self.log(..., batch_size=...)",
            )
        value, weight = known[0]
        return value if weight > 0 else None

    def _compute(self, logged: Sequence[dict[str, Any]]) -> None:
        """Give metrics logged of steps this step's value, which Lightning asks them for."""
        paths = [one[METRIC_KEY] for one in logged if one[METRIC_KEY] and one["on_step"]]
        for path, value in self._metrics.values([*dict.fromkeys(paths)]).items():
            vars(self._module.get_submodule(path))["_forward_cache"] = value

    def _exchanged(self, own: dict[str, Tensor]) -> Tensor:
        """Return a table by rank: 1 if the rank has names not known to all; then of each name value
        and weight by its rules, size, and number of micro-batches."""
        device = self._comm.device
        parts = [_on(device, any(name not in self._known for name in own)).reshape(1)]
        for name in self._known:
            nothing = torch.zeros(2 * len(self._rules_of(name)) + 2, device=device)
            parts.append(own.get(name, nothing).double())
        table = self._comm.exchanged(torch.cat(parts), "exchange of logged values")
        return table.cpu()

    def _summed(self) -> dict[str, Tensor]:
        """Return this rank's part of its row in the table, by name."""
        by_name: dict[str, list[tuple[LoggedValue, MicroBatchLog]]] = {}
        for noted in self._seen:
            for one in noted.values:
                self._own[one.name] = one.settings
                by_name.setdefault(one.name, []).append((one, noted))
        return {name: self._reduced(name, rows) for name, rows in by_name.items()}

    def _rules_of(self, name: str) -> list[str]:
        settings = self._known.get(name) or self._own[name]
        return self._ways.of(name, settings[REDUCED], reads_graphs=self._has_graphs)

    def _reduced(self, name: str, rows: Sequence[tuple[LoggedValue, MicroBatchLog]]) -> Tensor:
        device = self._comm.device

        def stacked(numbers: Sequence[Any]) -> Tensor:
            return torch.stack([_on(device, number) for number in numbers])

        values = stacked([one.value for one, _ in rows])
        own = [noted.weights_of(one) for one, noted in rows]
        told: list[Any] = []
        for way in self._rules_of(name):
            if way in UNWEIGHTED:
                told += [_reduce_values(way, values), 1.0]
                continue
            weights = stacked([weights.get(way, math.nan) for weights in own])
            # A mean of no labels is NaN, with weight 0.
            told += [torch.where(weights > 0, values * weights, 0.0).sum(), weights.sum()]
        sizes = stacked([0.0 if one.size is None else one.size for one, _ in rows])
        return stacked([*told, sizes.sum(), len(rows)])

    def _tell(self, name: str, settings: dict[str, Any], value: float, size: int) -> None:
        passed_on = {key: settings[key] for key in PASSED_ON if settings.get(key) is not None}
        told: Any = value
        if settings[
            METRIC_KEY
        ]:  # the metric itself, which Lightning resets at the end of the epoch
            told = self._module.get_submodule(settings[METRIC_KEY])
            passed_on["metric_attribute"] = settings[METRIC_KEY]
        LightningModule.log(self._module, name, told, batch_size=size, **passed_on)


def _on(device: torch.device, number: Any) -> Tensor:
    """Return a number on a device, as float64; a number of the device is not waited for."""
    if isinstance(number, Tensor):
        return number.detach().reshape(()).double().to(device)
    return torch.full((), float(number), dtype=torch.float64, device=device)


def _number(value: Any) -> float:
    return float(torch.as_tensor(value))


def _combine(way: str, values: Tensor, weights: Tensor) -> tuple[float, float]:
    """Return value and weight of all ranks."""
    total = math.fsum(weights.tolist())
    if way in UNWEIGHTED:
        return float(_reduce_values(way, values[weights > 0])), total
    return (math.fsum(values.tolist()) / total if total else math.nan), total


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
            code="logged-metric-not-attribute",
            fix="make it one in __init__: self.metric = ...",
        )
    return found
