"""`gpumix schema`: the JSON schema of a job, for editors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpumix.cli.common import print_json


def schema(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write it here instead of stdout.")
    ] = None,
) -> None:
    """Print the JSON schema of a job, for editors that check YAML.

    Example: gpumix schema --output job.schema.json
    """
    import json

    from gpumix.schema.files import write_text_atomically
    from gpumix.schema.reading.job_schema import make_job_schema

    made = make_job_schema()
    if output is None:
        print_json(made)
    else:
        write_text_atomically(output, json.dumps(made, indent=2) + "\n")
