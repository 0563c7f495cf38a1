"""What a run was started from: the job as it was understood, and the versions that ran it.

Written when training begins, each time that it does; with plan and profile it is all that doing
the same again takes. Nothing here imports torch.
"""

from __future__ import annotations

import platform
import time
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import yaml
from pydantic import Field

import gpumix
from gpumix.spec.base import Document
from gpumix.spec.cluster_file import written
from gpumix.spec.job import Job

if TYPE_CHECKING:
    from gpumix.train.context import Task

PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "numpy")


class RunRecord(Document):
    """The file `run.json` of a run's folder."""

    KIND: ClassVar[str] = "run"
    MADE_BY: ClassVar[str] = "gpumix train JOB.yaml"
    kind: Literal["run"] = "run"

    started_at: float = Field(description="time.time() of the last start")
    gpumix: str
    python: str
    platform: str
    packages: dict[str, str] = Field(description="versions of those that are installed")
    folder: str = Field(description="where the job's factories are looked for")
    given: dict[str, Any] = Field(description="keys of the job that were given, paths absolute")
    job: dict[str, Any] = Field(description="the whole job, defaults as they were")

    @classmethod
    def of(cls, task: Task) -> RunRecord:
        return cls(
            started_at=time.time(),
            gpumix=gpumix.__version__,
            python=platform.python_version(),
            platform=platform.platform(),
            packages=_versions(),
            folder=str(task.folder),
            given=_given(task.job),
            job=task.job.model_dump(mode="json"),
        )

    def job_text(self) -> str:
        """A job file that starts the same run."""
        text: str = yaml.safe_dump(self.given, sort_keys=False, allow_unicode=True, width=96)
        return text


def _given(job: Job) -> dict[str, Any]:
    """A cluster is a value in a job, and written otherwise."""
    given = job.model_dump(mode="json", exclude_unset=True)
    return given if job.cluster == "auto" else given | {"cluster": written(job.cluster)}


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
