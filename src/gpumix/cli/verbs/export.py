"""`gpumix export`: a run's weights as a folder for transformers to load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gpumix.cli.common import Allowed, Json, print_json, require_checkpoint


def export(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="A run's folder, the output folder of a script, or a checkpoint."
        ),
    ],
    to: Annotated[Path, typer.Option("--to", help="The folder to write.")],
    dtype: Annotated[str, typer.Option("--dtype", help="fp32 or bf16.")] = "fp32",
    adapters: Annotated[
        bool,
        typer.Option("--adapters", help="Write LoRA adapters alone, as PEFT saves them."),
    ] = False,
    allowed: Allowed = [],  # noqa: B006 - typer copies it
    as_json: Json = False,
) -> None:
    """Write the weights of a run's newest checkpoint as safetensors, with configuration and
    tokenizer: a folder that transformers loads. Adapters are merged into their base.

    Example: gpumix export runs/latest --to my-model
    """
    require_checkpoint(run)
    from gpumix.train.checkpoint.export import export as write
    from gpumix.train.console.terminal import get_stderr_console

    replaces = to.is_dir() and any(to.iterdir())
    write(run, to, dtype=dtype, tell=get_stderr_console().print, allowed=allowed, adapters=adapters)
    if as_json:
        print_json({"folder": str(to)})
    else:
        told = ", in place of the former export" if replaces else ""
        get_stderr_console().print(f"wrote {to}{told}")
