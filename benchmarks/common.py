"""What benchmarks share: the tests' models and launcher of ranks, arguments, and printed figures.

The benchmarks of the engine measure with the very models and ranks that its tests use; importing
this module makes those importable.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpumix.schema.cluster.cluster import Cluster, Device, DeviceClass

BENCHMARKS = Path(__file__).resolve().parent
TESTS = BENCHMARKS.parent / "tests"
USER_CODE = TESTS / "helpers" / "user_code"
for folder in (TESTS, USER_CODE):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

TEXT = Path(sysconfig.get_path("stdlib")) / "asyncio"  # real text that every Python has
TRAIN = (sys.executable, "-m", "gpumix", "train", "job.yaml")

Figures = dict[str, int | float | str | bool | None]


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """The parser of a benchmark's arguments: `--json`, and the first line of the docstring."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="end with one flat object of JSON")
    return parser


def print_figures(figures: Figures, *, as_json: bool) -> None:
    """The result, as the last line of stdout: one flat JSON object, or words."""
    words = ", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in figures.items())
    print(json.dumps(figures) if as_json else words)


def print_counted(
    figures: Figures, *, as_json: bool, limits: Mapping[str, float | bool] | None = None
) -> int:
    """The same of figures that count only without `overruns`; the exit code that says so, and
    whether each is within its limit.

    Args:
        limits: by figure, the most that it may be; True: it must be true.
    """
    print_figures(figures, as_json=as_json)
    if figures["overruns"]:
        told = (
            "this machine was too busy to emulate the devices at full speed: "
            "this does not count, run it on an idle host"
        )
        print(told, file=sys.stderr)
    missed = [
        f"{name} is {figures[name]}, {'not true' if limit is True else f'more than {limit}'}"
        for name, limit in (limits or {}).items()
        if not (figures[name] if limit is True else float(figures[name]) <= limit)
    ]
    print(*missed, sep="\n", end="\n" * bool(missed), file=sys.stderr)
    return int(figures["overruns"] != 0 or bool(missed))


def environment(*folders: Path) -> dict[str, str]:
    """For processes that import what stands in these folders and in this one."""
    paths = [*map(str, (*folders, BENCHMARKS)), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def small_gpt2(
    width: int, *, positions: int, layers: int = 4, heads: int = 4, dropout: float = 0.0
) -> dict[str, int | float | str]:
    """The configuration of a GPT-2 for tokens that are bytes."""
    return {
        "model_type": "gpt2",
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": positions,
        "vocab_size": 264,
        "bos_token_id": 256,
        "eos_token_id": 256,
        "resid_pdrop": dropout,
        "embd_pdrop": dropout,
        "attn_pdrop": dropout,
    }


def records(run_folder: Path, event: str) -> list[dict[str, Any]]:
    """Those of one kind in the metrics of a run, which may be under way: the last line may be half
    there, and before the first there is no file."""
    told = []
    with suppress(OSError):
        for line in (run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):
                told.append(json.loads(line))
    return [one for one in told if one["event"] == event]


def emulated_cluster(classes: dict[str, tuple[int, float]], *, memory_bytes: int) -> Cluster:
    """Emulated devices: of each class how many, and the FLOP/s of one."""
    return cluster_of(*((name, n, rate, memory_bytes) for name, (n, rate) in classes.items()))


def cluster_of(*groups: tuple[str, int, str | float | None, str | int]) -> Cluster:
    """Devices on the CPU, given as (class, count, speed, memory); without a speed not slowed."""
    classes: list[dict[str, Any]] = [
        {"name": name, "accelerator": "cpu", "memory_bytes": memory, "emulate_flops_per_s": speed}
        for name, _, speed, memory in groups
    ]
    return Cluster(
        classes=tuple(DeviceClass(**values) for values in classes),
        devices=tuple(
            Device(id=f"{name}-{number}", device_class=name)
            for name, count, *_ in groups
            for number in range(count)
        ),
    )
