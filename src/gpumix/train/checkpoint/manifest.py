"""Files of a checkpoint, the manifest, and checks of both.

    step-00000010/checkpoint.json   manifest, with size and digest of all other files
                  index.json        location of each tensor's boxes in the files
                  __0_0.distcp ...  tensors, one file per rank
                  .metadata         for other readers of torch.distributed.checkpoint

`.metadata` is a pickle, which can run code when read; gpumix writes it and never reads it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, ValidationError

import gpumix
from gpumix.schema.errors import InputError, MachineError
from gpumix.schema.files import NotAFileError, TooLargeError, open_for_reading, read_text
from gpumix.schema.value import Value

SCHEMA = 1
# Other system errors, for example of a network disk, may pass: they do not damage a checkpoint.
_UNREADABLE_ERRORS = (
    FileNotFoundError, IsADirectoryError, NotADirectoryError, NotAFileError, TooLargeError,
)  # fmt: skip
MANIFEST = "checkpoint.json"
INDEX = "index.json"
METADATA = ".metadata"

STEP = re.compile(r"step-(\d{8,})")

# No separators: a checkpoint names only files of its own folder.
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.]*[A-Za-z0-9_]$")]
StateKind = Literal["elements", "blocks", "whole", "tensor", "int", "float", "bool"]


def get_folder_name(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def parse_step(path: Path) -> int:
    """Return the step of the checkpoint at `path`, by the folder's name."""
    found = STEP.match(path.name)
    return int(found[1]) if found else 0


class Damaged(InputError):
    """A checkpoint is not as saved: torn, truncated or altered."""


class SavedFile(Value):
    """Expected size and digest of a saved file."""

    bytes: int
    sha256: str


class SavedBase(Value):
    """The frozen base that saved adapters belong to: where it came from, and the checksum of its
    values."""

    name: str
    checksum: str


class SavedOptimizer(Value):
    """The optimizer's class and the kind of each state: `elements`, a value per element of a
    parameter; `blocks`, a value for each of its blocks of elements; `whole`, a tensor per
    parameter; otherwise a number per parameter."""

    name: str
    states: dict[str, StateKind]


class Manifest(Value):
    """Manifest of a checkpoint.

    `sequence` counts the checkpoints of a folder in the order of saving, which differs from the
    order of steps once a run has resumed from an older checkpoint.
    """

    step: int
    sequence: int = 0
    model: str = Field(description="fingerprint of the model's units and parameter shapes")
    gpumix: str
    torch: str
    engine_steps: int
    losses_counted: float = Field(gt=0, description="by the last step; see `Engine`")
    scaler: dict[str, float] | None = Field(description="fp16 only")
    optimizer: SavedOptimizer
    base: SavedBase | None = Field(
        default=None,
        description="frozen parameters that it refers to; None: it holds all",
    )
    cursor: dict[str, JsonValue]
    extra: dict[str, JsonValue]
    extra_states: dict[str, str] = Field(
        default_factory=dict, description="of modules with a `get_extra_state`, saved by torch"
    )
    files: dict[FileName, SavedFile] = Field(default_factory=dict)

    def sealed(self) -> str:
        """Return the text of the file `checkpoint.json`."""
        content = json.loads(self.model_dump_json())
        seal = {"kind": "checkpoint", "schema_version": SCHEMA, "digest": self.digest()}
        return json.dumps({**seal, "checkpoint": content}, indent=1) + "\n"


def get_job_steps(extra: Mapping[str, Any]) -> int | None:
    """Return the steps of the job having saved a checkpoint; see `get_job_number`."""
    return get_job_number(extra, "max_steps")


def get_job_number(extra: Mapping[str, Any], key: str) -> int | None:
    """Return an integer of the job having saved a checkpoint, by the `extra` content, or None if no
    job did."""
    job = extra.get("job")
    number = job.get(key) if isinstance(job, dict) else None
    return number if isinstance(number, int) else None


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the checkpoint at `path`.

    Raises:
        Damaged: unreadable or altered.
        InputError: of another schema.
    """
    file = path / MANIFEST
    try:
        sealed: Any = json.loads(read_text(file))
        kind, schema, content = sealed["kind"], sealed["schema_version"], sealed["checkpoint"]
        digest, version = sealed["digest"], content["gpumix"]
    except (*_UNREADABLE_ERRORS, ValueError, KeyError, TypeError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else repr(error)
        raise make_damaged_error(file, f"it cannot be read: {why}") from error
    if (kind, schema) != ("checkpoint", SCHEMA):
        if version == gpumix.__version__:
            raise make_damaged_error(file, f"it is a {kind} of schema {schema}")
        raise InputError(
            f"this is a {kind} of schema {schema}, a checkpoint of schema {SCHEMA} is wanted",
            code="schema-unsupported",
            where=str(file),
            why=f"gpumix {version} saved it",
            fix=f"pip install gpumix=={version}",
        )
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        raise make_damaged_error(file, str(error.errors()[0]["msg"])) from error
    if manifest.digest() != digest:
        raise make_damaged_error(file, "its content is not what was saved")
    if STEP.fullmatch(path.name) and path.name != get_folder_name(manifest.step):
        raise make_damaged_error(file, f"it is of step {manifest.step}")
    return manifest


def verify(path: Path, files: Iterable[tuple[str, SavedFile]]) -> None:
    """Check files of the checkpoint at `path` against the saved sizes and digests.

    Raises:
        Damaged: a file is missing, truncated or altered.
    """
    for name, saved in files:
        try:
            with open_for_reading(path / name) as stream:
                size = os.fstat(stream.fileno()).st_size
                if size != saved.bytes:  # before reading: it may have no end
                    raise make_damaged_error(
                        path / name, f"it has {size} bytes, {saved.bytes} were saved"
                    )
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        except _UNREADABLE_ERRORS as error:
            raise make_damaged_error(path / name, error.strerror or str(error)) from error
        if digest != saved.sha256:
            raise make_damaged_error(path / name, "its content is not what was saved")


def check_written(file: Path, wanted: SavedFile) -> None:
    """Read back a written file.

    Raises:
        MachineError: the content differs.
    """
    if describe_file(file) != wanted:
        raise MachineError(
            "what was written is not what is there",
            code="checkpoint-read-back-differs",
            where=f"{socket.gethostname()}: {file}",
            why="bits changed in that host's memory or on its disk",
            fix="look at both: `dmesg | grep -i -e edac -e mce -e error`, `smartctl -a`",
        )


def describe_content(content: bytes) -> SavedFile:
    """Return the expected size and digest of a file with `content`."""
    return SavedFile(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def describe_file(file: Path) -> SavedFile:
    """Read a file and return size and digest."""
    with open_for_reading(file) as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return SavedFile(bytes=stream.tell(), sha256=digest)


def make_damaged_error(file: Path, why: str) -> Damaged:
    """Return the error for an unusable file of a checkpoint."""
    return Damaged(
        "this checkpoint is damaged",
        code="checkpoint-damaged",
        where=str(file),
        why=why,
        fix="give another one; the folder of its run stands for the newest that is whole",
    )
