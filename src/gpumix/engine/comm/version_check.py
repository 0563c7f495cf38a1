"""Check that all ranks run the same gpumix and torch, because most launchers do not compare.

Ranks of unlike versions may wait for each other in mismatched collectives, or compute unlike steps.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Sequence

import torch
import torch.distributed as dist

import gpumix
from gpumix.schema.errors import InputError

PACKAGES = ("gpumix", "torch")


def own_versions() -> str:
    """Return this rank's host and versions, in JSON."""
    # Builds for unlike GPUs have the same version.
    torchs = str(torch.__version__).partition("+")[0]
    return json.dumps({"host": socket.gethostname(), "gpumix": gpumix.__version__, "torch": torchs})


def hash_versions(told: str) -> int:
    """Return a number of 60 bits, equal for equal versions."""
    known = json.loads(told)
    text = json.dumps([known[package] for package in PACKAGES])
    return int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)


def publish_versions(told: str, rank: int) -> None:
    """Store versions for `read_all_versions`, in the store of the default process group, if
    initialized."""
    if dist.is_initialized():
        _store().set(str(rank), told)


def read_all_versions(world: int) -> list[str]:
    """Return the versions of all ranks, once every rank has published."""
    return [_store().get(str(rank)).decode() for rank in range(world)]


def check_equal_versions(told: Sequence[str]) -> None:
    """Refuse ranks of unlike versions.

    Args:
        told: versions by rank.

    Raises:
        InputError: a rank runs another version than rank 0.
    """
    first, *others = map(json.loads, told)
    for rank, other in enumerate(others, 1):
        for package in PACKAGES:
            if other[package] != first[package]:
                raise InputError(
                    f"{package} is {first[package]} on {first['host']} (rank 0), "
                    f"{other[package]} on {other['host']} (rank {rank})",
                    code="versions-differ",
                    fix="install the same version on both hosts",
                )


def _store() -> dist.Store:
    return dist.PrefixStore("gpumix/versions", dist.distributed_c10d._get_default_store())
