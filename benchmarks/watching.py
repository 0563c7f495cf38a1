"""What it costs to watch each step: its time told apart, and what comes of that.

A step of about 10 ms (matrix products) is run with the watch and without, in turns; and the watch's
own calls are timed between those products, which push its code and data out of the caches, as a
real step does. On a GPU stamps are events on the stream. Between products are timed too what a rank
does with the times of all others, and the norm of its own gradients: those of as many weights as
such a step has, with 256 tokens for each.

    python benchmarks/watching.py [--json] [--rounds 60]

Figures: `watching_us` is what the calls of one step take on the rank that writes them down, the
median over steps, `others_us` that on other ranks; `reports_us` is what it takes to read what ranks
told, and to decide whether samples are to be split anew, with `ranks` ranks; `norm_us` what the
norm takes. `overhead_share` is `watching_us` over 10 ms, `judged_share` that with the latter two.
`paired_share` is how much longer steps with the watch took, the median over rounds of steps in
turns, and `paired_spread` half of the middle half of those rounds: what is below it is noise.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from statistics import median, quantiles
from types import SimpleNamespace
from typing import Any

import torch

from common import make_parser, print_figures
from gpumix.engine.comm.step_exchange import COLUMNS, StepTable
from gpumix.engine.comm.wait_clock import WaitClock
from gpumix.engine.sharding.bucket import SampledGradientNorm
from gpumix.hardware.timestamps import make_device_clock
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Stage, Worker
from gpumix.train.monitor.step_timer import StepTimer
from gpumix.train.rebalance_controller import RebalanceController

STEP_S = 0.010
STEPS = 200
LIMIT = 0.005
RANKS = 64


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clocks = WaitClock(device), WaitClock(device)
    watch = StepTimer(make_device_clock(device), *clocks)
    batches = repeat(0)
    work = _work(device)
    others_s, _ = _watching_s(watch, work, device, tells=False)
    calls_s, step_s = _watching_s(watch, work, device, tells=True)
    ratios = [_pair(watch, batches, work, device) for _ in range(arguments.rounds)]
    low, _, high = quantiles(ratios, n=4)
    reports_s = _timed(_reports(device), work, device)
    norm_s = _timed(_norm(device), work, device)
    share = calls_s / STEP_S
    print_figures(
        {
            "device": device.type,
            "step_ms": round(step_s * 1e3, 2),
            "watching_us": round(calls_s * 1e6, 2),
            "others_us": round(others_s * 1e6, 2),
            "reports_us": round(reports_s * 1e6, 2),
            "norm_us": round(norm_s * 1e6, 2),
            "ranks": RANKS,
            "overhead_share": round(share, 6),
            "judged_share": round((calls_s + reports_s + norm_s) / STEP_S, 6),
            "paired_share": round(median(ratios) - 1, 5),
            "paired_spread": round((high - low) / 2, 5),
            "rounds": arguments.rounds,
        },
        as_json=arguments.json,
    )
    return int(share >= LIMIT)


def _watching_s(
    watch: StepTimer, work: Callable[[], None], device: torch.device, *, tells: bool
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


def _timed(call: Callable[[], None], work: Callable[[], None], device: torch.device) -> float:
    """Seconds of a call between steps; the median."""
    found = []
    for _ in range(STEPS):
        work()
        _synchronize(device)
        begun = time.perf_counter()
        call()
        _synchronize(device)
        found.append(time.perf_counter() - begun)
    return median(found)


def _reports(device: torch.device) -> Callable[[], None]:
    """What a rank does after a step with what all told in it."""
    balancing = RebalanceController(_even_plan(), None, _no_others(), state_moves=False)
    table = torch.rand(RANKS, COLUMNS, dtype=torch.float64, device=device) * 1e-3 + STEP_S
    times: list[float] = []

    def run() -> None:
        exchanged = StepTable(table)
        times.append(STEP_S)
        balancing.after_step(times, exchanged.reports)

    return run


def _norm(device: torch.device) -> Callable[[], None]:
    own, one = SampledGradientNorm(device), torch.randn(256, 256, device=device)
    products = STEP_S / _seconds(partial(torch.mm, one, one), device)
    # A weight has one forward, and two backward.
    weights = [torch.randn(256 * 256, device=device) for _ in range(max(1, round(products / 3)))]

    def run() -> None:
        for weight in weights:
            own.see("unit", [weight])
        own.take()

    return run


def _even_plan() -> Plan:
    share = {"samples": 8, "micro_batch": 8, "state_share": 1 / RANKS}
    workers = tuple(Worker(device=f"d{n}", device_class="card", **share) for n in range(RANKS))
    return Plan(
        strategy="by hand",
        model="m",
        sequence_length=1,
        global_batch=8 * RANKS,
        stages=(Stage(units=("unit",), workers=workers),),
    )


def _no_others() -> Any:
    """A context as far as it is looked at: a run that goes on for ever."""
    return SimpleNamespace(
        job=SimpleNamespace(max_steps=10**9, advanced=SimpleNamespace(max_restarts=0)),
        runtime=SimpleNamespace(peak_bytes=lambda: 0, memory_limit_bytes=1),
        ranks=SimpleNamespace(gather=lambda topic, text: [text] * RANKS),
    )


def _pair(
    watch: StepTimer, batches: Iterator[int], work: Callable[[], None], device: torch.device
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


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
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
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
