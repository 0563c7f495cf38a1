"""Weights & Biases tracker. Offline by default: a folder, sent by the user with `wandb sync`.

Neither output nor code is captured: trackers run in a process separate from the run.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from gpumix.integrations.trackers.tracker import Numbers, TrackedEvent, TrackedRun, Tracker
from gpumix.schema.files import make_library_folder
from gpumix.schema.job.job import Job
from gpumix.schema.job.trackers import WandbSpec

EXIT_CODES = {"finished": 0, "failed": 1, "interrupted": 130}


def make_tracker(settings: WandbSpec, job: Job) -> Wandb:
    return Wandb(settings, settings.folder or job.output_dir)


class Wandb(Tracker):
    """Tracker calling `wandb`, which sends from its own process; see `Tracker`."""

    def __init__(self, settings: WandbSpec, folder: Path) -> None:
        self._settings, self._folder = settings, folder
        self._run: Any = None
        self._step = 0

    def prepare(self) -> None:
        make_library_folder(self._folder, "wandb")
        if (self._folder / "wandb").is_dir():
            make_library_folder(self._folder / "wandb")
        import wandb  # noqa: F401

    def begin(self, run: TrackedRun) -> str:
        import wandb

        settings = self._settings
        online = settings.mode == "online"
        self._run = wandb.init(
            project=settings.project,
            entity=settings.entity,
            name=settings.name or run.name,
            group=settings.group,
            tags=settings.tags or None,
            dir=self._folder,
            mode=settings.mode,
            id=run.id or secrets.token_hex(4),
            resume="allow" if online else None,  # offline, `id` suffices
            config=run.config(),
            settings=wandb.Settings(console="off", silent=True, save_code=False),
        )
        return str(self._run.id)

    def numbers(self, numbers: Numbers) -> None:
        self._log(dict(numbers.by_name()), numbers.step)

    def event(self, event: TrackedEvent) -> None:
        values = {event.series.name: 1.0, f"{event.series.name}/text": event.text}
        self._log(values, event.step)

    def end(self, state: str) -> None:
        self._run.finish(exit_code=EXIT_CODES[state])

    @property
    def where(self) -> str:
        if self._settings.mode == "online":
            return str(self._run.url)
        return f"offline; `wandb sync {Path(self._run.dir).parent}` sends it"

    def _log(self, values: dict[str, Any], step: int) -> None:
        """Log values; wandb's steps never decrease, so earlier steps are logged at the newest
        step."""
        self._step = max(self._step, step)
        self._run.log(values, step=self._step)
