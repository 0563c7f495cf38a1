"""Where the measurements of a program are kept, which says itself what tells its model from others.

A job's are in `profiler.cache`; this is for `gpumix.profile`, which is given a function and cannot
see what it makes.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils._pytree import tree_map

from gpumix.profiler.code import hash_of_files
from gpumix.profiler.measure import Subject
from gpumix.profiler.measurement_files import MeasurementFiles, profiles_folder, software_key
from gpumix.spec.cluster import Cluster


def program_cache(told: object, subject: Subject, cluster: Cluster) -> MeasurementFiles:
    """The measurements of one program's model on one cluster.

    Args:
        told: what tells the program's work from any other's; see `work_of`.
    """
    work = {
        **software_key(),
        "program": told,
        "shape": (subject.shape.sequence_length, subject.shape.global_batch),
        "units": subject.units,
        "tensor": None if subject.tensor is None else sorted(map(str, subject.tensor.items())),
    }
    return MeasurementFiles(
        profiles_folder(),
        work,
        cluster,
        dtypes=subject.dtypes,
        compiled=subject.compiled,
        chosen=subject.chosen,
        degrees=subject.degrees,
        sequence=subject.sequence,
        budget_s=subject.budget_s,
    )


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
