"""Fetches the samples of a part of a batch, in whatever thread or process; and what happens when
one of them cannot be had."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from gpumix.data import draws
from gpumix.data.host import waited_for_core_s
from gpumix.data.layout import Batch, Layout
from gpumix.data.order import GlobalOrder
from gpumix.data.reading import (
    NO_SAMPLE,
    SEVERAL,
    BadSamples,
    Reading,
    Skipped,
    StuckError,
    failed_at,
    in_time,
    none_failed,
    skipping,
)
from gpumix.data.rows import Source
from gpumix.spec.errors import (
    GpumixError,
    InputError,
    TrainingError,
    first_line,
    in_a_line,
)

T = TypeVar("T")

_BY_NUMBER = draws.key_of("gpumix, by number")
TRIES = 8  # of samples that could take the place of a bad one
# What a dataset may end with: none of it may end a worker without a word. Ctrl-C is raised in the
# main thread, which waits for who reads samples and catches none of this.
FAILURES = (BaseException,)
_PACKAGE = str(Path(__file__).parents[1])


class DataChangedError(InputError):
    """The dataset is not what it was when the run began: no sample can be trusted."""


class BrokenStreamError(Exception):
    """A stream raised what is its cause: no sample behind that place can be reached."""


@dataclass(frozen=True)
class Chunk:
    """Rows of a batch that are fetched at once.

    Attributes:
        batch: the position of the batch in the global order, `start` of the rows in the batch.
        indices: of the samples in the dataset.
        seeds: of what they draw at random, by their places in the global order.
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
    """What fetching took.

    Attributes:
        wall_s: by the clock, but for what it waited for a core, as far as the system tells: that
            says nothing of the samples, and more workers do not help against it.
        cpu_s: of a core.
        handed_s: of a core of the process that trains, to hear of it and to give out the next one;
            0: not known.
    """

    samples: int
    wall_s: float
    cpu_s: float
    handed_s: float = 0.0


@dataclass(frozen=True)
class Fetched:
    """What came of a chunk: `values`, where they were not written to where the batch lies.

    Attributes:
        draws: whether samples were seen to draw from generators of the process that read them.
        heard_s: by the thread that listens to workers, and its own time: when it began to hear of
            it.
    """

    cost: Cost
    skipped: tuple[Skipped, ...] = ()
    values: Batch | None = None
    layout: Layout | None = None
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
    """The samples at `indices`, stacked; or a batch that stands for any of so many. Where they are
    to be written into `target`: that one, if they were; see `Source.rows_into`.

    Raises:
        DataChangedError: whatever is to be done about bad samples.
        TrainingError: a sample cannot be read, or none of those that could take its place.
        GpumixError: the source says what is wrong with a sample.
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
            raise  # it says which sample is bad, and why
        taken, skipped = _one_by_one(source, indices, bad_samples)
        none_failed()
        try:
            batch, lacking = _read(read, taken, indices, bad_samples)
            return batch, skipped + lacking
        except GpumixError:
            raise
        except FAILURES as again:
            raise _after_all(source, indices, again) from error


def _read(
    read: Callable[[np.ndarray], Batch],
    indices: np.ndarray,
    asked: np.ndarray,
    bad_samples: BadSamples,
) -> tuple[Batch, tuple[Skipped, ...]]:
    """Rows, some in the places of those that were asked for; and what rows lack."""
    with skipping(bad_samples) as lacking:
        batch = read(indices)
    return batch, tuple(replace(one, of=int(asked[row])) for row, one in lacking)


def _after_all(source: Source, indices: np.ndarray, again: BaseException) -> TrainingError:
    """What samples are told that failed together, each by itself did not, and now they do again."""
    number, said = failed_at(), first_line_of(again)
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
    return TrainingError(what, where=_place(again), why=each, fix=fix)


def _one_by_one(
    source: Source, indices: np.ndarray, bad_samples: BadSamples
) -> tuple[np.ndarray, tuple[Skipped, ...]]:
    """After an error: find whose it is; the samples to take. What does not happen again is over."""
    taken, skipped = indices.copy(), []
    for place, index in enumerate(indices.tolist()):
        with draws.only(place), skipping(bad_samples) as lacking:
            problem = _problem(source, index)
            if problem is None:
                continue
            if bad_samples == "stop":
                raise in_words(source.name, source.number(index), problem)
            # Of a pack it is told what is bad in it.
            parts = [replace(one, of=index) for _, one in lacking]
            taken[place] = other = _instead(source, index, problem)
        number, instead = source.number(index), source.number(other)
        skipped += parts or [Skipped(number, instead, first_line_of(problem), index)]
    return taken, tuple(skipped)


def fetch_in_time(
    source: Source, indices: np.ndarray, reading: Reading, *, specimen: bool = False
) -> tuple[Batch, tuple[Skipped, ...]]:
    """As `fetch`, for a thread that must not get stuck, and waits: what samples draw at random goes
    by their numbers.

    Raises:
        StuckError: a sample does not come.
    """

    read = partial(fetch, source, indices, reading.bad_samples, specimen=specimen)
    return _undisturbed(read, seeds_by_number(indices).tolist(), source.name, reading)


def seeds_by_number(indices: np.ndarray) -> np.ndarray:
    """Of samples that are read to be measured or looked at, at no place of the order."""
    return draws.seeds_of(_BY_NUMBER, indices)


def readable(read: Callable[[int], object], count: int, name: str, reading: Reading) -> int:
    """The sample that tells what the others are like: the first one, or, if bad ones are skipped,
    the first that `read` does not fail at, of those that could take its place.

    Raises:
        GpumixError: it cannot be read, or none of them can.
    """
    first: BaseException | None = None
    for index in range(1 if reading.bad_samples == "stop" else min(count, 1 + TRIES)):
        problem = _undisturbed(partial(_raised, read, index), [_BY_NUMBER], name, reading)
        if problem is None:
            return index
        if isinstance(problem, StuckError):
            raise problem
        if isinstance(problem, BrokenStreamError):
            raise in_words(name, index, problem) from problem
        first = first or problem
    assert first is not None, "at least one was tried"
    if reading.bad_samples == "stop":
        raise in_words(name, 0, first)
    raise _none_instead(name, 0, first, index)


def _undisturbed(read: Callable[[], T], seeds: list[int], name: str, reading: Reading) -> T:
    """What `read` returns, while this thread waits; who draws at random later draws as if nothing
    had been read."""

    def drawing() -> T:
        with draws.reading(seeds, everywhere=True):
            draws.begin(0)
            return read()

    with draws.put_back():
        return in_time(drawing, name, reading.timeout_s)


def _raised(read: Callable[[int], object], index: int) -> BaseException | None:
    try:
        read(index)
    except FAILURES as error:
        return error
    return None


def problem_at(read: Callable[[np.ndarray], object], index: int) -> BaseException | None:
    """What `read` raises at one sample."""
    try:
        read(np.array([index]))
    except DataChangedError:
        raise
    except FAILURES as error:
        return error
    return None


def _problem(source: Source, index: int) -> BaseException | None:
    """That of a sample whose place another one could take.

    Raises:
        TrainingError: none could: the stream breaks there.
    """
    found = problem_at(source.rows, index)
    if isinstance(found, BrokenStreamError):
        raise in_words(source.name, source.number(index), found)
    return found


def _instead(source: Source, index: int, problem: BaseException) -> int:
    """The sample in the place of a bad one: the same in every plan and in every worker."""
    for attempt in range(TRIES):
        if source.in_order:
            other = index + attempt + 1
        else:
            other = int(GlobalOrder(len(source), attempt).indices(0, np.array([index]))[0])
        if _problem(source, other) is None:
            return other
    raise _none_instead(source.name, source.number(index), problem, TRIES)


def _none_instead(name: str, index: int, problem: BaseException, tried: int) -> TrainingError:
    found = TrainingError(
        f"sample {index} of {name} cannot be read, and {tried} that could take its place cannot "
        "either",
        where=_place(problem),
        why=first_line_of(problem),
        fix="look at the dataset: most of it is bad",
    )
    found.__cause__ = problem
    return found


def in_words(name: str, index: int, error: BaseException) -> GpumixError:
    """Why a sample of the dataset `name` cannot be read."""
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
        where=_place(error),
        fix=fix,
    )
    found.__cause__ = error
    return found


def first_line_of(error: BaseException) -> str:
    return first_line(error) if isinstance(error, GpumixError) else in_a_line(error)


def _place(error: BaseException) -> str:
    """The line of the user's code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(_PACKAGE) and "/torch/" not in f.filename]
    return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else ""


def clocked(
    source: Source, chunk: Chunk, bad_samples: BadSamples, target: Batch | None = None
) -> tuple[Batch, tuple[Skipped, ...], Cost]:
    """`fetch`, and what it took."""
    wall_s, cpu_s, core_s = time.perf_counter(), time.thread_time(), waited_for_core_s()
    values, skipped = fetch(source, chunk.indices, bad_samples, target=target)
    core_s = waited_for_core_s() - core_s
    wall_s, cpu_s = time.perf_counter() - wall_s, time.thread_time() - cpu_s
    return values, skipped, Cost(len(chunk.indices), max(cpu_s, wall_s - core_s), cpu_s)
