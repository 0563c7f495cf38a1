"""Links of Sailor's clusters: fits of measured bandwidth, as curves of seconds by bytes.

Measured were pairs of hosts in which k GPUs each send one message at the same time to their like on
the other host (the fit's key is k), from 64 KiB to 1 GiB a message. The rate is that of all k
together, in GB/s a quadratic in log2 of the megabytes of one message, at most the stated maximum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import combinations_with_replacement

from gpumix.schema.cluster.network import ClassPairLink, Link, Network
from gpumix.schema.curve import Curve
from published import read
from published.sailor import HOST_GPUS, Group

ZONE = "us-central1-a"
SIZES = tuple(2**power for power in range(16, 31))  # bytes of one GPU's message
MEGA, GIGA = 1e6, 1e9

Fit = tuple[list[float], float]  # coefficients, the highest power first; most bytes/s


def network(groups: Iterable[Group]) -> Network:
    """The links between these groups.

    Hosts send with all their GPUs at once, as rings of NCCL and groups of tensor parallelism do.
    Groups of one host are linked as two of its GPUs are.
    """
    kinds = sorted({group.name: group for group in groups}.values(), key=lambda g: g.name)
    between = [
        ClassPairLink(
            where="between",
            classes=(one.name, other.name),
            link=_link(
                between_fit(one.gpu, other.gpu), min(HOST_GPUS[one.gpu], HOST_GPUS[other.gpu])
            ),
        )
        for one, other in combinations_with_replacement(kinds, 2)
    ]
    pair = read("sailor/providers/intra_node_bandwidths.json")
    inside = [
        ClassPairLink(
            where="inside", classes=(kind.name, kind.name), link=_link(pair[kind.gpu]["2"], 1)
        )
        for kind in kinds
    ]
    return Network(exceptions=(*between, *inside))


def between_fit(one: str, other: str) -> Fit:
    """The fit between two hosts with GPUs of these types, all GPUs sending: of both directions,
    where both were measured, the slower one."""
    table = read("sailor/providers/multizone_bandwidths_het.json")[ZONE]
    found = []
    for sender, receiver in ((one, other), (other, one)):
        there = table[sender][str(HOST_GPUS[sender])][ZONE].get(receiver, {})
        found += [there[str(HOST_GPUS[receiver])]] if str(HOST_GPUS[receiver]) in there else []
    return min(found, key=lambda fit: fit[1])


def _link(fit: Fit, flows: int) -> Link:
    """Seconds by the bytes that `flows` GPUs send together.

    The quadratic falls below zero at small messages of fast links, where it says nothing: there the
    time stays that of the smallest message for which it does.
    """
    points = [(flows * size, rate(fit, size)) for size in SIZES]
    known = [(size, size / speed) for size, speed in points if speed > 0]
    sizes, seconds = zip(*known)
    return Link(times=Curve(sizes=sizes, values=seconds))


def rate(fit: Fit, size: float) -> float:
    """Bytes/s of all GPUs together, each sending a message of `size` bytes."""
    (square, linear, constant), most = fit
    power = math.log2(size / MEGA)
    return min(most, (square * power**2 + linear * power + constant) * GIGA)
