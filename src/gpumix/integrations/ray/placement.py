"""Assignment of ranks to workers started by Ray, and messages for workers that did not start.

Pure: Ray's answers come in as values, and nothing here imports Ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpumix.schema.errors import (
    GpumixError,
    InputError,
    MachineError,
    RankLost,
    TrainingError,
    format_in_one_line,
)

ACCELERATOR = "ray.io/accelerator-type"  # the label that Ray itself gives nodes with GPUs
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Workers:
    """A number of workers of a kind, a device each.

    Attributes:
        labels: of their nodes, in the syntax of Ray's label selectors.
        resources: that Ray reserves for each worker.
    """

    count: int
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1, "GPU": 1})


@dataclass(frozen=True)
class WantedWorker:
    """A wanted worker, with the name of its kind."""

    name: str
    workers: Workers

    def __str__(self) -> str:
        labels = [f"{name}={value}" for name, value in self.workers.labels.items()]
        kept = [f"{amount:g} {name}" for name, amount in self.workers.resources.items()]
        return f"'{self.name}' ({', '.join([*kept, *labels])})"


def list_wanted_workers(workers: Mapping[str, int | Workers]) -> list[WantedWorker]:
    """Return each worker of all kinds, in order.

    Raises:
        InputError: there are no workers, or a count is no positive integer.
    """
    found = []
    for name, given in workers.items():
        one = given if isinstance(given, Workers) else Workers(given, {ACCELERATOR: name})
        if not isinstance(one.count, int) or one.count < 1:
            raise InputError(
                f"{one.count!r} workers of '{name}'",
                code="worker-count-invalid",
                fix="give a number of 1 or more",
            )
        found += [WantedWorker(name, one)] * one.count
    if not found:
        raise InputError(
            "no workers are asked for", code="no-workers", fix='workers={"A100": 2, "T4": 4}'
        )
    return found


@dataclass(frozen=True)
class WorkerReport:
    """Report of an arrived worker: node, addresses, and GPUs from Ray."""

    node: str
    host: str
    address: str
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class RankPlace:
    """Place of a rank in the terms of torchrun; `gpus` are of all ranks of the host, the rank's own
    GPU is the `local_rank`-th."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int
    gpus: tuple[str, ...] = ()


def assign_ranks(arrived: Sequence[WorkerReport]) -> list[tuple[int, RankPlace]]:
    """Return worker numbers and places in the order of ranks, with the port still open.

    Ranks of a node are adjacent, in the order of GPUs or, without GPUs, of arrival.

    Raises:
        InputError: a worker has several GPUs.
    """
    for one in arrived:
        if len(one.gpus) > 1:
            raise InputError(
                f"a worker on {one.host} has {len(one.gpus)} GPUs",
                code="ray-worker-gpu-count",
                why="each device has a rank of its own",
                fix='give each worker one: Workers(count, resources={"GPU": 1})',
            )
    nodes: dict[str, list[int]] = {}
    for number, one in enumerate(arrived):
        nodes.setdefault(one.node, []).append(number)
    address = LOOPBACK if len(nodes) == 1 else arrived[0].address
    found: list[tuple[int, RankPlace]] = []
    for here in nodes.values():
        here.sort(key=lambda number: _get_gpu_sort_key(arrived[number].gpus))
        gpus = tuple(gpu for number in here for gpu in arrived[number].gpus)
        for local_rank, number in enumerate(here):
            place = RankPlace(
                rank=len(found),
                world=len(arrived),
                local_rank=local_rank,
                local_world=len(here),
                address=address,
                port=0,
                gpus=gpus,
            )
            found.append((number, place))
    return found


def _get_gpu_sort_key(gpus: Sequence[str]) -> tuple[int, str]:
    name = gpus[0] if gpus else ""
    return (int(name), "") if name.isdecimal() else (0, name)


def make_placement_error(
    asked: Sequence[WantedWorker], nodes: Sequence[Mapping[str, Any]], waited_s: float
) -> MachineError:
    """Return the error for workers that Ray could not place.

    Args:
        nodes: as reported by `ray.nodes()`.
    """
    alive = [node for node in nodes if node.get("Alive")]
    lines = []
    for one in {one.name: one for one in asked}.values():
        fits = sum(_count_fitting_workers(node, one.workers) for node in alive)
        if fits < one.workers.count:
            lines.append(f"of {one} there are {fits} in the cluster, {one.workers.count} wanted")
    return MachineError(
        f"Ray found no place for {len(asked)} workers within {waited_s:.0f} s",
        code="ray-placement-timeout",
        why="; ".join(lines) or "others use what would be enough",
        fix="look at `ray status` and at the labels of `ray list nodes`, and ask for what is there",
    )


def _count_fitting_workers(node: Mapping[str, Any], workers: Workers) -> int:
    """Return the number of workers of a kind that fit on an otherwise empty node."""
    labels, there = node.get("Labels") or {}, node.get("Resources") or {}
    plain = {k: v for k, v in workers.labels.items() if not v.startswith(("!", "in(", "in ("))}
    if any(labels.get(name) != value for name, value in plain.items()):
        return 0
    needed = {name: amount for name, amount in workers.resources.items() if amount}
    if not needed:
        return workers.count
    return min(int(there.get(name, 0) / amount) for name, amount in needed.items())


def choose_error(errors: Mapping[int, BaseException]) -> GpumixError:
    """Return the error to report among the errors of ranks: a rank that lost its peers follows from
    another rank's error.

    Args:
        errors: by rank.
    """

    def order(rank: int) -> tuple[bool, bool, int]:
        error = errors[rank]
        follows = isinstance(error, RankLost) or "Communication" in type(error).__name__
        return (follows, not isinstance(error, GpumixError), rank)

    rank = min(errors, key=order)
    error = errors[rank]
    if isinstance(error, GpumixError):
        error.where = error.where or f"rank {rank}"
        return error
    return TrainingError(
        f"the function failed: {format_in_one_line(error)}",
        code="function-failed",
        where=f"rank {rank}",
    )
