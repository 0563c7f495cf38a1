"""Prometheus: an endpoint on loopback, or a file for the textfile collector of the node exporter.

Metrics follow Prometheus in names and base units: seconds, bytes, ratios; counters end in `_total`.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from gpumix.integrations.trackers.tracker import (
    Numbers,
    Series,
    TrackedEvent,
    TrackedRun,
)
from gpumix.schema.errors import MachineError
from gpumix.schema.files import write_bytes
from gpumix.schema.job.job import Job
from gpumix.schema.job.trackers import PrometheusSpec
from gpumix.train.run_manifest import get_versions

PREFIX = "gpumix"
SHARE = "share/"
# Names differing in Prometheus, and the help texts of a scrape.
PROMETHEUS_NAMES = {
    "grad_norm": "gradient_norm",
    "step_s": "step_seconds",
    "tokens_per_s": "tokens_per_second",
    "busy": "busy_ratio",
    "mfu": "mfu_ratio",
    "hfu": "hfu_ratio",
    "peak_bytes": "peak_memory_bytes",
    "reserved_bytes": "peak_reserved_memory_bytes",
    "retries": "allocator_retries",
    "planned_peak_bytes": "planned_peak_memory_bytes",
    "sent_bytes": "sent_per_step_bytes",
    "stalled_s": "stalled_seconds",
    "slower_than_planned": "slower_than_planned_ratio",
    "remaining_s": "remaining_seconds",
}
HELP_TEXTS = {
    "run_info": "What the run is.",
    "run_state": "How the run ended.",
    "device_info": "Class and host of a device.",
    "step": "The last step that is done.",
    "steps": "Steps of the whole run.",
    "last_step_timestamp_seconds": "When the last step was done.",
    "loss": "Training loss of the last step.",
    "learning_rate": "Learning rate of the last step.",
    "gradient_norm": "Norm of all gradients together, before it is clipped.",
    "step_seconds": "Time that the last step took.",
    "step_share_ratio": "What the last step of the first rank was spent on.",
    "tokens_per_second": "Tokens of samples a second, in the last step.",
    "run_tokens_per_second": "Tokens of samples a second, over the steps that count.",
    "run_step_seconds": "Time of the median step, of those that count.",
    "run_slower_than_planned_ratio": "Median step over the planned one, minus 1.",
    "run_remaining_seconds": "Time of the steps still to do.",
    "eval_loss": "Validation loss.",
}
PORT_ERRORS = (errno.EADDRINUSE, errno.EACCES)
ANOTHER_PORT = "take another port: --set report_to.prometheus.port=0 takes any that is free"
ANOTHER_ADDRESS = "give one of this host, such as --set report_to.prometheus.address=127.0.0.1"


def make_tracker(settings: PrometheusSpec, job: Job) -> Prometheus:
    return Prometheus(settings, settings.name or job.output_dir.name)


class Prometheus:
    """Tracker showing the newest value of each metric; see `Tracker`.

    Args:
        name: of the run, a label of all metrics.
    """

    def __init__(self, settings: PrometheusSpec, name: str) -> None:
        self._settings = settings
        self._board = MetricCollector(name)
        self._registry: Any = None
        self._address = ""

    def prepare(self) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._registry = CollectorRegistry()
        self._registry.register(self._board)
        if self._settings.textfile is not None:
            self._settings.textfile.parent.mkdir(parents=True, exist_ok=True)
            return
        address, port = self._settings.address, self._settings.port
        try:
            server, _ = start_http_server(port, address, self._registry)
        except OSError as error:
            raise MachineError(
                f"the endpoint for Prometheus cannot listen at {address}:{port}",
                code="prometheus-not-listening",
                where="report_to.prometheus",
                why=error.strerror or str(error),
                fix=ANOTHER_PORT if error.errno in PORT_ERRORS else ANOTHER_ADDRESS,
            ) from error
        self._address = f"{address}:{server.server_port}"

    def begin(self, run: TrackedRun) -> str:
        board = self._board
        plan, version = run.plan, get_versions(["gpumix"])["gpumix"]
        emulated = str(plan.emulated).lower()
        board.put("run_info", 1, strategy=plan.strategy, emulated=emulated, version=version)
        board.put("steps", run.job.max_steps)
        for worker in plan.workers:
            where = {"class": worker.device_class, "host": worker.host}
            board.put("device_info", 1, device=worker.device, **where)
        return run.name

    def numbers(self, numbers: Numbers) -> None:
        for series, value in numbers.values.items():
            if series == TOKENS:
                self._board.count("tokens", value)
            else:
                self._board.put(metric_of(series), value, **labels_of(series))
            if series.group == "train":
                self._board.put("step", numbers.step)
                self._board.put("last_step_timestamp_seconds", numbers.time_s)

    def event(self, event: TrackedEvent) -> None:
        self._board.count("events", kind=event.kind)

    def flush(self) -> None:
        if self._settings.textfile is not None:
            from prometheus_client import generate_latest

            # Not by `write_to_textfile`, which writes into a file of a name that can be told.
            write_bytes(self._settings.textfile, generate_latest(self._registry))

    def end(self, state: str) -> None:
        self._board.put("run_state", 1, state=state)
        self.flush()

    @property
    def where(self) -> str:
        if self._settings.textfile is not None:
            return str(self._settings.textfile)
        return f"http://{self._address}/metrics"


TOKENS = Series("train", "tokens")


def metric_of(series: Series) -> str:
    """Return a metric's name without the common prefix."""
    group = "" if series.group == "train" else f"{series.group}_"
    if series.what.startswith(SHARE):
        return f"{group or 'step_'}share_ratio"
    return f"{group}{PROMETHEUS_NAMES.get(series.what, series.what)}"


def labels_of(series: Series) -> dict[str, str]:
    """Return the labels of a series: its class or device, and the kind of share."""
    labels = {series.group: series.of} if series.of else {}
    if series.what.startswith(SHARE):
        labels["kind"] = series.what.removeprefix(SHARE)
    return labels


Labels = tuple[tuple[str, str], ...]


class MetricCollector:
    """Values for a scrape: written by one thread, read by threads of the endpoint."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._gauges: dict[str, dict[Labels, float]] = {}
        self._counters: dict[str, dict[Labels, float]] = {}

    def put(self, name: str, value: float, **labels: str) -> None:
        with self._lock:
            self._gauges.setdefault(name, {})[tuple(sorted(labels.items()))] = value

    def count(self, name: str, total: float | None = None, **labels: str) -> None:
        """Increment a counter, or set it to `total`."""
        with self._lock:
            values = self._counters.setdefault(name, {})
            key = tuple(sorted(labels.items()))
            values[key] = values.get(key, 0.0) + 1.0 if total is None else total

    def collect(self) -> Iterator[Any]:
        """Collect metrics for prometheus_client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            for kind, every in (
                (GaugeMetricFamily, self._gauges),
                (CounterMetricFamily, self._counters),
            ):
                yield from [self._family(kind, *item) for item in every.items()]

    def _family(self, kind: Any, name: str, values: Mapping[Labels, float]) -> Any:
        keys = [key for key, _ in next(iter(values))]
        meaning = HELP_TEXTS.get(name, name.replace("_", " "))
        family = kind(f"{PREFIX}_{name}", meaning, labels=["run", *keys])
        for labels, value in values.items():
            family.add_metric([self._run, *(text for _, text in labels)], value)
        return family
