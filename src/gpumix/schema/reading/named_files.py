"""Files and folders named by a job, checked before anything is measured or imported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gpumix.schema.errors import InputError
from gpumix.schema.job.job import Job


def check_named_files(job: Job, path: Path) -> None:
    """Check that the weights, the tokenizer and the data of a job are there.

    Args:
        job: with absolute paths.
        path: of the job's file, for errors.

    Raises:
        InputError: one of them is missing.
    """
    for key, place in _iterate_named(job):
        if not place.exists():
            raise InputError(
                f"{key} names a file or folder that is not there: {place}",
                code="named-file-missing",
                where=str(path),
                fix=f"correct {key}; its paths start from the folder of the job",
            )


def _iterate_named(job: Job) -> Iterator[tuple[str, Path]]:
    """Yield each file or folder with its key."""
    if job.model.weights is not None:
        yield "model.weights", job.model.weights
    if isinstance(job.tokenizer, Path):
        yield "tokenizer", job.tokenizer
    yield from (("data.text", place) for place in job.data.text)
    if job.data.dataset is not None:
        yield "data.dataset", job.data.dataset
