"""What a run was started from: the job as it was understood, or the script that trains by itself,
and the versions that ran it.

Written when training begins, each time that it does; with plan and profile it is all that doing
the same again takes. Nothing here imports torch.
"""

from __future__ import annotations

import platform
import re
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import yaml
from pydantic import Field

import gpumix
from gpumix.hardware.environment import Launcher, cluster_file, launcher, world_size
from gpumix.spec.base import Document, Value
from gpumix.spec.cluster_file import written
from gpumix.spec.job import Job

if TYPE_CHECKING:
    from gpumix.train.context import Task

PACKAGES = (
    "torch", "transformers", "tokenizers", "datasets", "numpy", "accelerate", "trl", "peft",
    "lightning", "ray",
)  # fmt: skip
# Arguments whose values are nobody else's; `--eos_token` is none.
SECRET = re.compile(
    r"(?i)(?:^|[-_.])(?:(?<!(?:pad|eos|bos|unk|sep|cls)[-_])token|secret|password|passwd"
    r"|credentials?|(?:api|access)[-_]?key)$"
)
HIDDEN = "..."


class Script(Value):
    """A program that trains by itself, and what started it.

    Attributes:
        words: what an interpreter was told: a script or `-m` and a module, and its arguments; none
            of a program that is no file. Values of arguments that name a secret are left out.
        processes: of all hosts.
        cluster: the file that names the devices, where one was given.
        plans: the class that takes `plan=` in it.
    """

    words: list[str]
    processes: int
    launcher: Launcher | None
    cluster: str | None
    plans: str


class RunRecord(Document):
    """The file `run.json` of a run's folder, of a job or of a script."""

    KIND: ClassVar[str] = "run"
    MADE_BY: ClassVar[str] = "gpumix train JOB.yaml"
    kind: Literal["run"] = "run"

    started_at: float = Field(description="time.time() of the last start")
    gpumix: str
    python: str
    platform: str
    packages: dict[str, str] = Field(description="versions of those that are installed")
    folder: str = Field(description="where the job's factories are looked for, or the script is")
    given: dict[str, Any] = Field({}, description="keys of the job that were given, paths absolute")
    job: dict[str, Any] = Field({}, description="the whole job, defaults as they were")
    script: Script | None = None

    @classmethod
    def of(cls, task: Task) -> RunRecord:
        job = task.job
        return cls._now(task.folder, given=_given(job), job=job.model_dump(mode="json"))

    @classmethod
    def of_script(cls, plans: str) -> RunRecord:
        """Of the program that this process runs; see `Script`."""
        by, file = launcher(), cluster_file()
        script = Script(
            words=[] if by == "Ray" else list(_without_secrets(_program())),
            processes=world_size(),
            launcher=by,
            cluster=None if file is None else str(file.absolute()),
            plans=plans,
        )
        return cls._now(Path.cwd(), script=script)

    @classmethod
    def _now(cls, folder: Path, **what: Any) -> RunRecord:
        return cls(
            kind="run",
            started_at=time.time(),
            gpumix=gpumix.__version__,
            python=platform.python_version(),
            platform=platform.platform(),
            packages=_versions(),
            folder=str(folder),
            **what,
        )

    def job_text(self) -> str:
        """A job file that starts the same run."""
        text: str = yaml.safe_dump(self.given, sort_keys=False, allow_unicode=True, width=96)
        return text


def _given(job: Job) -> dict[str, Any]:
    """A cluster is a value in a job, and written otherwise."""
    given = job.model_dump(mode="json", exclude_unset=True)
    return given if job.cluster == "auto" else given | {"cluster": written(job.cluster)}


def _program() -> list[str]:
    """What the interpreter of this process was told to run; nothing where somebody types."""
    main = sys.modules.get("__main__")
    if hasattr(sys, "ps1") or getattr(main, "__file__", None) is None:
        return []
    arguments = sys.argv[1:]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return ["-m", spec.name.removesuffix(".__main__"), *arguments]
    return [sys.argv[0], *arguments]


def _without_secrets(words: Sequence[str]) -> Iterator[str]:
    hidden = False
    for word in words:
        name, given, _ = word.partition("=")
        secret = SECRET.search(name) is not None
        yield HIDDEN if hidden else f"{name}={HIDDEN}" if secret and given else word
        hidden = secret and not given and word.startswith("-")


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
