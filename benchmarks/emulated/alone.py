"""Each device by itself: how fast it trains with nobody to wait for, in its best setting.

The sum over devices is the most that a fleet can reach. So that it is a bound, memory must not bind
the device alone, which would have to hold the whole model's state: it has as much as it wants.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

from emulated.rounds import TRIES
from emulated.setting import Setting
from emulated.ways import Way
from gpumix.hardware.device import DeviceRuntime, open_device
from gpumix.train.processes.local_launcher import RankAddress, launch

ENDLESS_BYTES = 16 << 30
STEPS = 1  # timed ones; the first one, which allocates, is not


@dataclass(frozen=True)
class Alone:
    """A device's tokens/s by itself: with graphs kept, in the faster of two ways to cut its
    samples, and with recompute. `overruns` of the runs that counted."""

    keeping: float
    recomputing: float
    overruns: int

    @property
    def best(self) -> float:
        return max(self.keeping, self.recomputing)


def each_alone(setting: Setting, *, recomputing: bool = False) -> dict[str, Alone]:
    """Every device by its id, all at the same time. With recompute only on demand: it does a third
    more work in the same setting."""
    found = launch(_by_itself, setting.devices, setting, recomputing)
    return {device.id: alone for device, alone in zip(setting.devices, found)}


@dataclass(frozen=True)
class _Speed:
    tokens_per_s: float
    overruns: int


def _by_itself(seat: RankAddress, setting: Setting, recomputing: bool) -> Alone:
    samples = setting.proportional()[seat.rank]
    keeping = [_speed(seat.rank, setting, Way(micro_batches=count)) for count in {1, samples}]
    best, again = max(keeping, key=lambda speed: speed.tokens_per_s), _Speed(0.0, 0)
    if recomputing:
        again = _speed(seat.rank, setting, Way(micro_batches=samples, recompute=True))
    return Alone(best.tokens_per_s, again.tokens_per_s, best.overruns + again.overruns)


def _speed(rank: int, setting: Setting, way: Way) -> _Speed:
    """Of the first run without overruns; where all had some, of the one with the fewest."""
    unlimited = setting.class_of(rank).model_copy(update={"memory_bytes": ENDLESS_BYTES})
    tried: list[_Speed] = []
    while not tried or (tried[-1].overruns and len(tried) < TRIES):
        with open_device(unlimited, 0) as runtime:
            tried.append(_measured(rank, setting, way, runtime))
    return min(tried, key=lambda speed: speed.overruns)


def _measured(rank: int, setting: Setting, way: Way, runtime: DeviceRuntime) -> _Speed:
    system = way.system(way.model(setting), setting, runtime)
    samples = setting.proportional()
    times, overruns = [], 0
    for step in range(1 + STEPS):
        batch = setting.batch(step, samples, rank)
        before = runtime.overruns
        runtime.idle()
        begun = time.perf_counter()
        system.step(batch).item()
        runtime.synchronize()
        times.append(time.perf_counter() - begun)
        overruns = runtime.overruns - before + (overruns if step > 1 else 0)
    tokens = samples[rank] * setting.sequence
    return _Speed(tokens / median(times[1:]), overruns)
