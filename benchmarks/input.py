"""Does the loader reach what device and cores allow, by itself, and how soon?

A stand-in for a device sleeps for a step; pipelines of seven kinds feed it. The bound of a step is
the longer of the device's time and what a batch takes of the cores here. Beside it: torch's
DataLoader without workers, with values that people set by hand, and with the best of all that are
tried. Runs alternate; ratios are of mean step times once a loader is warm.

    python benchmarks/input.py --json
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import common
from gpumix.data.host import cores_here
from gpumix.data.loader import Loader

SAMPLES = 32
STEP_S = 0.04
STEPS, WARM_STEPS = 150, 50
ROUNDS = 3
BY_HAND = (2, 2)  # workers, batches that each has ahead
TRIED = [(0, None), *product((1, 2, 3, 4, 8), (2, 8))]
TRIED_STEPS = 60
SETTLED = 1.05  # times the mean in the end, that windows stay below once it is settled
WINDOW = 10

Collate = Callable[[list[Any]], dict[str, torch.Tensor]]


class Cheap:
    """Tokens that lie in memory."""

    def __init__(self) -> None:
        self.tokens = np.random.default_rng(0).integers(0, 50_000, 2**22)

    def __len__(self) -> int:
        return 8000

    def __getitem__(self, k: int) -> dict[str, Any]:
        return {"x": torch.from_numpy(self.tokens[512 * k : 512 * (k + 1)])}


class Parsed(Cheap):
    """Python computes: a document is parsed and cut into words."""

    def __init__(self) -> None:
        self.text = json.dumps([{"id": k, "text": "word " * 20} for k in range(60)])

    def __getitem__(self, k: int) -> dict[str, Any]:
        words = [len(w) for one in json.loads(self.text) for w in one["text"].split()]
        return {"x": torch.tensor(words[:512])}


class Decoded(Cheap):
    """A library computes that lets other threads run: an image is unpacked and scaled."""

    def __init__(self, side: int = 192) -> None:
        pixels = np.random.default_rng(0).integers(0, 16, side * side * 3, dtype=np.uint8)
        self.packed = zlib.compress(pixels.tobytes(), 1)

    def __getitem__(self, k: int) -> dict[str, Any]:
        pixels = np.frombuffer(zlib.decompress(self.packed), dtype=np.uint8)
        return {"x": torch.from_numpy(pixels.astype(np.float32) / 255)}


class Ragged(Cheap):
    """Lists of numbers, of unequal lengths, that become a batch in Python."""

    def __getitem__(self, k: int) -> dict[str, Any]:
        return {"x": list(range(400 + 37 * k % 400))}


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
        return mean(self.steps_s[WARM_STEPS:] or self.steps_s[len(self.steps_s) // 3 :])

    @property
    def settled_s(self) -> float:
        """When steps begin to take what they take in the end."""
        last = 0
        for first in range(len(self.steps_s) - WINDOW):
            if mean(self.steps_s[first : first + WINDOW]) > SETTLED * self.step_s:
                last = first + 1
        return sum(self.steps_s[:last])


def ours(pipeline: Pipeline) -> Run:
    with Loader(pipeline.dataset(), [SAMPLES], 0, collate=pipeline.collate) as loader:
        steps_s = list(_driven(loader, STEPS))
        setting = loader.setting
        return Run(steps_s, f"{setting.workers} {setting.kind}, {setting.ahead} ahead")


def theirs(pipeline: Pipeline, workers: int, ahead: int | None, steps: int = STEPS) -> Run:
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

    def endless() -> Iterator[Any]:
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


def bound_s(pipeline: Pipeline) -> float:
    """Of a step: what the device takes, or what a batch takes of the cores when all are busy."""
    cores = cores_here()
    context = get_context("fork")
    with context.Pool(max(1, int(cores))) as pool:
        cpu_s = mean(pool.map(_cpu_s, [pipeline.dataset().__class__.__name__] * int(cores)))
    return max(STEP_S, cpu_s / cores)


def _cpu_s(name: str) -> float:
    """Seconds of a core for a batch."""
    pipeline = next(p for p in PIPELINES.values() if p.dataset.__name__ == name)  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    dataset, collate = pipeline.dataset(), pipeline.collate
    stack = torch.utils.data.default_collate if collate is None else collate
    batches, begun = 0, time.process_time()
    until = time.perf_counter() + 2.0
    while time.perf_counter() < until:
        stack([dataset[(batches * SAMPLES + k) % len(dataset)] for k in range(SAMPLES)])
        batches += 1
    return (time.process_time() - begun) / batches


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="figures as one line of JSON")
    parser.add_argument("--only", help="a pipeline")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    vs_bound, vs_best, settled = {}, {}, {}
    print(f"{cores_here():g} cores, {SAMPLES} samples a step, the device takes {STEP_S * 1e3:g} ms")
    print(f"{'pipeline':34} {'bound':>6} {'ours':>6} {'none':>6} {'by hand':>8} {'best':>6}  ms")
    for name, pipeline in PIPELINES.items():
        if options.only not in (None, name):
            continue
        best = min(TRIED, key=lambda s: theirs(pipeline, s[0], s[1], TRIED_STEPS).step_s)
        bounds, mine, none, hand, tuned = [], [], [], [], []
        for _ in range(ROUNDS):
            bounds.append(bound_s(pipeline))
            mine.append(ours(pipeline))
            tuned.append(theirs(pipeline, *best).step_s)
            hand.append(theirs(pipeline, *BY_HAND).step_s)
        none = theirs(pipeline, 0, None, TRIED_STEPS).step_s
        step_s = median(run.step_s for run in mine)
        vs_bound[name] = median(bounds) / step_s
        vs_best[name] = median(tuned) / step_s
        settled[name] = median(run.settled_s for run in mine)
        times = (median(bounds), step_s, none, median(hand), median(tuned))
        shown = "{:6.1f} {:6.1f} {:6.1f} {:8.1f} {:6.1f}".format(*(1e3 * t for t in times))
        how = f"{best[0]} workers, {best[1]} each" if best[0] else "no workers"
        print(
            f"{name:34} {shown}  {vs_bound[name]:.2f} of the bound after {settled[name]:.1f} s: "
            f"{mine[-1].setting}; best: {how}",
            flush=True,
        )
    common.print_figures(
        {
            "pipelines": len(vs_bound),
            "worst_vs_bound": round(min(vs_bound.values()), 3),
            "worst_settle_s": round(max(settled.values()), 2),
            "worst_vs_best_fixed": round(min(vs_best.values()), 3),
            "cores": cores_here(),
        },
        as_json=options.json,
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
