"""MLflow tracker using the stateless client, into the run's own database or to a server.

MLflow restricts characters in names and cuts long texts: a file has the full settings.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from gpumix.integrations.trackers.tracker import Numbers, TrackedEvent, TrackedRun, strip_secrets
from gpumix.schema.files import make_library_folder
from gpumix.schema.job.job import Job
from gpumix.schema.job.trackers import MlflowSpec

DATABASE = "mlflow.db"
ARTIFACTS = "mlflow-artifacts"
RUN_STATUSES = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
MOST_METRICS, MOST_PARAMETERS = 1000, 100  # per call
MAX_PARAMETER_CHARACTERS = 500  # characters of a parameter in older stores; a tag may be longer
INVALID_CHARACTERS = re.compile(r"[^\w\-. /]")


def make_tracker(settings: MlflowSpec, job: Job) -> Mlflow:
    return Mlflow(settings, job.output_dir)


class Mlflow:
    """Tracker writing to an MLflow store; see `Tracker`."""

    def __init__(self, settings: MlflowSpec, folder: Path) -> None:
        self._settings, self._folder = settings, folder
        self._uri = settings.uri or f"sqlite:///{folder / DATABASE}"
        self._client: Any = None
        self._id = ""
        self._waiting: list[Any] = []

    def prepare(self) -> None:
        import logging

        if self._settings.uri is None:
            make_library_folder(self._folder, "mlflow*")
        import mlflow

        logging.getLogger("alembic").setLevel(logging.WARNING)  # its creation of tables
        self._client = mlflow.MlflowClient(tracking_uri=self._uri)

    def begin(self, run: TrackedRun) -> str:
        if run.id is not None:
            self._id = run.id
            self._client.update_run(self._id, status="RUNNING")
            return self._id
        made = self._client.create_run(
            self._experiment(),
            run_name=self._settings.name or run.name,
            tags=self._settings.tags,
        )
        self._id = str(made.info.run_id)
        self._describe(run)
        return self._id

    def numbers(self, numbers: Numbers) -> None:
        from mlflow.entities import Metric

        at_ms = int(numbers.time_s * 1e3)
        for name, value in numbers.by_name().items():
            self._waiting.append(Metric(sanitize_name(name), value, at_ms, numbers.step))

    def event(self, event: TrackedEvent) -> None:
        self.numbers(Numbers(event.step, event.time_s, {event.series: 1.0}))
        text = f"step {event.step}: {event.text}"
        self._client.set_tag(
            self._id, sanitize_name(event.series.name), text[:MAX_PARAMETER_CHARACTERS]
        )

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for first in range(0, len(waiting), MOST_METRICS):
            self._client.log_batch(self._id, metrics=waiting[first : first + MOST_METRICS])

    def end(self, state: str) -> None:
        self._client.set_terminated(self._id, status=RUN_STATUSES[state])

    @property
    def where(self) -> str:
        shown = strip_secrets(self._uri)
        if self._settings.uri is None:
            shown = f"mlflow ui --backend-store-uri {self._uri}"
        return f"{shown}, run {self._id}"

    def _experiment(self) -> str:
        name = self._settings.experiment
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        # By default artifacts would go below the command's working folder.
        local = (self._folder / ARTIFACTS).as_uri() if self._settings.uri is None else None
        return str(self._client.create_experiment(name, artifact_location=local))

    def _describe(self, run: TrackedRun) -> None:
        """Log the settings as parameters, and in full in a file."""
        from mlflow.entities import Param

        flat = run.flat_config().items()
        every = [
            Param(sanitize_name(name), str(value)[:MAX_PARAMETER_CHARACTERS])
            for name, value in flat
        ]
        for first in range(0, len(every), MOST_PARAMETERS):
            self._client.log_batch(self._id, params=every[first : first + MOST_PARAMETERS])
        self._client.log_dict(self._id, run.config(), "config.json")


def sanitize_name(name: str) -> str:
    """Return a name valid in every store."""
    return INVALID_CHARACTERS.sub("_", name)
