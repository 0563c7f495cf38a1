"""TensorBoard event files by tensorboard's own writer, without TensorFlow or torch.

A resumed run adds a file to its folder; TensorBoard shows all files as a run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from gpumix.integrations.trackers.tracker import Numbers, TrackedEvent, TrackedRun
from gpumix.schema.files import make_library_folder
from gpumix.schema.job.job import Job
from gpumix.schema.job.trackers import TensorBoardSpec

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

FOLDER = "tensorboard"


def make_tracker(settings: TensorBoardSpec, job: Job) -> TensorBoard:
    if settings.folder is None:
        return TensorBoard(job.output_dir / FOLDER)
    return TensorBoard(settings.folder / (settings.name or job.output_dir.name))


class TensorBoard:
    """Tracker writing event files into `folder`; see `Tracker`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def prepare(self) -> None:
        from tensorboard.summary.writer import event_file_writer  # noqa: F401

        make_library_folder(self._folder)

    def begin(self, run: TrackedRun) -> str:
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(self._folder))
        # Hides values of an earlier run in this folder from this step on.
        started = SessionLog(status=SessionLog.START)
        self._writer.add_event(Record(step=run.done + 1, session_log=started))
        config = run.config()
        for part in ("job", "plan", "versions"):
            shown = yaml.safe_dump(config[part], sort_keys=False)
            self._text(f"run/{part}", f"```yaml\n{shown}```", step=run.done + 1)
        flat = run.flat_config()
        known = {k: v for k, v in flat.items() if isinstance(v, bool | int | float | str)}
        self._add(hparams_pb(known, trial_id=str(self._folder)), step=run.done + 1)
        return str(self._folder)

    def numbers(self, numbers: Numbers) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=n, simple_value=v) for n, v in numbers.by_name().items()]
        self._add(Summary(value=values), step=numbers.step, time_s=numbers.time_s)

    def event(self, event: TrackedEvent) -> None:
        self.numbers(Numbers(event.step, event.time_s, {event.series: 1.0}))
        self._text(f"events/{event.kind}", event.text, step=event.step, time_s=event.time_s)

    def flush(self) -> None:
        self._writer.flush()

    def end(self, state: str) -> None:
        self._writer.close()

    @property
    def where(self) -> str:
        return f"tensorboard --logdir {json.dumps(str(self._folder))}"

    def _text(self, tag: str, text: str, *, step: int, time_s: float | None = None) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._add(text_pb(tag, text), step=step, time_s=time_s)

    def _add(self, summary: Summary, *, step: int, time_s: float | None = None) -> None:
        import time

        from tensorboard.compat.proto.event_pb2 import Event as Record

        when = time.time() if time_s is None else time_s
        self._writer.add_event(Record(wall_time=when, step=step, summary=summary))
