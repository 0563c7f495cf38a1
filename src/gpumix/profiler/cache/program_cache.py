"""Measurement cache of a program with its own key for the model.

The cache of a job is in `profiler.cache`; this module is for `gpumix.profile`, where the model is a
function's result and unknown before the call.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils._pytree import tree_map

from gpumix.profiler.cache.measurement_files import MeasurementFiles, profiles_folder, software_key
from gpumix.profiler.cache.source_hash import hash_files
from gpumix.profiler.subject import Workload
from gpumix.schema.cluster.cluster import Cluster


def open_program_cache(told: object, subject: Workload, cluster: Cluster) -> MeasurementFiles:
    """Return the measurement files of a program's model on a cluster.

    Args:
        told: a key for the program's work; see `describe_work`.
    """
    work = {
        **software_key(),
        "program": told,
        "shape": (subject.sequence_length, subject.global_batch),
        "units": subject.units,
        "tensor": None if subject.tensor is None else sorted(map(str, subject.tensor.items())),
    }
    return MeasurementFiles(
        profiles_folder(),
        work,
        cluster,
        settings=subject.settings,
        degrees=subject.degrees,
        sequence=subject.sequence,
        budget_s=subject.budget_s,
    )


def describe_work(model: nn.Module, batch: Any, *more: object) -> dict[str, object]:
    """Return a key for measurements of a model and its batches: modules with settings and code,
    parameters, and the look of a batch.

    Args:
        more: further dependencies.
    """
    classes = {type(module) for module in model.modules()}
    files = {file for one in classes if (file := _find_source_file(one)) is not None}
    config = getattr(model, "config", None)
    return {
        "modules": str(model),
        "config": str(config),
        "code": hash_files(files),
        "parameters": [
            (name, list(p.shape), str(p.dtype), p.requires_grad)
            for name, p in model.named_parameters(remove_duplicate=False)
        ],
        "batch": str(tree_map(lambda t: (t.shape, t.dtype) if hasattr(t, "shape") else t, batch)),
        "more": more,
    }


def _find_source_file(kind: type) -> Path | None:
    try:
        file = inspect.getsourcefile(kind)
    except TypeError:  # built in, or from an interactive session
        return None
    return Path(file) if file is not None and Path(file).is_file() else None
