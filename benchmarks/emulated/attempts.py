"""Steps of a contestant on its own, in processes of their own: it may run out of memory, which
leaves its peers without one."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

from compared.search import Found, Tried, fastest
from emulated.contestants import Contestant, OnTorch
from emulated.rounds import joined, one_step
from emulated.setting import Setting
from emulated.ways import Way, thriftiest, ways_of
from gpumix.hardware.device import DeviceRuntime, open_device
from gpumix.train.processes.local_launcher import RankAddress, launch

STEPS = 2  # the first one allocates the optimizer's state; the last one is timed
TRIES = 2


@dataclass(frozen=True)
class Attempt:
    """What became of one rank: its part of each step's loss, seconds of the last step and its
    overruns, its peak, and the error if any."""

    losses: tuple[float, ...]
    step_s: float
    overruns: int
    peak_bytes: int
    error: str = ""
    message: str = ""


def attempts(setting: Setting, contestant: Contestant, steps: int = STEPS) -> list[Attempt]:
    """By rank."""
    return launch(_attempt, setting.devices, setting, contestant, steps)


def error_of(found: Sequence[Attempt]) -> str:
    """The class of the error that explains the others: running out of memory before lost peers."""
    errors = [attempt.error for attempt in found if attempt.error]
    return min(errors, key=lambda name: name != "OutOfMemoryError", default="")


def fastest_way(
    setting: Setting, samples: tuple[int, ...], *, every: bool = False, doubtful: bool = False
) -> Found[Way]:
    """The fastest way of DDP and FSDP2 in which these samples by rank fit, by trying.

    Args:
        every: try ways too that others cover.
        doubtful: it may be that none fits.
    """
    return fastest(
        ways_of(samples),
        partial(_try_out, setting, samples),
        every=every,
        thriftiest=thriftiest(samples) if doubtful else None,
    )


def _try_out(setting: Setting, samples: tuple[int, ...], way: Way) -> Tried[Way]:
    """A step's time in this way; the fastest of several where devices fell behind their speed."""
    best: Tried[Way] | None = None
    for _ in range(TRIES):
        found = attempts(setting, OnTorch("", samples, way))
        if error := error_of(found):
            return Tried(way, error=error)
        step_s, overruns = max(a.step_s for a in found), sum(a.overruns for a in found)
        if best is None or step_s < best.step_s:
            best = Tried(way, step_s, overruns=overruns)
        if not overruns:
            break
    assert best is not None
    return best


def _attempt(seat: RankAddress, setting: Setting, contestant: Contestant, steps: int) -> Attempt:
    """Train until the end, or until this rank or a peer dies."""
    start = contestant.start(setting)
    losses: list[float] = []
    step_s, overruns = inf, 0
    gc.collect()
    with open_device(setting.class_of(seat.rank), 0) as runtime:
        runtime.reset_peak()
        try:
            with joined(seat):
                system = start(runtime)
                del start  # it holds a model that is sharded now
                step = partial(one_step, system, contestant, setting, seat.rank, runtime)
                for number in range(steps):
                    before = runtime.overruns
                    step_s, loss = step(number)
                    losses.append(loss)
                    overruns = runtime.overruns - before
        except Exception as error:  # the edge of this process: whatever it died of is the result
            lines = str(error).strip().splitlines() or [""]
            return _told(runtime, losses, inf, 0, type(error).__name__, lines[0])
        return _told(runtime, losses, step_s, overruns)


def _told(
    runtime: DeviceRuntime,
    losses: Sequence[float],
    step_s: float,
    overruns: int,
    error: str = "",
    message: str = "",
) -> Attempt:
    peak = runtime.peak_bytes() or 0
    return Attempt(tuple(losses), step_s, overruns, peak, error, message)
