"""What benchmarks share: the tests' models and launcher of ranks, and how figures are printed.

The benchmarks of the engine measure with the very models and ranks that its tests use; importing
this module makes those importable.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gpumix.spec.cluster import Cluster, Device, DeviceClass

TESTS = Path(__file__).resolve().parents[1] / "tests"
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

Figures = dict[str, int | float | str | bool]


def print_figures(figures: Figures, *, as_json: bool) -> None:
    """The result, as the last line of stdout: one flat JSON object, or words."""
    words = ", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in figures.items())
    print(json.dumps(figures) if as_json else words)


def emulated_cluster(classes: dict[str, tuple[int, float]], *, memory_bytes: int) -> Cluster:
    """Emulated devices: of each class how many, and the FLOP/s of one."""
    return Cluster(
        classes=tuple(
            DeviceClass(
                name=name, accelerator="cpu", memory_bytes=memory_bytes, emulate_flops_per_s=rate
            )
            for name, (_, rate) in classes.items()
        ),
        devices=tuple(
            Device(id=f"{name}-{n}", device_class=name)
            for name, (count, _) in classes.items()
            for n in range(count)
        ),
    )
