"""Who is which rank among workers that Ray started, and what is said of those that it did not.

Pure: what Ray says comes in as values, and nothing here imports it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpumix.spec.errors import (
    GpumixError,
    InputError,
    MachineError,
    RankLost,
    TrainingError,
    in_a_line,
)

ACCELERATOR = "ray.io/accelerator-type"  # the label that Ray gives nodes with GPUs by itself
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Workers:
    """So many workers of one kind, each of which is one device.

    Attributes:
        labels: of their nodes, as Ray's label selectors are written.
        resources: that Ray keeps for each of them.
    """

    count: int
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1, "GPU": 1})


@dataclass(frozen=True)
class Wanted:
    """One worker, and the name of its kind."""

    name: str
    workers: Workers

    def __str__(self) -> str:
        labels = [f"{name}={value}" for name, value in self.workers.labels.items()]
        kept = [f"{amount:g} {name}" for name, amount in self.workers.resources.items()]
        return f"'{self.name}' ({', '.join([*kept, *labels])})"


def wanted(workers: Mapping[str, int | Workers]) -> list[Wanted]:
    """Each worker of all kinds, in their order.

    Raises:
        InputError: there are none, or not a whole number of them.
    """
    found = []
    for name, given in workers.items():
        one = given if isinstance(given, Workers) else Workers(given, {ACCELERATOR: name})
        if not isinstance(one.count, int) or one.count < 1:
            raise InputError(f"{one.count!r} workers of '{name}'", fix="give a number of 1 or more")
        found += [Wanted(name, one)] * one.count
    if not found:
        raise InputError("no workers are asked for", fix='workers={"A100": 2, "T4": 4}')
    return found


@dataclass(frozen=True)
class Arrived:
    """What a worker says when it is there: its node, and the GPUs that Ray gave it."""

    node: str
    host: str
    address: str
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """A rank's place, as torchrun would say it; `gpus` are those of all ranks of its host, of which
    its own is the `local_rank`-th."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int
    gpus: tuple[str, ...] = ()


def places(arrived: Sequence[Arrived]) -> list[tuple[int, Place]]:
    """In the order of ranks, the number of the worker and its place, whose port is not known yet.
    Ranks of a node follow each other, in the order of their GPUs or, without any, as they came.

    Raises:
        InputError: a worker has several GPUs.
    """
    for one in arrived:
        if len(one.gpus) > 1:
            raise InputError(
                f"a worker on {one.host} has {len(one.gpus)} GPUs",
                why="each device has a rank of its own",
                fix='give each worker one: Workers(count, resources={"GPU": 1})',
            )
    nodes: dict[str, list[int]] = {}
    for number, one in enumerate(arrived):
        nodes.setdefault(one.node, []).append(number)
    address = LOOPBACK if len(nodes) == 1 else arrived[0].address
    found: list[tuple[int, Place]] = []
    for here in nodes.values():
        here.sort(key=lambda number: _in_order(arrived[number].gpus))
        gpus = tuple(gpu for number in here for gpu in arrived[number].gpus)
        for local_rank, number in enumerate(here):
            place = Place(
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


def _in_order(gpus: Sequence[str]) -> tuple[int, str]:
    name = gpus[0] if gpus else ""
    return (int(name), "") if name.isdecimal() else (0, name)


def no_place(
    asked: Sequence[Wanted], nodes: Sequence[Mapping[str, Any]], waited_s: float
) -> MachineError:
    """Ray has no place for all of the workers.

    Args:
        nodes: as `ray.nodes()` tells of them.
    """
    alive = [node for node in nodes if node.get("Alive")]
    lines = []
    for one in {one.name: one for one in asked}.values():
        fits = sum(_room(node, one.workers) for node in alive)
        if fits < one.workers.count:
            lines.append(f"of {one} there are {fits} in the cluster, {one.workers.count} wanted")
    return MachineError(
        f"Ray found no place for {len(asked)} workers within {waited_s:.0f} s",
        why="; ".join(lines) or "others use what would be enough",
        fix="look at `ray status` and at the labels of `ray list nodes`, and ask for what is there",
    )


def _room(node: Mapping[str, Any], workers: Workers) -> int:
    """How many such workers a node could have if it had no others."""
    labels, there = node.get("Labels") or {}, node.get("Resources") or {}
    plain = {k: v for k, v in workers.labels.items() if not v.startswith(("!", "in(", "in ("))}
    if any(labels.get(name) != value for name, value in plain.items()):
        return 0
    needed = {name: amount for name, amount in workers.resources.items() if amount}
    if not needed:
        return workers.count
    return min(int(there.get(name, 0) / amount) for name, amount in needed.items())


def the_error(errors: Mapping[int, BaseException]) -> GpumixError:
    """Of what ranks failed with the one that is to be told: that a rank lost its peers is what
    follows from another one's error.

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
    return TrainingError(f"the function failed: {in_a_line(error)}", where=f"rank {rank}")
