"""The CPU time in which a rank prepares a collective, and finds its part of a plan, among few ranks
and among many; see `absent_group` among the tests."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from statistics import median

from common import Figures
from gpumix.engine.comm.communicator import Pending
from helpers.processes.absent_group import LOOK_UPS, backend_absent, plan_of, preparations

FEW, MANY = 64, 10_240
TURNS = 100


def growths() -> Figures:
    """`growth_64_to_10240`, and the preparation of each collective among each number of ranks."""
    seconds = preparations_s()
    figures: Figures = {
        f"prepare_{_key(name)}_us_{ranks}_ranks": round(1e6 * taken, 1)
        for (ranks, name), taken in seconds.items()
    }
    growth = max(
        seconds[MANY, name] / seconds[FEW, name] for ranks, name in seconds if ranks == FEW
    )
    figures["growth_64_to_10240"] = round(growth, 3)
    return figures


def preparations_s() -> dict[tuple[int, str], float]:
    """CPU seconds until each collective is handed over, by the number of ranks and its name:
    medians of turns that alternate. Of the host's work alone: nothing is copied."""
    taken: dict[tuple[int, str], list[float]] = defaultdict(list)
    with backend_absent():
        every = {
            (ranks, name): start
            for ranks in (FEW, MANY)
            for name, start in preparations(ranks, device="meta").items()
        }
        for _ in range(TURNS):
            for key, start in every.items():
                taken[key].append(_cpu_s(start))
    return {key: median(some) for key, some in taken.items()}


def look_ups_s() -> dict[str, float]:
    """CPU seconds of each look-up in a plan for 10,240 ranks, after the first: the most of a plan
    whose ranks compute alone and of one of tensor-parallel groups of eight."""
    found: dict[str, float] = {}
    for tensor in (1, 8):
        plan = plan_of(MANY, tensor=tensor)
        for name, look_up in LOOK_UPS.items():
            look_up(plan, 0)
            turns = [_cpu_s(partial(look_up, plan, MANY - 1)) for _ in range(TURNS)]
            seconds = median(turns)
            found[name] = max(seconds, found.get(name, 0.0))
    return found


def _cpu_s(prepare: Callable[[], object]) -> float:
    """Of `prepare`, called a second time in a row, so that its code is in caches. The collectives
    that it may have started end outside of this time: there is more to sum among more ranks."""
    first = prepare()
    begun = time.process_time()
    second = prepare()
    seconds = time.process_time() - begun
    for started in (first, second):
        if isinstance(started, Pending):
            started.wait()
    return seconds


def _key(name: str) -> str:
    return name.replace(",", "").replace(" ", "_")
