"""Nodes to request from a scheduler, by devices, and ranks of the nodes. Pure."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpumix.launch.commands import HOST_MODULE, LaunchEnvironment, make_rank_arguments
from gpumix.launch.hosts import Host, assign_known_ranks
from gpumix.schema.cluster.cluster import Cluster

# Defaults to begin from.
NODES, DEVICES = 2, 8
MOST_LETTERS = 24


@dataclass(frozen=True)
class EqualNodes:
    """A group of equal nodes: their number, devices per node, and devices by class. `held` is empty
    if unknown. `product` is the product name of a single class. `gpus` is false for emulated
    devices and CPUs."""

    name: str
    nodes: int
    devices: int
    held: tuple[tuple[str, int], ...] = ()
    product: str = ""
    gpus: bool = True
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class NumberedNodes:
    """A component with the global numbers of the first node and rank."""

    component: EqualNodes
    first_node: int
    first_rank: int


def group_equal_nodes(hosts: Sequence[Host], cluster: Cluster | None) -> tuple[EqualNodes, ...]:
    """Return the nodes to request, in rank order: a cluster's grouped by devices, else the hosts
    grouped by number of processes, else a default. All names differ.

    Raises:
        InputError: hosts or numbers of processes differ from the cluster.
    """
    if cluster is not None:
        return _of_cluster(hosts, cluster)
    if not hosts:
        return (EqualNodes("nodes", NODES, DEVICES),)
    alike: dict[int, list[str]] = {}
    for host in hosts:
        alike.setdefault(host.processes or DEVICES, []).append(host.name_without_user)
    return tuple(
        EqualNodes(f"nodes-of-{number}", len(names), number, hosts=tuple(names))
        for number, names in alike.items()
    )


def _of_cluster(hosts: Sequence[Host], cluster: Cluster) -> tuple[EqualNodes, ...]:
    devices = cluster.in_rank_order()
    counts = Counter(device.host for device in devices)
    nodes = hosts or [Host(name, count) for name, count in counts.items()]
    alike: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for place in assign_known_ranks(nodes, cluster, where="--template"):
        inside = devices[place.first : place.first + place.processes]
        held = Counter(device.device_class for device in inside)
        alike.setdefault(tuple(sorted(held.items())), []).append(place.host.name_without_user)
    return tuple(
        EqualNodes(
            name=name,
            nodes=len(names),
            devices=sum(count for _, count in held),
            held=held,
            product=cluster.class_named(held[0][0]).product if len(held) == 1 else "",
            gpus=cluster.class_named(held[0][0]).is_gpu,
            hosts=tuple(names) if hosts else (),
        )
        for (held, names), name in zip(alike.items(), _names(alike))
    )


def _names(alike: Iterable[tuple[tuple[str, int], ...]]) -> list[str]:
    """Return a name for each kind of nodes, by devices, valid in Kubernetes, which builds pod names
    from it. Names equal after truncation are numbered."""
    whole = ["-".join(f"{name}-x{count}" for name, count in held) for held in alike]
    cut = [_label(name) for name in whole]
    return [
        _label(f"{name}-{number}") if cut.count(name) > 1 else name
        for number, name in enumerate(cut)
    ]


def _label(name: str) -> str:
    """Return the end of a name as a valid label, beginning with a letter."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower())[1 - MOST_LETTERS :].strip("-")
    return label if label[0].isalpha() else f"n{label}"


def number_components(components: Sequence[EqualNodes]) -> tuple[NumberedNodes, ...]:
    parts: list[NumberedNodes] = []
    node = rank = 0
    for component in components:
        parts.append(NumberedNodes(component, node, rank))
        node += component.nodes
        rank += component.nodes * component.devices
    return tuple(parts)


def count_ranks(components: Sequence[EqualNodes]) -> int:
    return sum(one.nodes * one.devices for one in components)


def make_node_command(
    part: NumberedNodes,
    node: str,
    world: int,
    meeting: Sequence[str],
    around: LaunchEnvironment,
    program: str,
) -> str:
    """Return a node's command for its own shell, whose expressions are in double quotes.

    Args:
        node: the node's number in its part, as an expression.
        meeting: arguments of the rendezvous.
        program: the quoted words of the program.
    """
    before = f"{part.first_rank} + " if part.first_rank else ""
    first = f"$(({before}{node} * {part.component.devices}))"
    ranks = make_rank_arguments(first, part.component.devices, world)[2:]
    command = [shlex.quote(around.python), "-m", HOST_MODULE, "--first-rank", f'"{first}"', *ranks]
    grace = ["--grace-period", f"{around.grace_s:g}"]
    return " ".join(["exec", *command, *meeting, *grace, "--", program])
