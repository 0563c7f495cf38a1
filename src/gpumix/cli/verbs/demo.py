"""`gpumix demo`: a complete run on unlike GPUs of this host, or on four emulated devices; the text
is from Python's standard library."""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import asdict
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Annotated

import typer

from gpumix.cli.common import Json, print_json, shows_tracebacks
from gpumix.schema.errors import InputError
from gpumix.schema.files import remove, write_text_atomically
from gpumix.train.run_log import run_files

if TYPE_CHECKING:
    from gpumix.cli.demo_devices import DemoDevices
    from gpumix.train.run_log.even_baseline import EvenBaseline
    from gpumix.train.run_log.metrics import RunEvent

JOB_FILE = "demo.yaml"
EVEN_STEPS = 2
# Not a part of the library itself, or not in every installation.
EXCLUDED_SOURCES = {"site-packages", "test", "idlelib", "__pycache__", "lib2to3"}

GPT = {
    "model_type": "gpt2",
    "activation_function": "gelu_pytorch_tanh",  # transformers' own activation, as one operation
    "vocab_size": 264,  # 256 bytes, the end of a text, rounded up
    "bos_token_id": 256,
    "eos_token_id": 256,
}


def demo(
    steps: Annotated[int, typer.Option("--max-steps", min=3, help="Training steps.")] = 24,
    output: Annotated[
        Path,
        typer.Option("--output-dir", "-o", help="The run's folder; a former demo is replaced."),
    ] = Path("runs/demo"),
    overrides: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="Replace a key of the job.")
    ] = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Train a small GPT on the unequal GPUs of this host, or on an emulated mixture; takes a few
    minutes.

    Example: gpumix demo --max-steps 10
    """
    from gpumix.cli.demo_devices import choose_demo_devices
    from gpumix.train.controller import JobController, UserPlan, format_overrun_warning
    from gpumix.train.run_figures.words import format_token_rate
    from gpumix.train.run_figures.writer import append_event
    from gpumix.train.run_log.even_baseline import measure_best_even_plan

    _check_output_folder(output)
    devices = choose_demo_devices()
    pipeline = JobController.of_file(
        _write_job(output, steps, devices), overrides, debug=shows_tracebacks()
    )
    pipeline.show(devices.said)
    for name in run_files.ALL:  # of a former run
        remove(output / name)
    summary = pipeline.train(UserPlan(), resume=False)
    pipeline.show(f"now an even split on the same devices, {EVEN_STEPS} steps in each setting")
    even = measure_best_even_plan(pipeline, pipeline.profile(), EVEN_STEPS)
    overruns = summary.overruns + even.overruns
    if even.overruns:
        pipeline.show(format_overrun_warning("the even split"))
    speedup = summary.tokens_per_s / even.trial.tokens_per_s
    append_event(pipeline.job.output_dir, summary.steps, _make_even_event(even))
    from rich.text import Text

    pipeline.show_summary(summary)
    if which("gpumix") is None:
        activate = Path(sys.prefix) / "bin" / "activate"
        pipeline.show(f"`gpumix` is not on the PATH yet; for these commands: source {activate}")
    answer = (
        f"measured: {speedup:.2f}x as fast as an even split in its best setting "
        f"({format_token_rate(even.trial.tokens_per_s)}: {even.setting})"
    )
    pipeline.show(Text(answer, style="bold"))
    if as_json:
        print_json({**asdict(summary), "speedup_vs_even": speedup, "all_overruns": overruns})


def _make_even_event(even: EvenBaseline) -> RunEvent:
    """Return the event of the even split's speed, for the run's report."""
    from gpumix.train.run_log.metrics import RunEvent

    fields = {
        "strategy": "even",
        "steps": EVEN_STEPS,
        "setting": even.setting,
        "tried": even.tried,
        "step_s": even.trial.step_s,
        "tokens_per_s": even.trial.tokens_per_s,
        "overruns": even.overruns,
    }
    return RunEvent("compared", fields, "")


def _write_job(folder: Path, steps: int, devices: DemoDevices) -> Path:
    """Write the demo's job file."""
    import yaml

    job = {
        "model": {"config": GPT | devices.model_size},
        "data": {"text": _list_library_sources(), "pattern": "*.py", "validation_split": 0.01},
        "sequence_length": devices.sequence_length,
        "global_batch_size": devices.global_batch,
        "max_steps": steps,
        "optimizer": {"lr": 1e-3},  # at twice that rate the loss jumps before it falls
        "lr_scheduler": {"warmup_steps": 6},
        "cluster": devices.cluster,
        "techniques": devices.techniques,
        "output_dir": str(folder.absolute()),
        "logging_steps": 2,
        "eval_steps": max(1, steps // 2),
        "eval_batches": 1,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / JOB_FILE
    write_text_atomically(path, yaml.safe_dump(job, sort_keys=False))
    return path


def _check_output_folder(folder: Path) -> None:
    """Refuse to clear a folder with files not written by a demo."""
    if folder.exists() and not folder.is_dir():
        raise InputError(
            "the demo's output is a file, not a folder",
            code="output-is-file",
            where=str(folder),
            fix="gpumix demo --output-dir FOLDER",
        )
    found = {path.name for path in folder.iterdir()} if folder.exists() else set()
    foreign = found - {JOB_FILE, *run_files.ALL} if JOB_FILE in found else found
    if foreign:
        raise InputError(
            f"'{min(foreign)}' is there, which no demo wrote",
            code="output-folder-foreign",
            where=str(folder),
            fix="give the demo a folder of its own: `gpumix demo --output-dir FOLDER`",
        )


def _list_library_sources() -> list[str]:
    """Return the source paths of the standard library: modules and packages."""
    library = Path(sysconfig.get_path("stdlib"))
    found = [
        path
        for path in sorted(library.iterdir())
        if path.name not in EXCLUDED_SOURCES
        and (path.suffix == ".py" or (path / "__init__.py").is_file())
    ]
    return [str(path) for path in found]
