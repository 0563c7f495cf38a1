"""Check for equal datasets on all ranks: a program may have sharded its data by rank, or shuffled
or split without a seed. Ranks would train on samples twice, or never."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset

from gpumix.engine.model.rng import preserve_all_rng
from gpumix.hardware.memory_limit import count_as_host_memory
from gpumix.integrations.common.gather import gather_integers
from gpumix.schema.errors import InputError

COMPARED_SAMPLES = 3  # samples
UNKNOWN = -1


def check_same_data(dataset: Any) -> None:
    """Raise InputError if lengths or some samples of ranks' datasets differ. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    length = len(dataset) if hasattr(dataset, "__len__") else UNKNOWN
    told = gather_integers(
        [length, *_digest_samples(dataset, max(0, length))], "comparison of datasets"
    )
    lengths = {row[0] for row in told}
    if len(lengths) > 1:
        each = ", ".join(f"rank {rank} has {row[0]}" for rank, row in enumerate(told))
        raise _make_unlike_error(f"{each} samples")
    for column in list(zip(*told))[1:]:
        other = next((r for r, one in enumerate(column) if one != column[0]), None)
        if other is not None and UNKNOWN not in column:
            raise _make_unlike_error(f"rank {other} has other samples than rank 0")


def _make_unlike_error(why: str) -> InputError:
    return InputError(
        "ranks have unlike datasets",
        code="datasets-differ-by-rank",
        why=f"{why}: gpumix shares out each batch among ranks, which read the same dataset",
        fix="give every rank the whole dataset: leave out split_dataset_by_node, sharding by rank, "
        "and shuffles or splits without a seed",
    )


def _digest_samples(dataset: Any, length: int) -> list[int]:
    """Return digests of some samples; `UNKNOWN` if two reads of a sample differ."""
    first, again = (list(_read_digests(dataset, length)) for _ in range(2))
    found = [one if one == other else UNKNOWN for one, other in zip(first, again)]
    return found + [UNKNOWN] * (COMPARED_SAMPLES - len(found))


def _read_digests(dataset: Any, length: int) -> Iterator[int]:
    """Yield digests of a stream's first samples, or of a dataset's first, middle and last
    sample."""
    with _seed_generators(), count_as_host_memory():
        if isinstance(dataset, IterableDataset):
            yield from map(_digest, islice(dataset, COMPARED_SAMPLES))
        elif length:
            yield from (_digest(dataset[n]) for n in (0, length // 2, length - 1))


def _digest(sample: Any) -> int:
    digest = hashlib.sha256()
    _update_digest(digest, sample)
    return int.from_bytes(digest.digest()[:6], "little")


def _update_digest(digest: Any, value: Any) -> None:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            digest.update(str(key).encode())
            _update_digest(digest, value[key])
    elif isinstance(value, list | tuple):
        for one in value:
            _update_digest(digest, one)
    elif isinstance(value, Tensor):
        _update_digest(digest, value.detach().cpu().double().numpy())
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.shape}".encode() + np.ascontiguousarray(value).tobytes())
    elif isinstance(value, str | int | float | bool | bytes | None):
        digest.update(repr(value).encode())
    else:  # an image, for example
        digest.update(type(value).__name__.encode())


@contextmanager
def _seed_generators() -> Iterator[None]:
    """Seed the global generators for datasets inside the context; restore them afterwards."""
    with preserve_all_rng():
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        yield
