"""Files of measurements: what they are named after, and how they are kept and found again.

No torch here: `gpumix plan` reads them.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import TypeVar

from gpumix.hardware.environment import cache_folder
from gpumix.profiler.code import hash_of_files
from gpumix.spec.cluster import Cluster
from gpumix.spec.errors import InputError
from gpumix.spec.profile import ClassMeasurement, InputMeasurement, LinkMeasurement

D = TypeVar("D", ClassMeasurement, LinkMeasurement, InputMeasurement)

# What is measured is the engine's own parts, by the profiler, on a device that may be emulated.
MEASURED_CODE = ("engine", "profiler", "hardware")


def renamed(found: ClassMeasurement, name: str) -> ClassMeasurement:
    """The measurement of a class that is called so here."""
    called = {"device_class": name}
    teams = tuple(
        t.model_copy(update={"device_class": t.device_class.model_copy(update=called)})
        for t in found.teams
    )
    of_class = found.device_class.model_copy(update=called)
    return found.model_copy(update={"device_class": of_class, "teams": teams})


def devices_key(cluster: Cluster) -> list[tuple[str, str]]:
    """Which devices are on which hosts, whatever they are called."""
    classes = {c.name: c.model_dump(exclude={"name"}) for c in cluster.classes}
    return sorted((d.host, hash_of(classes[d.device_class])) for d in cluster.devices)


def profiles_folder() -> Path:
    """Where measurements are kept, if nothing else is said."""
    return cache_folder() / "profiles"


def software_key() -> dict[str, object]:
    """What a measurement depends on of what is installed."""
    return {
        "gpumix": _own_code(),
        "torch": importlib.metadata.version("torch"),
        "transformers": _version_of("transformers"),
        "kernels": [_version_of(name) for name in ("flash-attn", "liger-kernel", "triton")],
    }


@functools.cache
def _own_code() -> str:
    """A hash of the code that measures and is measured."""
    home = Path(__file__).parents[1]
    return hash_of_files(f for package in MEASURED_CODE for f in (home / package).rglob("*.py"))


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def hash_of(value: object) -> str:
    """Sixteen hex digits that change when the value, which JSON can hold, does."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def more_time(measurement: ClassMeasurement, budget_s: float) -> bool:
    """Whether a larger budget may find more than it did."""
    return measurement.ended_by_budget_s is not None and budget_s > measurement.ended_by_budget_s


def keep(measurement: ClassMeasurement | LinkMeasurement | InputMeasurement, path: Path) -> None:
    """Write a measurement into its file."""
    path.unlink(missing_ok=True)  # what is broken is nobody's
    measurement.save(path)


def load(kind: type[D], path: Path) -> D | None:
    """What a file holds; None if it is not there, or cannot be used."""
    try:
        return kind.load(path) if path.is_file() else None
    except InputError:
        return None  # of another version, or cut short: measured again
