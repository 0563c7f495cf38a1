"""Input measurement: core time per sample on a host, and the sample rate of its disk or network."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count
from queue import SimpleQueue

import numpy as np

from gpumix.data.core.read_policy import Reading
from gpumix.data.core.source import Source
from gpumix.data.workers.fetch import Chunk, Cost, FetchResult, fetch_with_timeout, seeds_by_number
from gpumix.data.workers.fork_server import can_fork
from gpumix.data.workers.shared_memory import Arena
from gpumix.data.workers.worker_pool import (
    ChunkTarget,
    ProcessWorkerPool,
    ThreadWorkerPool,
    WorkerPool,
)
from gpumix.engine.rank_group import RankGroup
from gpumix.hardware.host.cpu import count_cores, read_core_pressure_s
from gpumix.schema.cluster.cluster import Cluster, Device
from gpumix.schema.profile.profile import HostInput

LONGEST_S = 0.5
MOST_SAMPLES, AT_ONCE = 512, 32
READERS = (4, 16)  # concurrent readers
WAIT_RATIO = 2.0  # wall seconds per core second: beyond this, more readers are tried
MAX_SCALING = 1.5  # times the rate of few readers: expected of many without a bottleneck
BUSY = 0.8  # share of a core (of all cores, for processes) beyond which readers are compute-bound
SHORT_TIME_SHARE = (
    0.2  # share of the time with cores oversubscribed, beyond which rates are not valid
)
CHUNK_S = 0.01  # target seconds of a reader's chunk; many ending together inflate the rate
ROUNDS_PER_READER = 4  # of all readers, to wait for
MOST_S = 4.0  # limit of seconds for any number of readers


def measure_input(
    source: Source,
    cluster: Cluster,
    devices: Sequence[Device],
    ranks: RankGroup,
    *,
    reading: Reading,
) -> tuple[HostInput, ...]:
    """Measure the input cost of each host, by the first of its ranks. Collective.

    Empty for a stream: each rank also reads the samples of other ranks, so its cost does not depend
    on its samples.

    Args:
        devices: in the order of ranks. Hosts of emulated devices share this machine's cores.
    """
    if source.in_order:
        return ()
    hosts = list(dict.fromkeys(device.host for device in devices))
    own = devices[ranks.rank].host
    told = ""
    if [device.host for device in devices].index(own) == ranks.rank:
        cores = count_cores() / (len(hosts) if cluster.emulated else 1)
        begun_s, short_s = time.perf_counter(), read_core_pressure_s()
        alone = measure_one_reader(source, reading)
        waits = _is_waiting(alone) and not _is_short_of_cores(begun_s, short_s)
        one = HostInput(
            host=own,
            cores=cores,
            cpu_s_per_sample=alone.cpu_s / alone.samples,
            most_samples_per_s=most_samples_per_s(source, reading, alone, cores),
            wait_s_per_sample=alone.wall_s / alone.samples if waits else 0.0,
            parallel=can_fork() or _in_threads(source),
        )
        told = one.model_dump_json()
    # A reading rank may wait `timeout_s` for a sample, and reports a timeout itself.
    every = ranks.gather("input", told, patience_s=reading.timeout_s)
    return tuple(HostInput.model_validate_json(text) for text in every if text)


def measure_one_reader(source: Source, reading: Reading) -> Cost:
    """Measure one reader on some samples."""
    drawn = np.random.default_rng(0)
    fetch_with_timeout(source, drawn.integers(0, len(source), 1), reading)  # opens files
    read, begun_s, cpu_s = 0, time.perf_counter(), time.process_time()
    while read < MOST_SAMPLES and time.perf_counter() - begun_s < LONGEST_S:
        size = min(AT_ONCE, max(1, read))
        fetch_with_timeout(source, drawn.integers(0, len(source), size), reading)
        read += size
    return Cost(read, time.perf_counter() - begun_s, time.process_time() - cpu_s)


def _is_waiting(alone: Cost) -> bool:
    """Check if one reader mostly waits."""
    return alone.wall_s >= WAIT_RATIO * alone.cpu_s


def _is_short_of_cores(begun_s: float, short_s: float) -> bool:
    """Check if other processes kept the cores busy since the given clock readings."""
    return read_core_pressure_s() - short_s > SHORT_TIME_SHARE * (time.perf_counter() - begun_s)


def most_samples_per_s(source: Source, reading: Reading, alone: Cost, cores: float) -> float | None:
    """Return the highest rate of any number of readers; None if the cores are the bottleneck, or
    more readers always read more.

    Samples that mostly wait are read by few and by many readers at once: if many gain little over
    few on a disk or network, more gain nothing. None also if other processes keep the cores busy.
    """
    if not _is_waiting(alone):
        return None
    size = max(1, min(AT_ONCE, int(CHUNK_S * alone.samples / alone.wall_s)))
    begun_s, short_s = time.perf_counter(), read_core_pressure_s()
    few, many = (read_at_once(source, reading, readers, size) for readers in READERS)
    if _is_short_of_cores(begun_s, short_s):
        return None
    # Threads that compute wait for the interpreter lock: one core is all they have.
    return compute_max_rate(few, many, 1.0 if _in_threads(source) else cores)


def compute_max_rate(few: Cost, many: Cost, cores: float) -> float | None:
    """Return the highest rate from the rates of few and many readers. Pure."""
    if any(one.cpu_s > BUSY * cores * one.wall_s for one in (few, many)):
        return None
    few_per_s, many_per_s = few.samples / few.wall_s, many.samples / many.wall_s
    return many_per_s if many_per_s < MAX_SCALING * few_per_s else None


def read_at_once(source: Source, reading: Reading, readers: int, size: int) -> Cost:
    """Measure `readers` concurrent readers in chunks of `size`, after each has read one chunk: wall
    seconds, and core seconds in all."""
    drawn, numbers = np.random.default_rng(readers), count()
    done: SimpleQueue[FetchResult | Exception] = SimpleQueue()
    crew = _make_worker_pool(source, reading, readers, done)

    def begin() -> None:
        indices = drawn.integers(0, len(source), size)
        crew.begin(Chunk(next(numbers), 0, indices, seeds_by_number(indices)), ChunkTarget())

    def end() -> Cost:
        found = done.get()
        if isinstance(found, Exception):
            raise found
        return found.cost

    try:
        for _ in range(readers):
            begin()
        for _ in range(readers):
            end()
            begin()
        samples, cpu_s, begun_s = 0, 0.0, time.perf_counter()
        took_s, wanted = 0.0, ROUNDS_PER_READER * readers * size
        while took_s < LONGEST_S or (samples < wanted and took_s < MOST_S):
            cost = end()
            begin()
            samples, cpu_s = samples + cost.samples, cpu_s + cost.cpu_s
            took_s = time.perf_counter() - begun_s
        for _ in range(readers):  # let readers finish: a reader in a sample may own a lock
            end()
    finally:
        crew.close()
    return Cost(samples, took_s, cpu_s)


def _make_worker_pool(
    source: Source, reading: Reading, readers: int, done: SimpleQueue[FetchResult | Exception]
) -> WorkerPool:
    """Make a crew of readers like a loader's."""

    def tell(_: Chunk, found: FetchResult | Exception) -> None:
        done.put(found)

    policy, timeout_s = reading.bad_samples, reading.timeout_s
    if _in_threads(source):
        return ThreadWorkerPool(source, policy, tell, readers, timeout_s=timeout_s)
    arena = Arena(1, 1)  # unused: samples are returned directly
    return ProcessWorkerPool(source, policy, tell, readers, arena=arena, timeout_s=timeout_s)


def _in_threads(source: Source) -> bool:
    """Check if threads are allowed: a thread-safe dataset without random draws."""
    return source.thread_safe and not source.draws
