"""Verbs that decide, run in this process; and a job with a profile for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from typing import Any

import yaml
from click.testing import Result
from typer.testing import CliRunner

from gpumix.cli import app
from gpumix.schema.plan.plan import Collectives
from gpumix.schema.profile.profile import ROOT, Profile, UnitTimes
from helpers.plans.profiles import GIB, MIB, Card, Network, block, curve, line, profile, root
from helpers.processes.commands import Done
from helpers.runs import jobs

JOB = {
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 512,
            "vocab_size": 1000,
        }
    },
    "data": {"text": ["a.txt"]},
    "tokenizer": "bytes",
    "sequence_length": 128,
    "global_batch_size": 8,
    "max_steps": 1,
    # Few plans: they are found soon.
    "techniques": {
        "max_pipeline_stages": 1,
        "tensor_parallel_size": 1,
        "zero_stages": 3,
        "state_on": "device",
    },
    "output_dir": "run",
}


def gpumix(*arguments: str | Path) -> Result:
    """The command line, here: `stdout`, `stderr` and `exit_code`."""
    return CliRunner().invoke(app, [str(a) for a in arguments])


def here(*arguments: str | Path, folder: Path) -> Done:
    """The same in a folder, told as of a process (`jobs.gpumix`)."""
    with chdir(folder):
        done = gpumix(*arguments)
    return Done(done.exit_code, done.stdout, done.stderr)


def refused(*arguments: str | Path, code: int = 2) -> str:
    """What the command line says against `arguments`: one error and no traceback."""
    done = gpumix(*arguments)
    assert done.exit_code == code, done.output
    assert done.stderr.count("gpumix: ") == 1
    assert "Traceback" not in done.output
    assert done.stdout == ""
    return done.stderr


def heavy_imports(folder: Path, *commands: tuple[str, ...]) -> dict[str, list[Any]]:
    """The exit code of each command, and what is imported after it that takes seconds to import;
    one process runs all."""
    code = f"""
import json, sys
from gpumix.cli import app
found = {{}}
for command in {commands!r}:
    try:
        app(command)
    except SystemExit as left:
        heavy = {{"torch", "transformers", "scipy", "pandas"}} & set(sys.modules)
        found[" ".join(command)] = [left.code or 0, *heavy]
print(json.dumps(found))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=os.environ | jobs.environment(folder),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[Any]] = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == len(commands)
    return found


def write_job(folder: Path, **changes: Any) -> Path:
    (folder / "a.txt").write_text("some text " * 500, encoding="utf-8")
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(JOB | changes), encoding="utf-8")
    return path


def measured() -> Profile:
    """Of two classes of GPU, with all that a profile can say."""
    times = [
        {
            "block": UnitTimes(
                forward=curve(s, 1.8 * s, 3.5 * s, sizes=(1, 2, 4)),
                backward=curve(3 * s, 5.8 * s, 11 * s, sizes=(1, 2, 4)),
                gradient=curve(2 * s, 3.9 * s, 7 * s, sizes=(1, 2, 4)),
            ),
            ROOT: UnitTimes(forward=curve(s / 10), backward=curve(s / 2)),
        }
        for s in (0.02, 0.07)
    ]
    bus = curve(1e-4, 2e-3, sizes=(1e3, 1e6))
    forms = {"native": bus, "list": curve(2e-4, 3e-3, sizes=(1e3, 1e6))}
    return profile(
        [
            Card(
                name,
                count,
                memory,
                of_class,
                optimizer_s_per_element=1e-9,
                framework=MIB,
                largest=16,
                accelerator="cuda",
                host_copy=curve(1e-4, 1e-1, sizes=(1e3, 1e9)),
                host_bytes=GIB,
            )
            for (name, count, memory), of_class in zip(
                [("quick", 2, 64 * MIB), ("tardy", 1, 32 * MIB)], times
            )
        ],
        kinds=[
            block(
                trainable=100_000,
                kept=line(3e4),
                gradient=line(3e4),
                forward=line(1e5),
                backward=line(3e5),
                saved=line(2e5),
                saved_forward=line(1e4),
                saved_backward=line(1e5),
                flops=3e10,
            )
        ],
        root_unit=root(50_000, buffers=100, kept=line(1e4), head=line(4e5)),
        network=Network(forms, forms, Collectives(gather="list", reduce="list"), contention=0.2),
        overhead=1e-3,
    )
