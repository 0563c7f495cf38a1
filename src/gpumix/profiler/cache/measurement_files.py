"""Measurement files: naming, storing and loading.

No torch here: `gpumix plan` reads the files.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import gpumix
from gpumix.hardware.host.environment import cache_folder
from gpumix.profiler.cache.source_hash import hash_files
from gpumix.profiler.class_settings import ClassSettings
from gpumix.schema.cluster.cluster import Cluster, DeviceClass
from gpumix.schema.errors import InputError
from gpumix.schema.files import remove
from gpumix.schema.profile.measurements import ClassMeasurement, InputMeasurement, LinkMeasurement

D = TypeVar("D", ClassMeasurement, LinkMeasurement, InputMeasurement)

# Measured are the engine's own parts, by the profiler, on a device that may be emulated.
MEASURED_CODE = ("engine", "profiler", "hardware")
DOUBTFUL_KEPT_S = 3600.0  # for measurements of a machine that was busy


class MeasurementFiles:
    """Measurements of one model on one cluster, in files named by a hash of dependencies.

    Args:
        folder: of the files.
        work: a key for the model and its use, of JSON values.
        settings: of each class, all named.
        degrees, sequence: the tensor-parallel degrees of each class, and whether positions are
            divided; see `Workload`.
        budget_s: the time limit for measuring one device.
    """

    def __init__(
        self,
        folder: Path,
        work: Mapping[str, object],
        cluster: Cluster,
        *,
        settings: ClassSettings,
        degrees: Mapping[str, tuple[int, ...]],
        sequence: tuple[bool, ...],
        budget_s: float,
    ) -> None:
        self.settings = settings
        self.degrees = degrees
        self._folder = folder
        self._work = work
        self._cluster = cluster
        self._sequence = sequence
        self._budget_s = budget_s

    def class_file(self, device_class: DeviceClass) -> Path:
        """Return the file of a class's measurement, independent of the class's name."""
        name = device_class.name
        work = {
            **self._work,
            "class": device_class.model_dump(exclude={"name"}),
            "compiled": name in self.settings.compiled,
            "compute_dtype": self.settings.dtypes[name],
            "efficiency": self.settings.chosen[name].efficiency.model_dump(),
            "degrees": self.degrees.get(name, ()),
            "sequence": self._sequence if self.degrees.get(name) else (),
        }
        return self._folder / f"class-{hash_json(work)}.json"

    def link_file(self) -> Path:
        """Return the file of the link measurement, by devices and hosts."""
        degrees = sorted({n for of_class in self.degrees.values() for n in of_class})
        work = {**self._work, "devices": _devices_key(self._cluster), "degrees": degrees}
        return self._folder / f"links-{hash_json(work)}.json"

    def measured(self) -> dict[str, ClassMeasurement]:
        """Return the known measurements, by class name."""
        found = {c.name: self._known(c) for c in self._cluster.classes}
        return {name: one for name, one in found.items() if one is not None}

    def links(self) -> LinkMeasurement | None:
        return load_measurement(LinkMeasurement, self.link_file())

    def save(self, classes: Mapping[str, ClassMeasurement], links: LinkMeasurement | None) -> None:
        """Save measurements, by class name; None keeps the existing links."""
        for name, measurement in classes.items():
            write_measurement(measurement, self.class_file(self._cluster.class_named(name)))
        if links is not None:
            write_measurement(links, self.link_file())

    def _known(self, device_class: DeviceClass) -> ClassMeasurement | None:
        file = self.class_file(device_class)
        found = load_measurement(ClassMeasurement, file)
        if found is None or _can_find_more(found, self._budget_s):
            return None
        if found.device_class.overruns and time.time() - file.stat().st_mtime > DOUBTFUL_KEPT_S:
            return None
        return _renamed(found, device_class.name)


def _renamed(found: ClassMeasurement, name: str) -> ClassMeasurement:
    """Rename the class of a measurement to its local name."""
    called = {"device_class": name}
    tp_measurements = tuple(
        t.model_copy(update={"device_class": t.device_class.model_copy(update=called)})
        for t in found.tp_measurements
    )
    of_class = found.device_class.model_copy(update=called)
    return found.model_copy(update={"device_class": of_class, "tp_measurements": tp_measurements})


def _devices_key(cluster: Cluster) -> list[tuple[str, ...]]:
    """Return a key of the devices in rank order, independent of names."""
    classes = {c.name: hash_json(c.model_dump(exclude={"name"})) for c in cluster.classes}
    return [(d.host, d.island, d.rack, classes[d.device_class]) for d in cluster.in_rank_order()]


def profiles_folder() -> Path:
    """Return the default folder of measurements."""
    return cache_folder() / "profiles"


def software_key() -> dict[str, object]:
    """Return the installed software that a measurement depends on."""
    return {
        "gpumix": _hash_own_code(),
        "torch": importlib.metadata.version("torch"),
        "transformers": _version_of("transformers"),
        "kernels": [_version_of(name) for name in ("flash-attn", "liger-kernel", "triton")],
        "adapters": [_version_of(name) for name in ("bitsandbytes", "peft", "torchao")],
    }


@functools.cache
def _hash_own_code() -> str:
    """Hash the measuring and the measured code."""
    return hash_files(own_files())


def own_files() -> list[Path]:
    """Return the files of gpumix whose code measures or is measured."""
    home = Path(gpumix.__file__).parent
    return [file for package in MEASURED_CODE for file in (home / package).rglob("*.py")]


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def hash_json(value: object) -> str:
    """Return sixteen hex digits, as a hash of a JSON value."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _can_find_more(measurement: ClassMeasurement, budget_s: float) -> bool:
    """Check if a larger budget may find more."""
    return measurement.ended_by_budget_s is not None and budget_s > measurement.ended_by_budget_s


def write_measurement(
    measurement: ClassMeasurement | LinkMeasurement | InputMeasurement, path: Path
) -> None:
    """Write a measurement into its file."""
    remove(path)  # replaces a broken file, folder or link
    measurement.save(path)


def load_measurement(kind: type[D], path: Path) -> D | None:
    """Return a file's measurement; None if the file is missing or unusable."""
    try:
        return kind.load(path) if path.is_file() else None
    except InputError:
        return None  # of another version, or cut short: measured again
