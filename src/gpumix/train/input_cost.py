"""Measures what reading samples takes of a host's cores."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from gpumix.data.fetch import fetch_in_time
from gpumix.data.host import cores_here
from gpumix.data.reading import Reading
from gpumix.data.rows import Source
from gpumix.engine.ranks import Ranks
from gpumix.spec.cluster import Cluster, Device
from gpumix.spec.profile import HostInput

LONGEST_S = 0.5
MOST_SAMPLES, AT_ONCE = 512, 32


def measure_input(
    source: Source,
    cluster: Cluster,
    devices: Sequence[Device],
    ranks: Ranks,
    *,
    reading: Reading,
) -> tuple[HostInput, ...]:
    """Of each host, by the first of its ranks; nothing of a stream, of which ranks read also what
    others take: what that takes does not go by their samples. Collective.

    Args:
        devices: in the order of ranks. Hosts of emulated ones share the cores that are here.
    """
    if source.in_order:
        return ()
    hosts = list(dict.fromkeys(device.host for device in devices))
    own = devices[ranks.rank].host
    told = ""
    if [device.host for device in devices].index(own) == ranks.rank:
        cores = cores_here() / (len(hosts) if cluster.emulated else 1)
        one = HostInput(host=own, cores=cores, cpu_s_per_sample=cpu_s_per_sample(source, reading))
        told = one.model_dump_json()
    # Who reads may wait as long for a sample as the others for it; it says so itself.
    every = ranks.gather("input", told, patience_s=reading.timeout_s)
    return tuple(HostInput.model_validate_json(text) for text in every if text)


def cpu_s_per_sample(source: Source, reading: Reading) -> float:
    """Seconds of one core, in the mean over some samples; what they wait for does not count."""
    drawn = np.random.default_rng(0)
    fetch_in_time(source, drawn.integers(0, len(source), 1), reading)  # opens what it has to open
    read, begun_s, cpu_s = 0, time.perf_counter(), time.process_time()
    while read < MOST_SAMPLES and time.perf_counter() - begun_s < LONGEST_S:
        size = min(AT_ONCE, max(1, read))
        fetch_in_time(source, drawn.integers(0, len(source), size), reading)
        read += size
    return (time.process_time() - cpu_s) / read
