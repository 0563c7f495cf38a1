"""Suspected numbers of workers of DataLoaders. Pure.

On a host without a GPU, workers and the threads of torch share the cores. Which numbers are best
depends on the work of both, so several are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import ceil, floor

from gpumix.cost.input_time import MIN_STARVED_SHARE
from gpumix.data.workers.autotune import BatchMeasurements, Bounds, choose_settings
from gpumix.doctor.function.observations import LoaderObservation, Observations
from gpumix.doctor.report import Suspect
from gpumix.schema.units import format_count

MOST_WORKERS = 4  # per core; each is a process with Python and torch loaded
SHORT_EPOCHS = 2  # epochs begun in the counted steps
COMPUTING_SHARE = 0.5  # part of a loader's time above which it takes a core
SHARINGS = (1.0, 0.5, 2.0)  # tried multiples of the workers, with fewer threads of torch

Workers = Mapping[str, int]
"""Numbers of workers, by the line making the loader."""


def suspect_loaders(seen: Observations) -> Iterator[Suspect]:
    """Suspect workers started anew in each epoch, too few workers, or more workers than cores."""
    loaders = [one for one in seen.loaders if not one.tunes]
    restarted = {one.place: one.workers for one in loaders if _is_restarted(seen, one)}
    few = {one.place: n for one in loaders if _waits(seen, one) and (n := _wanted(seen, one))}
    many = [one for one in loaders if one.workers > seen.cores]
    fewer = {one.place: _count_cores(seen) for one in many}
    if restarted:
        begun = max(one.begun for one in loaders if one.place in restarted)
        yield _make_suspect(
            seen,
            "workers are started anew in each epoch",
            f"{format_count(begun, 'epoch')} began in {format_count(seen.steps, 'step')}",
            [{**few, **restarted}, dict.fromkeys(restarted, 0)],
        )
    elif few:
        yield _make_suspect(
            seen,
            "the loop fetches its batches itself, or with the wrong number of workers",
            f"it waits for its data in {seen.input_share:.0%} of a step",
            [few, fewer] if fewer else [few],
        )
    elif fewer:
        most = max(one.workers for one in many)
        yield _make_suspect(
            seen,
            "there are more workers than cores",
            f"{most} workers share {format_count(_count_cores(seen), 'core')} with training",
            [fewer, dict.fromkeys(fewer, 0)],
        )


def _waits(seen: Observations, loader: LoaderObservation) -> bool:
    return loader.waited_s > MIN_STARVED_SHARE * seen.seconds


def _is_restarted(seen: Observations, loader: LoaderObservation) -> bool:
    """Return whether starting workers takes time: if they are waited for, or epochs are short."""
    if not loader.workers or loader.persistent:
        return False
    return loader.begun >= (1 if _waits(seen, loader) else SHORT_EPOCHS)


def _count_cores(seen: Observations) -> int:
    return max(1, floor(seen.cores))


def _wanted(seen: Observations, loader: LoaderObservation) -> int:
    """Return the number of workers recommended for a loader, or 0."""
    if loader.streams:  # each worker reads the complete stream; a single worker reads ahead
        return 0 if loader.workers else 1
    most = max(1, round(MOST_WORKERS * seen.cores))
    own_s = max(1e-6, seen.seconds * (1.0 - seen.input_share))  # without time of the loader
    if loader.workers:
        # Workers deliver one batch per step at present, and should without waits.
        wanted = min(ceil(loader.workers * seen.seconds / own_s), most)
        return wanted if wanted > loader.workers else 0
    batches = max(1.0, loader.samples / (loader.batch_size or 1))
    found = BatchMeasurements(
        rows=loader.batch_size or 1,
        batch_bytes=1,
        wall_s=loader.waited_s / batches,
        cpu_s=loader.cpu_s / batches,
        tail_s=loader.waited_s / batches,
        step_s=own_s / batches,
    )
    bounds = Bounds(cores=seen.cores, processes=True, threads=False, memory_bytes=2**30)
    return min(choose_settings(found, bounds, splits=False).workers, most)


def _make_suspect(seen: Observations, what: str, why: str, counts: list[Workers]) -> Suspect:
    """Make the suspect with the first of `counts` as its change, and others as alternatives."""
    first, *others = [
        Suspect(
            name="workers",
            what=what,
            why=why,
            changes={"num_workers": workers} | ({"threads": threads} if threads else {}),
            fix="; ".join([*_describe(workers), *_describe_threads(threads)]),
        )
        for workers, threads in [*((one, 0) for one in counts), *_share_cores(seen, counts[0])]
    ]
    return replace(first, alternatives=tuple(others))


def _share_cores(seen: Observations, workers: Workers) -> Iterator[tuple[Workers, int]]:
    """Yield numbers of workers, each with fewer threads of torch, that fit the cores together."""
    loaders = {one.place: one for one in seen.loaders}
    if seen.cuda or not all(_may_compute(loaders[place]) for place in workers):
        return
    cores, tried = _count_cores(seen), set()
    most = max(1, cores // len(workers))
    for factor in SHARINGS:
        shared = {
            place: 1 if loaders[place].streams else max(1, round(factor * min(n, most)))
            for place, n in workers.items()
        }
        total = sum(shared.values())
        threads = max(1, cores - total)
        if total <= cores and threads < seen.threads and total not in tried:
            tried.add(total)
            yield shared, threads


def _may_compute(loader: LoaderObservation) -> bool:
    """Return whether fetching takes cores; unknown if workers fetch."""
    return loader.workers > 0 or loader.cpu_s >= COMPUTING_SHARE * loader.waited_s


def _describe(workers: Workers) -> Iterator[str]:
    for place, n in workers.items():
        persistent = ", persistent_workers=True" if n else ""
        yield f"DataLoader(..., num_workers={n}{persistent}) at {place}"


def _describe_threads(threads: int) -> Iterator[str]:
    if threads:
        yield f"torch.set_num_threads({threads})"
