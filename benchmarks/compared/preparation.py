"""The CPU time in which a rank prepares a collective, and finds its part of a plan, among few ranks
and among many; see `absent_group` among the tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

from absent_group import LOOK_UPS, backend_absent, plan_of, preparations
from common import Figures
from gpumix.engine.comm import Pending

FEW, MANY = 64, 10_240
TURNS = 50


def growths() -> Figures:
    """`growth_64_to_10240`, and the preparation of each collective among each number of ranks."""
    few, many = preparations_s(FEW), preparations_s(MANY)
    figures: Figures = {
        f"prepare_{_key(name)}_us_{ranks}_ranks": round(1e6 * seconds, 1)
        for ranks, by_name in ((FEW, few), (MANY, many))
        for name, seconds in by_name.items()
    }
    figures["growth_64_to_10240"] = round(max(many[name] / few[name] for name in few), 3)
    return figures


def preparations_s(world: int) -> dict[str, float]:
    """CPU seconds until each collective is handed over, by its name: medians."""
    with backend_absent():
        return {name: _median_cpu_s(start) for name, start in preparations(world).items()}


def look_ups_s() -> dict[str, float]:
    """CPU seconds of each look-up in a plan for 10,240 ranks, after the first: the most of a plan
    whose ranks compute alone and of one of teams of eight."""
    found: dict[str, float] = {}
    for tensor in (1, 8):
        plan = plan_of(MANY, tensor=tensor)
        for name, look_up in LOOK_UPS.items():
            look_up(plan, 0)
            seconds = _median_cpu_s(partial(look_up, plan, MANY - 1))
            found[name] = max(seconds, found.get(name, 0.0))
    return found


def _median_cpu_s(prepare: Callable[[], object]) -> float:
    """Of `prepare`, called a second time in a row, so that its code is in caches. The collectives
    that it may have started end outside of this time: there is more to sum among more ranks."""
    taken = []
    for _ in range(TURNS):
        first = prepare()
        begun = time.process_time()
        second = prepare()
        taken.append(time.process_time() - begun)
        for started in (first, second):
            if isinstance(started, Pending):
                started.wait()
    return median(taken)


def _key(name: str) -> str:
    return name.replace(",", "").replace(" ", "_")
