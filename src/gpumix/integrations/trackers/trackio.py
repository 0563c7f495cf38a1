"""Trackio tracker: into databases on this machine, or to the job's Space or server.

Trackio identifies runs by name, so each name gets unique digits.
"""

from __future__ import annotations

import secrets
from typing import Any

from gpumix.hardware.host.environment import keep_trackio_in
from gpumix.integrations.trackers.tracker import (
    Numbers,
    TrackedEvent,
    TrackedRun,
    Tracker,
    strip_secrets,
)
from gpumix.schema.job.job import Job
from gpumix.schema.job.trackers import TrackioSpec


def make_tracker(settings: TrackioSpec, job: Job) -> Trackio:
    return Trackio(settings)


class Trackio(Tracker):
    """Tracker calling `trackio`, which writes from threads; see `Tracker`."""

    def __init__(self, settings: TrackioSpec) -> None:
        self._settings = settings
        self._run: Any = None
        self._folder = ""
        self._step = 0

    def prepare(self) -> None:
        if self._settings.folder is not None:
            keep_trackio_in(self._settings.folder)
        import trackio
        from trackio.utils import TRACKIO_DIR

        trackio.SQLiteStorage.validate_project_name(self._settings.project)
        TRACKIO_DIR.mkdir(parents=True, exist_ok=True)
        self._folder = str(TRACKIO_DIR)

    def begin(self, run: TrackedRun) -> str:
        import trackio

        settings = self._settings
        name = run.id or f"{settings.name or run.name}-{secrets.token_hex(3)}"
        self._run = trackio.init(
            project=settings.project,
            name=name,
            group=settings.group,
            space_id=settings.space,
            server_url=settings.server,
            config=run.config(),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return name

    def numbers(self, numbers: Numbers) -> None:
        self._step = max(self._step, numbers.step)
        self._run.log(numbers.by_name(), step=numbers.step)

    def event(self, event: TrackedEvent) -> None:
        name = event.series.name
        self._run.log({name: 1.0, f"{name}/text": event.text}, step=event.step)

    def end(self, state: str) -> None:
        self._run.log({"run/state": state}, step=self._step)
        self._run.finish()

    @property
    def where(self) -> str:
        settings = self._settings
        elsewhere = settings.space or strip_secrets(settings.server or "")
        if elsewhere:
            return f"{elsewhere}, run {self._run.name}"
        return f"trackio show --project {settings.project}, run {self._run.name}, in {self._folder}"
