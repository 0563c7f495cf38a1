"""Fetching of a chunk's samples, in any thread or process; handling of unreadable samples."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

import gpumix
from gpumix.data.core import sample_rng
from gpumix.data.core.host_limits import read_core_wait_s
from gpumix.data.core.read_policy import (
    NO_SAMPLE,
    SEVERAL,
    BadSamples,
    Reading,
    Skipped,
    StuckError,
    collect_skipped,
    notes,
    run_with_timeout,
)
from gpumix.data.core.source import Source
from gpumix.data.order.global_order import GlobalOrder
from gpumix.data.workers.batch_layout import Batch, BatchLayout
from gpumix.schema.errors import (
    GpumixError,
    InputError,
    TrainingError,
    format_in_one_line,
    get_first_line,
)

T = TypeVar("T")

_BY_NUMBER = sample_rng.derive_key("gpumix, by number")
TRIES = 8  # candidates for the replacement of a bad sample
# Exceptions a dataset may raise: none may end a worker silently. Ctrl-C is raised in the main
# thread, which waits for readers and catches none of these.
FAILURES = (BaseException,)
_PACKAGE = str(Path(gpumix.__file__).parent)


class DataChangedError(InputError):
    """The dataset has changed since the run began: no sample can be trusted."""


class BrokenStreamError(Exception):
    """A stream raised the `__cause__`: no later sample can be reached."""


@dataclass(frozen=True)
class Chunk:
    """Rows of a batch fetched at once.

    Attributes:
        batch: number of the batch in its `Feed`; `start`: the first row.
        indices: dataset indices of the samples.
        seeds: seeds of their random draws, by positions in the global order.
    """

    batch: int
    start: int
    indices: np.ndarray
    seeds: np.ndarray

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + len(self.indices))


@dataclass(frozen=True)
class Cost:
    """The cost of fetching a chunk.

    Attributes:
        wall_s: wall-clock time without waits for a core, as far as the system reports them: they
            say nothing about the samples, and more workers do not help.
        cpu_s: CPU time.
        handed_s: CPU time of the training process to receive the result and give out the next
            chunk; 0: unknown.
    """

    samples: int
    wall_s: float
    cpu_s: float
    handed_s: float = 0.0


@dataclass(frozen=True)
class FetchResult:
    """The result of a chunk; `values` only if not written into the memory of the batch.

    Attributes:
        draws: whether samples were seen to draw from generators of the process reading them.
        heard_s: CPU time of the listener thread when it began to receive the result.
    """

    cost: Cost
    skipped: tuple[Skipped, ...] = ()
    values: Batch | None = None
    layout: BatchLayout | None = None
    draws: bool = False
    heard_s: float | None = None


def fetch(
    source: Source,
    indices: np.ndarray,
    bad_samples: BadSamples,
    *,
    specimen: bool = False,
    target: Batch | None = None,
) -> tuple[Batch, tuple[Skipped, ...]]:
    """Return the samples at `indices`, stacked, and the skipped samples. With `specimen`, return a
    batch as costly as any of equal size. With `target`, rows may be written there: see
    `Source.rows_into`.

    Raises:
        DataChangedError: whatever `bad_samples` says.
        TrainingError: a sample cannot be read, nor any candidate for its replacement.
        GpumixError: the source reports what is wrong with a sample.
    """
    read = source.specimen if specimen else source.rows
    if target is not None:
        read = partial(source.rows_into, target=target)
    try:
        return _read(read, indices, indices, bad_samples)
    except DataChangedError:
        raise
    except FAILURES as error:
        if bad_samples == "stop" and isinstance(error, GpumixError):
            raise  # it names the bad sample and the reason
        taken, skipped = _replace_bad_samples(source, indices, bad_samples)
        notes.failed = NO_SAMPLE
        try:
            batch, lacking = _read(read, taken, indices, bad_samples)
            return batch, skipped + lacking
        except GpumixError:
            raise
        except FAILURES as again:
            raise _make_batch_error(source, indices, again) from error


def _read(
    read: Callable[[np.ndarray], Batch],
    indices: np.ndarray,
    asked: np.ndarray,
    bad_samples: BadSamples,
) -> tuple[Batch, tuple[Skipped, ...]]:
    """Return rows, some replacing the samples in `asked`, and the parts missing from rows."""
    with collect_skipped(bad_samples) as lacking:
        batch = read(indices)
    return batch, tuple(replace(one, of=int(asked[row])) for row, one in lacking)


def _make_batch_error(source: Source, indices: np.ndarray, again: BaseException) -> TrainingError:
    """Return the error for samples failing twice together, but not separately."""
    number, said = notes.failed, first_line_of(again)
    several = f"{len(indices)} samples of {source.name}"
    each = f"each by itself can be read; the first is sample {source.number(int(indices[0]))}"
    if number == NO_SAMPLE:
        what, fix = f"{several} cannot be put together: {said}", ""
    elif number == SEVERAL:
        what, fix = f"{several} cannot be read at once: {said}", "look at its __getitems__"
    else:
        what = f"sample {number} of {source.name} cannot be read each time: {said}"
        each = "by itself it was read, between two times that failed"
        fix = "let the dataset try again where it fails"
    return TrainingError(what, code="batch-unreadable", where=_place(again), why=each, fix=fix)


def _replace_bad_samples(
    source: Source, indices: np.ndarray, bad_samples: BadSamples
) -> tuple[np.ndarray, tuple[Skipped, ...]]:
    """Find the bad samples after an error; return the indices to read instead and the samples
    skipped. Errors that do not recur are ignored."""
    taken, skipped = indices.copy(), []
    for place, index in enumerate(indices.tolist()):
        with sample_rng.use_part_seeds([place]), collect_skipped(bad_samples) as lacking:
            problem = _problem(source, index)
            if problem is None:
                continue
            if bad_samples == "stop":
                raise make_read_error(source.name, source.number(index), problem)
            # For a pack, report its bad documents.
            parts = [replace(one, of=index) for _, one in lacking]
            taken[place] = other = _find_replacement(source, index, problem)
        number, instead = source.number(index), source.number(other)
        skipped += parts or [Skipped(number, instead, first_line_of(problem), index)]
    return taken, tuple(skipped)


def fetch_with_timeout(
    source: Source, indices: np.ndarray, reading: Reading, *, specimen: bool = False
) -> tuple[Batch, tuple[Skipped, ...]]:
    """Fetch as `fetch` does, with a timeout, while the caller waits. Random draws are seeded by
    sample number.

    Raises:
        StuckError: a sample does not arrive.
    """

    read = partial(fetch, source, indices, reading.bad_samples, specimen=specimen)
    return _read_isolated(read, seeds_by_number(indices).tolist(), source.name, reading)


def seeds_by_number(indices: np.ndarray) -> np.ndarray:
    """Return seeds for samples read to be measured or inspected, at no position of the order."""
    return sample_rng.derive_seeds(_BY_NUMBER, indices)


def find_readable(
    read: Callable[[np.ndarray], object], count: int, name: str, reading: Reading
) -> int:
    """Return the index of a sample representing all: the first, or, if bad samples are skipped, the
    first of its replacement candidates on which `read` succeeds.

    Raises:
        GpumixError: the sample cannot be read, nor any candidate.
    """
    first: BaseException | None = None
    for index in range(1 if reading.bad_samples == "stop" else min(count, 1 + TRIES)):
        problem = _read_isolated(
            partial(catch_read_error, read, index), [_BY_NUMBER], name, reading
        )
        if problem is None:
            return index
        if isinstance(problem, StuckError):
            raise problem
        if isinstance(problem, BrokenStreamError):
            raise make_read_error(name, index, problem) from problem
        first = first or problem
    assert first is not None, "at least one was tried"
    if reading.bad_samples == "stop":
        raise make_read_error(name, 0, first)
    raise _make_no_replacement_error(name, 0, first, index)


def _read_isolated(read: Callable[[], T], seeds: list[int], name: str, reading: Reading) -> T:
    """Return the result of `read` while the caller waits; later random draws are unaffected."""

    def drawing() -> T:
        with sample_rng.use_row_seeds(seeds, everywhere=True):
            sample_rng.seed_row(0)
            return read()

    with sample_rng.preserve_rng_state():
        return run_with_timeout(drawing, name, reading.timeout_s)


def catch_read_error(read: Callable[[np.ndarray], object], index: int) -> BaseException | None:
    """Return the exception of `read` at one sample, or None."""
    try:
        read(np.array([index]))
    except DataChangedError:
        raise
    except FAILURES as error:
        return error
    return None


def _problem(source: Source, index: int) -> BaseException | None:
    """Return the exception of a replaceable sample, or None; raise TrainingError where the stream
    breaks, since no sample can be a replacement."""
    found = catch_read_error(source.rows, index)
    if isinstance(found, BrokenStreamError):
        raise make_read_error(source.name, source.number(index), found)
    return found


def _find_replacement(source: Source, index: int, problem: BaseException) -> int:
    """Return the replacement of a bad sample, identical in every plan and worker."""
    for attempt in range(TRIES):
        if source.in_order:
            other = index + attempt + 1
        else:
            other = int(GlobalOrder(len(source), attempt).indices(0, np.array([index]))[0])
        if _problem(source, other) is None:
            return other
    raise _make_no_replacement_error(source.name, source.number(index), problem, TRIES)


def _make_no_replacement_error(
    name: str, index: int, problem: BaseException, tried: int
) -> TrainingError:
    found = TrainingError(
        f"sample {index} of {name} cannot be read, and {tried} that could take its place cannot "
        "either",
        code="sample-irreplaceable",
        where=_place(problem),
        why=first_line_of(problem),
        fix="look at the dataset: most of it is bad",
    )
    found.__cause__ = problem
    return found


def make_read_error(name: str, index: int, error: BaseException) -> GpumixError:
    """Return the error for an unreadable sample of the dataset `name`."""
    fix = (
        "mend it, or let others take the place of such samples: `data: {bad_samples: skip}`, "
        "Loader(bad_samples='skip')"
    )
    if isinstance(error, BrokenStreamError) and error.__cause__ is not None:
        error = error.__cause__
        fix = (
            "mend it, or catch that inside of the stream and go on there: what comes behind is "
            "reached through it alone"
        )
    if isinstance(error, GpumixError):
        return error
    found = TrainingError(
        f"sample {index} of {name} cannot be read: {first_line_of(error)}",
        code="sample-unreadable",
        where=_place(error),
        fix=fix,
    )
    found.__cause__ = error
    return found


def first_line_of(error: BaseException) -> str:
    return get_first_line(error) if isinstance(error, GpumixError) else format_in_one_line(error)


def _place(error: BaseException) -> str:
    """Return the line of user code that raised the error."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(_PACKAGE) and "/torch/" not in f.filename]
    return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""


def fetch_timed(
    source: Source, chunk: Chunk, bad_samples: BadSamples, target: Batch | None = None
) -> tuple[Batch, tuple[Skipped, ...], Cost]:
    """Run `fetch` and measure its cost."""
    wall_s, cpu_s, core_s = time.perf_counter(), time.thread_time(), read_core_wait_s()
    values, skipped = fetch(source, chunk.indices, bad_samples, target=target)
    core_s = read_core_wait_s() - core_s
    wall_s, cpu_s = time.perf_counter() - wall_s, time.thread_time() - cpu_s
    return values, skipped, Cost(len(chunk.indices), max(cpu_s, wall_s - core_s), cpu_s)
