"""How close a fleet of unequal devices comes to the sum of its devices, and to its prediction.

Mixtures of emulated devices, each profiled, planned and trained by the plan. A device's own speed
is that of a plain loop on it, alone: with its graphs kept where it has the memory for the whole
model's state, else with recompute, else with recompute and memory without end. The fleet's
efficiency is its speed over the sum of these; devices that the plan leaves out count too.

    python benchmarks/engine_mixed.py [--json] [--rounds 2] [--steps 2] [--only 8:1 ...]

Figures: `mixtures`; `worst_fleet_efficiency` over mixtures in which compute binds (memory is
plenty), `..._any` over all, `..._same_mode`: if the devices alone recompute as the plan does;
`worst_vs_prediction`, measured over predicted tokens/s, over all. `overruns` as in `mixed_cpu.py`:
0, or the figures mean nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

import torch

import gpumix
from common import Figures, print_figures
from compared.systems import OnEngine
from compared.where import where_time_goes
from emulated import systems
from emulated.results import aligned, plan_line
from emulated.rounds import GPUMIX, TRIES, Bench, Run, Study, joined, profile_of
from emulated.setting import Setting, cluster_of
from gpumix.engine.record import Recording
from gpumix.hardware.device import DeviceRuntime, open_device
from gpumix.spec.plan import Plan
from gpumix.spec.profile import Profile
from gpumix.spec.units import show_bytes
from gpumix.train.launch import Seat, launch

WIDTH, LAYERS, HEADS = 192, 6, 6
ENDLESS_BYTES = 16 << 30
ALONE_STEPS = 1


@dataclass(frozen=True)
class Mixture:
    """Devices as (class, count, speed, memory); `plenty`: memory binds nobody."""

    name: str
    groups: tuple[tuple[str, int, str, str], ...]
    plenty: bool = True
    global_batch: int = 32

    @cached_property
    def setting(self) -> Setting:
        return Setting(cluster_of(*self.groups), WIDTH, LAYERS, HEADS, self.global_batch)


MIXTURES = (
    Mixture(
        "4:2:1:1",
        (
            ("fast", 1, "10 GFLOP/s", "512 MiB"),
            ("medium", 1, "5 GFLOP/s", "512 MiB"),
            ("slow", 2, "2.5 GFLOP/s", "512 MiB"),
        ),
    ),
    Mixture(
        "8:1",
        (("fast", 1, "10 GFLOP/s", "512 MiB"), ("slow", 1, "1.25 GFLOP/s", "512 MiB")),
        global_batch=18,
    ),
    Mixture(
        "unequal memory",
        (
            ("roomy", 1, "5 GFLOP/s", "512 MiB"),
            ("middle", 1, "5 GFLOP/s", "96 MiB"),
            ("narrow", 2, "5 GFLOP/s", "48 MiB"),
        ),
        plenty=False,
    ),
    Mixture(
        "fast is small",
        (("fast", 1, "10 GFLOP/s", "48 MiB"), ("slow", 2, "2.5 GFLOP/s", "256 MiB")),
        plenty=False,
        global_batch=24,
    ),
    Mixture(
        "one for nothing",
        (("fast", 2, "8 GFLOP/s", "512 MiB"), ("useless", 1, "300 MFLOP/s", "64 MiB")),
        global_batch=24,
    ),
    Mixture("equal", (("equal", 3, "6 GFLOP/s", "512 MiB"),), global_batch=30),
)


@dataclass(frozen=True)
class Alone:
    """A device by itself: tokens/s with recompute and, where it fits, with graphs kept."""

    recomputing: float
    keeping: float | None

    @property
    def best(self) -> float:
        return max(self.recomputing, self.keeping or 0.0)


@dataclass(frozen=True)
class Result:
    """What became of a mixture. `alone` by device id, `runs` of rank 0."""

    mixture: Mixture
    plan: Plan
    runs: tuple[Run, ...]
    alone: dict[str, Alone]
    recordings: tuple[Recording, ...]

    @property
    def counted(self) -> list[Run]:
        """Without overruns, if there are such."""
        return [run for run in self.runs if not run.overruns] or list(self.runs)

    @property
    def overruns(self) -> int:
        return sum(run.overruns for run in self.counted)

    @property
    def tokens_per_s(self) -> float:
        return self.mixture.setting.tokens / median(median(r.step_s) for r in self.counted)

    @property
    def efficiency(self) -> float:
        return self.tokens_per_s / sum(alone.best for alone in self.alone.values())

    @property
    def efficiency_same_mode(self) -> float:
        """Against devices that recompute where the plan does; it leaves out what it leaves out."""
        keeps = {w.device for w in self.plan.workers if not w.mode.recompute}
        same = (a.best if d in keeps else a.recomputing for d, a in self.alone.items())
        return self.tokens_per_s / sum(same)

    @property
    def vs_prediction(self) -> float:
        assert self.plan.prediction is not None
        return self.tokens_per_s / self.plan.prediction.tokens_per_s


def main() -> None:
    arguments = _arguments()
    begun = time.perf_counter()
    results = []
    for mixture in MIXTURES:
        if mixture.name in arguments.only:
            results.append(measure(mixture, arguments.rounds, arguments.steps))
            print(f"{mixture.name}: {results[-1].efficiency:.3f}", file=sys.stderr, flush=True)
    _show(results)
    figures = figures_of(results) | {"seconds": round(time.perf_counter() - begun, 1)}
    print_figures(figures, as_json=arguments.json)


def _arguments() -> argparse.Namespace:
    names = [mixture.name for mixture in MIXTURES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="measured steps per round")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    return parser.parse_args()


def measure(mixture: Mixture, rounds: int, steps: int) -> Result:
    """Profile, plan, train by the plan, and each device alone."""
    setting = mixture.setting
    profile: Profile = launch(profiled, setting.devices, setting)[0]
    plan = gpumix.plan(profile, setting.global_batch)
    taking_part = {worker.device for worker in plan.workers}
    devices = tuple(d for d in setting.devices if d.id in taking_part)
    cluster = setting.cluster.model_copy(update={"devices": devices})
    fleet = Setting(cluster, WIDTH, LAYERS, HEADS, setting.global_batch)
    trained = launch(by_plan, fleet.devices, Study(fleet, (GPUMIX,), rounds, steps), plan)
    alone = launch(by_itself, setting.devices, setting)
    return Result(
        mixture,
        plan,
        runs=trained[0][0],
        alone={device.id: speed for device, speed in zip(setting.devices, alone)},
        recordings=tuple(recording for _, recording in trained),
    )


def profiled(seat: Seat, setting: Setting) -> Profile:
    with joined(seat):
        return profile_of(setting)


def by_plan(seat: Seat, study: Study, plan: Plan) -> tuple[tuple[Run, ...], Recording]:
    """One rank's runs, and one step in detail."""
    setting = study.setting
    with joined(seat):
        bench = Bench(seat.rank, study, plan)
        runs = tuple(bench.repeated(GPUMIX, number) for number in range(study.rounds))
        with open_device(setting.class_of(seat.rank), 0) as runtime:
            engine = gpumix.prepare(setting.build(), plan)
            system = OnEngine(engine, systems.optimizer_of(list(engine.parameters())))
            samples = tuple(worker.samples for worker in plan.workers)
            for step in range(2):  # the first one allocates
                runtime.idle()
                recording = system.recorded_step(setting.batch(step, samples, seat.rank))
            del engine, system
        return runs, recording


def by_itself(seat: Seat, setting: Setting) -> Alone:
    """A device alone with its part of the batch, others being alone at the same time."""
    one = _Alone(seat.rank, setting)
    recomputing = one.tokens_per_s(recompute=True) or one.tokens_per_s(recompute=True, endless=True)
    assert recomputing is not None
    return Alone(recomputing, one.tokens_per_s(recompute=False))


class _Alone:
    """A plain loop on one device, in micro-batches of one sample."""

    def __init__(self, rank: int, setting: Setting) -> None:
        rates = [
            setting.class_of(r).emulate_flops_per_s or 0.0 for r in range(len(setting.devices))
        ]
        samples = max(1, round(setting.global_batch * rates[rank] / sum(rates)))
        self._rank = rank
        self._setting = setting
        self._samples = tuple(samples for _ in rates)

    def tokens_per_s(self, *, recompute: bool, endless: bool = False) -> float | None:
        """None where memory is too small. The first run without overruns, else the fastest."""
        device_class = self._setting.class_of(self._rank)
        if endless:
            device_class = device_class.model_copy(update={"memory_bytes": ENDLESS_BYTES})
        found: list[float] = []
        for _ in range(TRIES):
            with open_device(device_class, 0) as runtime:
                try:
                    step_s = self._step_s(runtime, recompute)
                except torch.OutOfMemoryError:
                    return None
                found.append(self._samples[0] * self._setting.sequence / step_s)
                if not runtime.overruns:
                    return found[-1]
        return max(found)

    def _step_s(self, runtime: DeviceRuntime, recompute: bool) -> float:
        setting = self._setting
        model = setting.build()
        if recompute:
            systems.recomputing(model)
        system = systems.Plain(model, setting, self._samples, averaged=False, micro_batch=1)
        times = []
        for step in range(1 + ALONE_STEPS):
            batch = setting.batch(step, self._samples, self._rank)
            runtime.idle()
            begun = time.perf_counter()
            system.step(batch).item()
            runtime.synchronize()
            times.append(time.perf_counter() - begun)
        return median(times[1:])


def figures_of(results: Sequence[Result]) -> Figures:
    plenty = [result for result in results if result.mixture.plenty]
    figures: Figures = {"mixtures": len(results)}
    if plenty:
        figures["worst_fleet_efficiency"] = min(r.efficiency for r in plenty)
        same = min(r.efficiency_same_mode for r in plenty)
        figures["worst_fleet_efficiency_same_mode"] = same
    figures["worst_fleet_efficiency_any"] = min(r.efficiency for r in results)
    figures["worst_vs_prediction"] = min(r.vs_prediction for r in results)
    figures["overruns"] = sum(r.overruns for r in results)
    return {n: round(v, 4) if isinstance(v, float) else v for n, v in figures.items()}


def _show(results: Sequence[Result]) -> None:
    print("emulated devices: times are of the emulation, not of any real card\n")
    rows = [("mixture", "tokens/s", "alone", "efficiency", "same mode", "vs predicted", "overruns")]
    for result in results:
        rows.append(
            (
                result.mixture.name + ("" if result.mixture.plenty else " (memory binds)"),
                f"{result.tokens_per_s:.1f}",
                f"{sum(alone.best for alone in result.alone.values()):.1f}",
                f"{result.efficiency:.3f}",
                f"{result.efficiency_same_mode:.3f}",
                f"{result.vs_prediction:.3f}",
                str(result.overruns),
            )
        )
    print(aligned(rows))
    for result in results:
        print(f"\n{result.mixture.name}: {_devices(result)}\n{plan_line(result.plan)}")
    print("\nwhere the time of one step goes, mean over ranks")
    print(where_time_goes({r.mixture.name: r.recordings for r in results}), end="\n\n")


def _devices(result: Result) -> str:
    """Each device with its memory, and what it does alone."""
    setting = result.mixture.setting
    told = []
    for rank, device in enumerate(setting.devices):
        alone = result.alone[device.id]
        kept = "graphs do not fit" if alone.keeping is None else f"{alone.keeping:.0f} kept"
        memory = show_bytes(setting.class_of(rank).memory_bytes)
        told.append(f"{device.id} ({memory}) {alone.recomputing:.0f} tokens/s recomputing, {kept}")
    return "; ".join(told)


if __name__ == "__main__":
    main()
