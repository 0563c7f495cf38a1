"""Does the loader reach what device and cores allow, by itself, and how soon?

A stand-in for a device sleeps for a step; pipelines of eight kinds feed it. What computes in Python
is calibrated to this machine: one core is too slow for the device, and in one pipeline all are. The
bound of a step is the longer of the device's time and what a batch takes of the cores here: in
processes or, where samples may be read so, in threads; stacked in new memory or written into rows
that were used before, whichever takes less. Beside it: torch's DataLoader without workers, with
values that people set by hand, and the best of all that are tried. Runs alternate; ratios are of
mean step times once a loader is warm. A loader is there once its last disturbance is over that is
longer than a second of the device's steps; one that never comes within the bound, at infinity.

    python benchmarks/input.py --json
"""

from __future__ import annotations

import json
import os
import time
import warnings
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from math import inf
from multiprocessing import get_context
from multiprocessing.pool import ThreadPool
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import common
from gpumix.data.core.host_limits import count_cores
from gpumix.data.loader import Loader

SAMPLES = 32
STEP_S = 0.04
STEPS = 150  # of a run; the first third is left out
ROUNDS = 2
SLOW = 1.5  # times what the device takes, that a batch takes of one core, or of all of them
BY_HAND = (2, 2)  # workers, batches that each has ahead
TRIED: list[tuple[int, int]] = list(product((1, 2, 3, 4, 8), (2, 8)))  # the same
TRIED_STEPS = 50  # of each
BEST = 3  # of them run as long as ours, beside it
NONE_STEPS = 40
BOUND_S = 2.0  # for which cores are busy, in each way
THERE = 0.95  # of the bound
WINDOW = 10  # steps
NEAR = 5  # windows

Collate = Callable[[list[Any]], dict[str, torch.Tensor]]


class Cheap:
    """Tokens that lie in memory."""

    def __init__(self) -> None:
        self.tokens = np.random.default_rng(0).integers(0, 50_000, 2**22)

    def __len__(self) -> int:
        return 8000

    def __getitem__(self, k: int) -> dict[str, Any]:
        return {"x": torch.from_numpy(self.tokens[512 * k : 512 * (k + 1)])}


@cache
def _calibrated(make: Callable[[int], Any], work: Callable[[Any], object], wanted_s: float) -> int:
    """How much of what `make` makes `work` takes so long for, at a quiet moment."""
    some = 50
    made = make(some)

    def taken_s() -> float:
        begun = time.perf_counter()
        work(made)
        return time.perf_counter() - begun

    return max(1, round(some * wanted_s / min(taken_s() for _ in range(20))))


def _documents(count: int) -> str:
    return json.dumps([{"id": k, "text": "word " * 20} for k in range(count)])


def _words(text: str) -> list[int]:
    return [len(w) for one in json.loads(text) for w in one["text"].split()]


class Parsed(Cheap):
    """Python computes: a document is parsed and cut into words.

    Args:
        slow: times what the device takes, that a batch takes of one core.
    """

    def __init__(self, slow: float = SLOW) -> None:
        self.text = _documents(_calibrated(_documents, _words, slow * STEP_S / SAMPLES))

    def __getitem__(self, k: int) -> dict[str, Any]:
        return {"x": torch.tensor(_words(self.text)[:512])}


class Decoded(Cheap):
    """A library computes that lets other threads run: an image is unpacked and scaled. Several
    threads may read it."""

    thread_safe = True

    def __init__(self) -> None:
        self.packed = _image(_calibrated(_image, _unpacked, SLOW * STEP_S / SAMPLES))

    def __getitem__(self, k: int) -> dict[str, Any]:
        return {"x": torch.from_numpy(_unpacked(self.packed))}


def _image(lines: int) -> bytes:
    """Packed."""
    pixels = np.random.default_rng(0).integers(0, 16, lines * 192 * 3, dtype=np.uint8)
    return zlib.compress(pixels.tobytes(), 1)


def _unpacked(image: bytes) -> np.ndarray:
    return np.frombuffer(zlib.decompress(image), dtype=np.uint8).astype(np.float32) / 255


class Ragged(Cheap):
    """Lists of numbers, of unequal lengths, that become a batch in Python."""

    def __init__(self) -> None:
        self.length = _calibrated(_lists, padded, SLOW * STEP_S)

    def __getitem__(self, k: int) -> dict[str, Any]:
        return {"x": [k] * (self.length // 2 + 37 * k % (self.length // 2 + 1))}


def _lists(length: int) -> list[dict[str, Any]]:
    return [{"x": [0] * length}] * SAMPLES


def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(sample["x"]) for sample in samples)
    rows = [sample["x"] + [0] * (longest - len(sample["x"])) for sample in samples]
    return {"x": torch.tensor(rows)}


class Large(Cheap):
    """Megabytes a sample, which are there."""

    def __init__(self) -> None:
        self.pixels = np.random.default_rng(0).random((8, 2**18), dtype=np.float32)

    def __getitem__(self, k: int) -> dict[str, Any]:
        return {"x": torch.from_numpy(self.pixels[k % 8])}


class Remote(Cheap):
    """Samples come over a network whose answers take a few milliseconds, more or less."""

    def __init__(self) -> None:
        self.waits_s = 0.004 * np.random.default_rng(0).lognormal(0.0, 0.5, 8000)

    def __getitem__(self, k: int) -> dict[str, Any]:
        time.sleep(self.waits_s[k])
        return {"x": torch.full((512,), k)}


class Tailed(Cheap):
    """One sample in fifty takes a hundred times as long."""

    def __getitem__(self, k: int) -> dict[str, Any]:
        time.sleep(0.1 if k * 2654435761 % 50 == 0 else 0.001)
        return {"x": torch.full((512,), k)}


@dataclass(frozen=True)
class Pipeline:
    dataset: Callable[[], Any]
    collate: Collate | None = None


PIPELINES = {
    "cheap": Pipeline(Cheap),
    "slow decode in Python": Pipeline(Parsed),
    "too slow for all cores": Pipeline(partial(Parsed, SLOW * count_cores())),
    "slow decode that releases the GIL": Pipeline(Decoded),
    "heavy collate": Pipeline(Ragged, padded),
    "large samples": Pipeline(Large),
    "jittery": Pipeline(Remote),
    "heavy-tailed": Pipeline(Tailed),
}


@dataclass(frozen=True)
class Run:
    """Seconds of each step, one behind the other."""

    steps_s: list[float]
    setting: str = ""

    @property
    def step_s(self) -> float:
        return mean(self.steps_s[len(self.steps_s) // 3 :])

    def there_s(self, bound_s: float) -> float:
        """When the last disturbance ends that is more than a hiccup of the machine: most of `NEAR`
        windows around are slow, or all of them from the first on. Slow is what takes longer than
        is usual in the end, and than the bound. Infinity: it does not end, or `step_s` is not
        within the bound."""
        if THERE * self.step_s > bound_s:
            return inf
        starts = range(0, len(self.steps_s), WINDOW)
        windows_s = [mean(self.steps_s[start : start + WINDOW]) for start in starts]
        usual_s = max(bound_s, median(windows_s[len(windows_s) // 3 :]))
        slow = [THERE * window_s > usual_s for window_s in windows_s]
        around = [slow[max(0, k - NEAR // 2) : k + NEAR // 2 + 1] for k in range(len(slow))]
        disturbed = [k for k, some in enumerate(around) if all(slow[: k + 1]) or mean(some) > 0.5]
        first = disturbed[-1] + 1 if disturbed else 0
        return sum(self.steps_s[: WINDOW * first]) if first < len(slow) else inf


def ours(pipeline: Pipeline, steps: int) -> Run:
    with Loader(pipeline.dataset(), [SAMPLES], 0, collate=pipeline.collate) as loader:
        steps_s = list(_driven(loader, steps))
        setting = loader.setting
        return Run(steps_s, f"{setting.workers} {setting.kind}, {setting.ahead} ahead")


def theirs(pipeline: Pipeline, workers: int, ahead: int | None, steps: int) -> Run:
    with _batches(pipeline, workers, ahead) as batches:
        return Run(list(_driven(batches, steps)))


@contextmanager
def _batches(pipeline: Pipeline, workers: int, ahead: int | None) -> Iterator[Iterator[Any]]:
    loader = DataLoader(
        pipeline.dataset(),
        batch_size=SAMPLES,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        prefetch_factor=ahead,
        collate_fn=pipeline.collate,
        persistent_workers=workers > 0,
    )

    def endless() -> Generator[Any, None, None]:
        while True:
            yield from loader

    batches = endless()
    try:
        yield batches
    finally:
        batches.close()


def _driven(batches: Iterator[Any], steps: int) -> Iterator[float]:
    """A device that takes a batch each step."""
    begun = time.perf_counter()
    for _ in range(steps):
        batch = next(batches)
        time.sleep(STEP_S)
        del batch
        now = time.perf_counter()
        yield now - begun
        begun = now


def bound_s(name: str) -> float:
    """Of a step: what the device takes, or what a batch takes of the cores when all are busy."""
    cores = count_cores()
    busy = [name] * max(1, int(cores))
    with get_context("fork").Pool(len(busy)) as pool:
        cpu_s = mean(pool.map(_cpu_s, busy))
        if getattr(PIPELINES[name].dataset(), "thread_safe", False):
            cpu_s = min(cpu_s, pool.apply(_cpu_s_in_threads, (busy,)))
    return max(STEP_S, cpu_s / cores)


def _cpu_s_in_threads(names: list[str]) -> float:
    with ThreadPool(len(names)) as threads:
        return mean(threads.map(_cpu_s, names))


def _cpu_s(name: str) -> float:
    """Seconds of a core for a batch, in the way that takes the fewest."""
    torch.set_num_threads(1)
    dataset, collate = PIPELINES[name].dataset(), PIPELINES[name].collate
    if collate is not None:
        return _cpu_s_of(lambda indices: collate([dataset[k] for k in indices]), len(dataset))
    used_again = torch.utils.data.default_collate([dataset[k] for k in range(SAMPLES)])

    def in_new_memory(indices: list[int]) -> None:
        torch.utils.data.default_collate([dataset[k] for k in indices])

    def in_memory_used_again(indices: list[int]) -> None:
        for row, k in enumerate(indices):
            for key, value in dataset[k].items():
                used_again[key][row] = value

    ways = (in_new_memory, in_memory_used_again)
    return min(_cpu_s_of(way, len(dataset)) for way in ways)


def _cpu_s_of(make: Callable[[list[int]], object], samples: int) -> float:
    """Seconds of a core that `make` takes for a batch of the samples at some indices."""
    batches, begun = 0, time.thread_time()
    until = time.perf_counter() + BOUND_S
    while time.perf_counter() < until:
        make([(batches * SAMPLES + k) % samples for k in range(SAMPLES)])
        batches += 1
    return (time.thread_time() - begun) / batches


@dataclass(frozen=True)
class Row:
    """Seconds of a step of one pipeline; `how`: what the loader chose, and who tried them all."""

    bound_s: float
    ours_s: float
    none_s: float
    by_hand_s: float
    best_s: float
    there_s: float
    how: str

    def __str__(self) -> str:
        times = (self.bound_s, self.ours_s, self.none_s, self.by_hand_s, self.best_s)
        shown = "{:6.1f} {:6.1f} {:6.1f} {:8.1f} {:6.1f}".format(*(1e3 * t for t in times))
        part = self.bound_s / self.ours_s
        return f"{shown}  {part:.2f} of the bound after {self.there_s:.1f} s: {self.how}"


def row_of(name: str, steps: int) -> Row:
    """A pipeline, run by all."""
    pipeline = PIPELINES[name]
    none_s = theirs(pipeline, 0, None, min(steps, NONE_STEPS)).step_s
    short = min(steps, TRIED_STEPS)
    by_speed = sorted(TRIED, key=lambda tried: theirs(pipeline, tried[0], tried[1], short).step_s)
    bounds, mine = [], []
    fixed: dict[tuple[int, int], list[float]] = {tried: [] for tried in by_speed[:BEST]}
    fixed.setdefault(BY_HAND, [])
    for _ in range(ROUNDS):
        bounds.append(bound_s(name))
        mine.append(ours(pipeline, steps))
        for tried, found in fixed.items():
            found.append(theirs(pipeline, *tried, steps).step_s)
    bound = median(bounds)
    fixed_s = {tried: median(found) for tried, found in fixed.items()}
    best = min(fixed_s, key=fixed_s.__getitem__)
    return Row(
        bound_s=bound,
        ours_s=median(run.step_s for run in mine),
        none_s=none_s,
        by_hand_s=fixed_s[BY_HAND],
        best_s=min(fixed_s[best], none_s),
        there_s=max(run.there_s(bound) for run in mine),
        how=f"{mine[-1].setting}; best: {best[0]} workers, {best[1]} each",
    )


def main() -> None:
    parser = common.make_parser(__doc__)
    parser.add_argument("--only", choices=PIPELINES, help="a pipeline")
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="of a run; fewer show only that all of it works"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    rows: list[Row] = []
    print(
        f"{count_cores():g} cores, {SAMPLES} samples a step, the device takes {STEP_S * 1e3:g} ms"
    )
    print(f"{'pipeline':34} {'bound':>6} {'ours':>6} {'none':>6} {'by hand':>8} {'best':>6}  ms")
    for name in [options.only] if options.only else PIPELINES:
        rows.append(row_of(name, options.steps))
        print(f"{name:34} {rows[-1]}", flush=True)
    common.print_figures(
        {
            "pipelines": len(rows),
            "worst_vs_bound": round(min(row.bound_s / row.ours_s for row in rows), 3),
            "worst_settle_s": round(max(row.there_s for row in rows), 2),
            "worst_vs_best_fixed": round(min(row.best_s / row.ours_s for row in rows), 3),
            "worst_vs_by_hand": round(min(row.by_hand_s / row.ours_s for row in rows), 3),
            "worst_vs_none": round(min(row.none_s / row.ours_s for row in rows), 3),
            "median_vs_none": round(median(row.none_s / row.ours_s for row in rows), 3),
            "cores": count_cores(),
        },
        as_json=options.json,
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
