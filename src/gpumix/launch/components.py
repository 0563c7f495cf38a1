"""What a scheduler is asked for: nodes by what is in them, and the ranks that they get. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gpumix.launch.hosts import Host
from gpumix.spec.cluster import Cluster

# Where nothing is said: a place to begin from.
NODES, DEVICES = 2, 8
LONGEST = 24


@dataclass(frozen=True)
class Component:
    """Nodes that are alike: how many, with how many devices each, of which class and product; empty
    if nobody said. `gpus` is false for emulated devices and CPUs."""

    name: str
    nodes: int
    devices: int
    device_class: str = ""
    product: str = ""
    gpus: bool = True
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Part:
    """A component, and the first of its nodes and of its ranks among all."""

    component: Component
    first_node: int
    first_rank: int


def components_of(hosts: Sequence[Host], cluster: Cluster | None) -> tuple[Component, ...]:
    """The nodes to ask for, in the order of ranks: those of a cluster by what they hold, else the
    hosts by how many processes they run, else some."""
    if cluster is not None:
        return _of_cluster(cluster)
    if not hosts:
        return (Component("nodes", NODES, DEVICES),)
    alike: dict[int, list[str]] = {}
    for host in hosts:
        alike.setdefault(host.processes or DEVICES, []).append(host.bare)
    return tuple(
        Component(f"nodes-of-{number}", len(names), number, hosts=tuple(names))
        for number, names in alike.items()
    )


def _of_cluster(cluster: Cluster) -> tuple[Component, ...]:
    inside: dict[str, Counter[str]] = {}
    for device in cluster.in_rank_order():
        inside.setdefault(device.host, Counter())[device.device_class] += 1
    alike: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for host, counts in inside.items():
        alike.setdefault(tuple(sorted(counts.items())), []).append(host)
    return tuple(_component(cluster, Counter(dict(held)), len(h)) for held, h in alike.items())


def _component(cluster: Cluster, held: Counter[str], nodes: int) -> Component:
    classes = [cluster.class_named(name) for name in held]
    only = classes[0] if len(classes) == 1 else None
    return Component(
        name=_slug(f"{'-'.join(held)}-x{held.total()}"),
        nodes=nodes,
        devices=held.total(),
        device_class=only.name if only else "",
        product=only.product if only else "",
        gpus=classes[0].accelerator == "cuda",
    )


def _slug(name: str) -> str:
    """A name as Kubernetes takes it, which makes the names of pods of it."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[-LONGEST:].strip("-") or "nodes"


def parts_of(components: Sequence[Component]) -> tuple[Part, ...]:
    parts: list[Part] = []
    node = rank = 0
    for component in components:
        parts.append(Part(component, node, rank))
        node += component.nodes
        rank += component.nodes * component.devices
    return tuple(parts)


def world_of(components: Sequence[Component]) -> int:
    return sum(one.nodes * one.devices for one in components)


def first_rank(part: Part, node: str) -> str:
    """That of a node, as a shell reckons it: `node` is the node's number in its part."""
    ranks = f"{node} * {part.component.devices}"
    return f"$(({f'{part.first_rank} + ' if part.first_rank else ''}{ranks}))"
