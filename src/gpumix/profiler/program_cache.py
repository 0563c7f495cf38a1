"""Where the measurements of a program are kept, which says itself what tells its model from others.

A job's are in `profiler.cache`; this is for `gpumix.profile`, which is given a function and cannot
see what it makes.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils._pytree import tree_map

from gpumix.profiler.code import hash_of_files
from gpumix.profiler.measure import Subject
from gpumix.profiler.measurement_files import (
    devices_key,
    hash_of,
    keep,
    load,
    more_time,
    profiles_folder,
    renamed,
    software_key,
)
from gpumix.spec.cluster import Cluster, DeviceClass
from gpumix.spec.profile import ClassMeasurement, LinkMeasurement


class ProgramCache:
    """The measurements of one program's model on one cluster.

    Args:
        told: what tells the program's work from any other's; see `work_of`.
    """

    def __init__(self, told: object, subject: Subject, cluster: Cluster) -> None:
        self._subject = subject
        self._cluster = cluster
        self._where = profiles_folder()
        self._work = {
            **software_key(),
            "program": told,
            "shape": (subject.shape.sequence_length, subject.shape.global_batch),
            "units": subject.units,
            "tensor": None if subject.tensor is None else sorted(map(str, subject.tensor.items())),
        }

    def measured(self) -> dict[str, ClassMeasurement]:
        """What is known already, by class name."""
        found = {c.name: self._known(c) for c in self._cluster.classes}
        return {name: one for name, one in found.items() if one is not None}

    def links(self) -> LinkMeasurement | None:
        return load(LinkMeasurement, self._link_file())

    def save(self, classes: Mapping[str, ClassMeasurement], links: LinkMeasurement | None) -> None:
        """Keep measurements, by class name."""
        for name, measurement in classes.items():
            keep(measurement, self._class_file(self._cluster.class_named(name)))
        if links is not None:
            keep(links, self._link_file())

    def _known(self, device_class: DeviceClass) -> ClassMeasurement | None:
        found = load(ClassMeasurement, self._class_file(device_class))
        if found is None or more_time(found, self._subject.budget_s):
            return None
        return renamed(found, device_class.name)

    def _class_file(self, device_class: DeviceClass) -> Path:
        subject, name = self._subject, device_class.name
        work = {
            **self._work,
            "class": device_class.model_dump(exclude={"name"}),
            "compiled": name in subject.compiled,
            "compute_dtype": subject.dtypes[name],
            "efficiency": subject.chosen_for(name).efficiency.model_dump(),
            "degrees": subject.degrees.get(name, ()),
            "sequence": subject.sequence if subject.degrees.get(name) else (),
        }
        return self._where / f"class-{hash_of(work)}.json"

    def _link_file(self) -> Path:
        degrees = sorted({n for of_class in self._subject.degrees.values() for n in of_class})
        work = {**self._work, "devices": devices_key(self._cluster), "degrees": degrees}
        return self._where / f"links-{hash_of(work)}.json"


def work_of(model: nn.Module, batch: Any, *more: object) -> dict[str, object]:
    """What tells a model and its batches from others, for measurements: its modules with their
    settings and their code, its parameters, what a batch looks like.

    Args:
        more: what else matters.
    """
    classes = {type(module) for module in model.modules()}
    files = {file for one in classes if (file := _file_of(one)) is not None}
    config = getattr(model, "config", None)
    return {
        "modules": str(model),
        "config": str(config),
        "code": hash_of_files(files),
        "parameters": [(n, list(p.shape), str(p.dtype), p.requires_grad) for n, p in _named(model)],
        "batch": str(tree_map(lambda t: (t.shape, t.dtype) if hasattr(t, "shape") else t, batch)),
        "more": more,
    }


def _named(model: nn.Module) -> Any:
    return model.named_parameters(remove_duplicate=False)


def _file_of(kind: type) -> Path | None:
    try:
        file = inspect.getsourcefile(kind)
    except TypeError:  # it is built in, or was made in an interactive session
        return None
    return Path(file) if file is not None and Path(file).is_file() else None
