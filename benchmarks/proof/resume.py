"""Stage `resume`: a run that is killed goes on from copies in memory, and from files alone."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from common import records
from proof.bench import Bench
from proof.jobs import (
    Command,
    gpumix,
    losses,
    wait_for_step,
    well,
    worst_difference,
    write_job,
)
from proof.lines import Bar
from proof.models import REHEARSED, SMALL
from proof.outcome import Outcome
from proof.ranks import started

GLOBAL_BATCH = 8
DETERMINISTIC_S = 14.0  # what the runs with deterministic algorithms take at least
COPY_BYTES = 2**30
ENDS_S = 5.0


def run(bench: Bench) -> Outcome:
    study = _Resume(bench)
    found: dict[str, Any] = {}
    found |= bench.measured("undisturbed", study.undisturbed)
    found |= bench.measured("killed", study.killed)
    found |= bench.measured("copy_to_host", study.copies)
    if bench.left_s > DETERMINISTIC_S:
        found |= bench.measured("deterministic", study.deterministic)
    bars = (
        Bar("resumed_off", most=1e-3),
        Bar("files_alone_off", most=1e-3),
        Bar("deterministic_off", most=0.0),
        Bar("stalled_of_step", most=0.10, judges="gpu"),
        Bar("copies_cost", most=0.03, judges="gpu"),
    )
    return Outcome(found, bars)


@dataclass(frozen=True)
class Course:
    """Of a run its steps, how often it is saved, and in which step it is killed."""

    steps: int = 12
    save_every: int = 4
    killed_at: int = 9


REHEARSED_COURSE = Course(6, 2, 5)


class _Resume:
    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.spec = REHEARSED if bench.rehearses else SMALL
        self.course = REHEARSED_COURSE if bench.rehearses else Course()

    def undisturbed(self) -> tuple[dict[str, Any], tuple[Bar, ...]]:
        """The run that all others must come to; and what copies in memory cost, by the same without
        them, which a rehearsal would learn nothing by."""
        well(self._train(self._job("whole")), "the undisturbed run")
        self._plan = self.bench.folder / "whole" / "plan.json"
        saves = records(self.bench.folder / "whole", "checkpoint")
        step_s, without_s = self._step_s("whole"), None
        if not self.bench.rehearses:
            without = {"save_steps": 0, "memory_save_steps": 0}
            well(self._train(self._job("without", **without)), "the run without copies")
            without_s = self._step_s("without")
        later = [one["stalled_s"] for one in saves[1:-1]]  # the first makes room, the last waits
        figures = {
            "step_s": step_s,
            "step_without_copies_s": without_s,
            "copies_cost": step_s / without_s - 1 if without_s else None,
            "stalled_s": [one["stalled_s"] for one in saves],
            "stalled_of_step": max(later) / step_s if later else None,
            "save_s": [one["seconds"] for one in saves],
            "copies_every_steps": _every(self.bench.folder / "whole"),
        }
        return figures, ()

    def killed(self) -> tuple[dict[str, Any], tuple[Bar, ...]]:
        """SIGKILL to the run and its ranks in the middle; then `--resume`, of a run whose copies in
        memory are there, and of one that has files alone."""
        job, folder = self._job("killed"), self.bench.folder / "killed"
        came = self._kill(job, folder)
        alone = self._without_memory(job, folder)
        resumed = well(self._train(job, "--resume"), "the resumed run")
        truth = losses(self.bench.folder / "whole")
        figures = {
            "killed_at": came,
            "resumed_off": self._off(folder, truth),
            "resumed_from": _said_of_resume(resumed.err),
        }
        if alone is not None:
            done = well(self._train(alone, "--resume"), "the run resumed from files")
            figures["files_alone_off"] = self._off(self.bench.folder / "files", truth)
            figures["files_from"] = _said_of_resume(done.err)
        return figures, ()

    def deterministic(self) -> tuple[dict[str, Any], tuple[Bar, ...]]:
        """The same with deterministic algorithms: to the last bit."""
        keys: dict[str, Any] = {
            "model": {
                "factory": "proof.deterministic:model",
                "arguments": {"spec": vars(self.spec)},
            }
        }
        whole, job = self._job("exact", **keys), self._job("exact-killed", **keys)
        allow = ("--allow", "proof")
        well(self._train(whole, *allow), "the deterministic run")
        self._kill(job, self.bench.folder / "exact-killed", *allow)
        well(self._train(job, "--resume", *allow), "the deterministic run, resumed")
        truth = losses(self.bench.folder / "exact")
        return {"deterministic_off": self._off(self.bench.folder / "exact-killed", truth)}, ()

    def copies(self) -> tuple[dict[str, Any], tuple[Bar, ...]]:
        """How fast state is copied into the memory of the host that copies are kept in."""
        size = COPY_BYTES if self.bench.place == "gpu" else 2**20
        with started(self.bench, [{}]) as ranks:
            ranks.all("open", on_cuda=self.bench.on_cuda, fraction=0.5, threads=1)
            (told,) = ranks.all("copy_out", size_bytes=size)
        return told, ()

    def _job(self, name: str, **keys: Any) -> Path:
        saving = {"save_steps": self.course.save_every, "memory_save_steps": 1}
        return write_job(
            self.bench,
            name,
            self.spec,
            global_batch_size=GLOBAL_BATCH,
            max_steps=self.course.steps,
            advanced={"rebalance": False},
            **saving | keys,
        )

    def _words(self, job: Path, *more: str) -> list[str]:
        plan = getattr(self, "_plan", None)
        given = ["--plan", str(plan)] if plan is not None else []
        return ["train", str(job), *given, *more]

    def _train(self, job: Path, *more: str) -> Any:
        return gpumix(self.bench, *self._words(job, *more))

    def _kill(self, job: Path, folder: Path, *more: str) -> int:
        """Train until a step, and kill all of it at once; the step to which it came."""
        command = Command(self.bench, *self._words(job, *more))
        wait_for_step(command, folder, self.course.killed_at, deadline=self.bench.deadline - 5.0)
        killed = [command.process.pid, *_descendants(command.process.pid)]
        for pid in killed:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        command.process.wait(ENDS_S)
        return max(losses(folder), default=0)

    def _without_memory(self, job: Path, folder: Path) -> Path | None:
        """The same run in another folder, for which there are no copies in memory; None where it
        was not killed before its end."""
        if not (folder / "checkpoints").is_dir():
            return None
        shutil.copytree(folder, self.bench.folder / "files")
        told = yaml.safe_load(job.read_text()) | {"output_dir": str(self.bench.folder / "files")}
        alone = self.bench.folder / "files.yaml"
        alone.write_text(yaml.safe_dump(told, sort_keys=False))
        return alone

    def _off(self, folder: Path, truth: dict[int, float]) -> float | None:
        return worst_difference(losses(folder), truth, self.course.killed_at)

    def _step_s(self, name: str) -> float:
        """The median of steps beside which no file is begun, those at the beginning left out."""
        steps = records(self.bench.folder / name, "step")
        return median(
            one["step_s"]
            for one in steps
            if one["step"] > 2 and one["step"] % self.course.save_every
        )


def _every(run: Path) -> int:
    """How often the state was copied into memory in the end."""
    told = records(run, "copies")
    return int(told[-1]["every_steps"]) if told else 1


def _said_of_resume(text: str) -> str:
    return next((line for line in text.splitlines() if "going on from" in line), "")


def _descendants(pid: int) -> list[int]:
    """All processes that come of one."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                parents.setdefault(int(fields[1]), []).append(int(folder.name))
    found, left = [], [pid]
    while left:
        children = parents.get(left.pop(), [])
        found += children
        left += children
    return found
