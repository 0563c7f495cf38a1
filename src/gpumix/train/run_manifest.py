"""Record of a run's start: the job as understood, or the script training by itself, and versions.

Written at each start of training; with plan and profile sufficient to repeat the run. Imports no
torch.
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
from gpumix.hardware.host.environment import Launcher, cluster_file, launcher, world_size
from gpumix.schema.job.job import Job
from gpumix.schema.reading.cluster_file import format_cluster
from gpumix.schema.value import Document, Value

if TYPE_CHECKING:
    from gpumix.train.rank_setup.context import Task

PACKAGES = (
    "torch", "transformers", "tokenizers", "datasets", "numpy", "accelerate", "trl", "peft",
    "lightning", "ray",
)  # fmt: skip
# Arguments with secret values; `--eos_token` is none.
SECRET_ARGUMENT = re.compile(
    r"(?i)(?:^|[-_.])(?:(?<!(?:pad|eos|bos|unk|sep|cls)[-_])token|secret|password|passwd"
    r"|credentials?|(?:api|access)[-_]?key)$"
)
HIDDEN = "..."


class Script(Value):
    """Program training by itself, and its launcher.

    Attributes:
        words: arguments of the interpreter: a script, or `-m` and a module, with its arguments;
            empty for a program that is no file. Values of secret arguments are left out.
        processes: of all hosts.
        cluster: the file naming the devices, if given.
        plans: the class that takes `plan=` in the script.
    """

    words: list[str]
    processes: int
    launcher: Launcher | None
    cluster: str | None
    plans: str


class RunRecord(Document):
    """File `run.json` of a run's folder, for a job or a script."""

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
        return cls._now(task.folder, given=_dump_given_keys(job), job=job.model_dump(mode="json"))

    @classmethod
    def of_script(cls, plans: str) -> RunRecord:
        """Record the program of this process; see `Script`."""
        by, file = launcher(), cluster_file()
        script = Script(
            words=[] if by == "Ray" else list(_hide_secrets(_get_program_arguments())),
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
            packages=get_versions(),
            folder=str(folder),
            **what,
        )

    def job_text(self) -> str:
        """Return a job file to repeat the run."""
        text: str = yaml.safe_dump(self.given, sort_keys=False, allow_unicode=True, width=96)
        return text


def _dump_given_keys(job: Job) -> dict[str, Any]:
    """Return the given keys of a job, with a cluster as in a cluster file."""
    given = job.model_dump(mode="json", exclude_unset=True)
    return given if job.cluster == "auto" else given | {"cluster": format_cluster(job.cluster)}


def _get_program_arguments() -> list[str]:
    """Return the interpreter's arguments of this process; empty in interactive use."""
    main = sys.modules.get("__main__")
    if hasattr(sys, "ps1") or getattr(main, "__file__", None) is None:
        return []
    arguments = sys.argv[1:]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return ["-m", spec.name.removesuffix(".__main__"), *arguments]
    return [sys.argv[0], *arguments]


def _hide_secrets(words: Sequence[str]) -> Iterator[str]:
    hidden = False
    for word in words:
        name, given, _ = word.partition("=")
        secret = SECRET_ARGUMENT.search(name) is not None
        yield HIDDEN if hidden else f"{name}={HIDDEN}" if secret and given else word
        hidden = secret and not given and word.startswith("-")


def get_versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of those packages that are installed, without importing any."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
