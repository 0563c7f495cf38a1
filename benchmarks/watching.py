"""What it costs to tell each step's time apart.

A step of about 10 ms (matrix products) is run with the watch and without, in turns; and the watch's
own calls are timed between those products, which push its code and data out of the caches, as a
real step does. On a GPU stamps are events on the stream.

    python benchmarks/watching.py [--json] [--rounds 60]

Figures: `watching_us` is what the calls of one step take on the rank that writes them down, the
median over steps, `others_us` that on other ranks; `overhead_share` is the former over 10 ms.
`paired_share` is how much longer steps with the watch took, the median over rounds of steps in
turns, and `paired_spread` half of the middle half of those rounds: what is below it is noise.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from statistics import median, quantiles

import torch

from common import print_figures
from gpumix.engine.comm import WaitClock
from gpumix.train.watch import Watch, stamps_of

STEP_S = 0.010
STEPS = 200
LIMIT = 0.005


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clocks = WaitClock(device), WaitClock(device)
    watch = Watch(stamps_of(device), *clocks)
    batches = repeat(0)
    work = _work(device)
    others_s, _ = _watching_s(watch, work, device, tells=False)
    calls_s, step_s = _watching_s(watch, work, device, tells=True)
    ratios = [_pair(watch, batches, work, device) for _ in range(arguments.rounds)]
    low, _, high = quantiles(ratios, n=4)
    share = calls_s / STEP_S
    print_figures(
        {
            "device": device.type,
            "step_ms": round(step_s * 1e3, 2),
            "watching_us": round(calls_s * 1e6, 2),
            "others_us": round(others_s * 1e6, 2),
            "overhead_share": round(share, 6),
            "paired_share": round(median(ratios) - 1, 5),
            "paired_spread": round((high - low) / 2, 5),
            "rounds": arguments.rounds,
        },
        as_json=arguments.json,
    )
    return int(share >= LIMIT)


def _watching_s(
    watch: Watch, work: Callable[[], None], device: torch.device, *, tells: bool
) -> tuple[float, float]:
    """Seconds of the calls of one step, and of the step; medians."""
    calls, steps, batches = [], [], repeat(0)
    for _ in range(STEPS):
        begun = time.perf_counter()
        watch.begin()
        watch.next_of(batches)
        watch.computes()
        given = time.perf_counter()
        work()
        _synchronize(device)
        done = time.perf_counter()
        watch.end()
        if tells:
            watch.last()
        ended = time.perf_counter()
        calls.append(given - begun + ended - done)
        steps.append(ended - begun)
    return median(calls), median(steps)


def _pair(
    watch: Watch, batches: Iterator[int], work: Callable[[], None], device: torch.device
) -> float:
    """Seconds with the watch over those without, of some steps in turns; either comes first as
    often."""

    def plain() -> None:
        next(batches)
        work()
        _synchronize(device)

    def watched() -> None:
        watch.begin()
        watch.next_of(batches)
        watch.computes()
        work()
        _synchronize(device)
        watch.end()
        watch.last()

    spent = dict.fromkeys((plain, watched), 0.0)
    for first, second in ((plain, watched), (watched, plain)) * 5:
        for step in (first, second):
            begun = time.perf_counter()
            step()
            spent[step] += time.perf_counter() - begun
    return spent[watched] / spent[plain]


def _work(device: torch.device) -> Callable[[], None]:
    """About 10 ms."""
    matrix = torch.randn(1024 if device.type == "cuda" else 256, 256, device=device)
    times = 1

    def run() -> None:
        for _ in range(times):
            torch.mm(matrix, matrix[:256])

    while (taken := _seconds(run, device)) < STEP_S:
        times = max(times + 1, int(times * min(10.0, STEP_S / taken)))
    return run


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    found = []
    for _ in range(5):
        begun = time.perf_counter()
        work()
        _synchronize(device)
        found.append(time.perf_counter() - begun)
    return median(found)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print nothing but the figures")
    parser.add_argument("--rounds", type=int, default=60)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
