"""The JSON schema of job files, as a text."""

from __future__ import annotations

import json

from gpumix.schema.reading.job_schema import make_job_schema


def text() -> str:
    """The whole file."""
    return json.dumps(make_job_schema(), indent=1) + "\n"
