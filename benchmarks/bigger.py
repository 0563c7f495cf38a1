"""A model that an even split cannot hold, trained by gpumix on the same devices.

Four emulated devices of unequal memory; a GPT-2 of 12.1 M parameters, whose training state divided
by four is more than the smallest device has. gpumix trains it by its own plan; its own `even` plan
must be refused before anything is allocated; FSDP2 is started all the same, as sparing as it can be
(micro-batches of one sample, recompute, no prefetch, the whole model in host memory that nobody
counts). Limits are those of a real allocator, to the byte.

    python benchmarks/bigger.py [--json] [--steps 4]

Figures: `fits` (gpumix did all steps on all devices), `worst_memory_fraction` (its highest measured
peak over its device's limit), `even_fails_with` (what FSDP2 died of), `even_plan_refused`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import gpumix
from emulated import systems
from emulated.results import aligned, plan_line
from emulated.rounds import joined, profile_of
from emulated.setting import SEED, Setting, cluster_of
from emulated.systems import System
from gpumix.hardware.device import open_device
from gpumix.spec.errors import NoFeasiblePlanError
from gpumix.spec.plan import Plan
from gpumix.spec.profile import Profile
from gpumix.spec.units import show_bytes
from gpumix.train.launch import Seat, launch

SETTING = Setting(
    cluster_of(
        ("large", 1, "40 GFLOP/s", "256 MiB"),
        ("medium", 1, "20 GFLOP/s", "128 MiB"),
        ("small", 2, "10 GFLOP/s", "40 MiB"),
    ),
    width=288,
    layers=12,
    heads=6,
    global_batch=16,
)


@dataclass(frozen=True)
class Attempt:
    """What became of one rank: its part of each step's loss, its peak, and the error if any."""

    losses: tuple[float, ...]
    peak_bytes: int
    error: str = ""
    message: str = ""


def main() -> None:
    arguments = _arguments()
    begun = time.perf_counter()
    profile: Profile = launch(profiled, SETTING.devices)[0]
    plan = gpumix.plan(profile, SETTING.global_batch)
    refused = _refusal(profile)
    ours: list[Attempt] = launch(by_gpumix, SETTING.devices, plan, arguments.steps)
    others: list[Attempt] = launch(by_fsdp, SETTING.devices, arguments.steps)
    _show(profile, plan, refused, ours, others)
    figures = {
        "fits": all(len(a.losses) == arguments.steps for a in ours),
        "worst_memory_fraction": round(max(_fractions(ours)), 4),
        "even_fails_with": _cause(others),
        "even_plan_refused": bool(refused),
        "seconds": round(time.perf_counter() - begun, 1),
    }
    print("\n" + ", ".join(f"{name} {value}" for name, value in figures.items()))
    if arguments.json:
        print(json.dumps(figures))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--steps", type=int, default=4)
    return parser.parse_args()


def profiled(seat: Seat) -> Profile:
    with joined(seat):
        return profile_of(SETTING)


def by_gpumix(seat: Seat, plan: Plan, steps: int) -> Attempt:
    """Train by `plan` on this rank's device."""
    model = gpumix.build(SETTING.build, SEED)
    return _attempt(seat, lambda: systems.Gpumix(model, plan), steps)


def by_fsdp(seat: Seat, steps: int) -> Attempt:
    """Train by FSDP2 with equal shares on this rank's device."""
    model = SETTING.build()  # before the device is opened: not in its memory
    even = SETTING.even()
    system = partial(systems.fsdp, model, SETTING, even, micro_batch=1, prefetch=False)
    return _attempt(seat, system, steps)


def _attempt(seat: Seat, system_of: Callable[[], System], steps: int) -> Attempt:
    """Train until the end, or until this rank or a peer dies."""
    losses: list[float] = []
    with open_device(SETTING.class_of(seat.rank), 0) as runtime:
        runtime.reset_peak()
        try:
            with joined(seat):
                system = system_of()
                for step in range(steps):
                    batch = SETTING.batch(step, system.samples, seat.rank)
                    losses.append(system.step(batch).item())
        except Exception as error:  # the edge of this process: whatever it died of is the result
            lines = str(error).strip().splitlines() or [""]
            return Attempt(tuple(losses), runtime.peak_bytes() or 0, type(error).__name__, lines[0])
        return Attempt(tuple(losses), runtime.peak_bytes() or 0)


def _refusal(profile: Profile) -> str:
    """Why the planner refuses the even plan; empty if it does not."""
    try:
        gpumix.plan(profile, SETTING.global_batch, strategy="even")
    except NoFeasiblePlanError as error:
        return str(error)
    return ""


def _cause(attempts: list[Attempt]) -> str:
    """The class of the error that explains the others: running out of memory before lost peers."""
    errors = [a.error for a in attempts if a.error]
    return min(errors, key=lambda name: name != "OutOfMemoryError", default="")


def _fractions(attempts: list[Attempt]) -> list[float]:
    """Peak over limit by rank."""
    limits = [SETTING.class_of(rank).memory_bytes for rank in range(len(attempts))]
    return [a.peak_bytes / limit for a, limit in zip(attempts, limits)]


def _show(
    profile: Profile, plan: Plan, refused: str, ours: list[Attempt], others: list[Attempt]
) -> None:
    parameters = profile.model.parameters
    state = parameters * (8 + profile.optimizer_bytes_per_element)
    print(
        f"emulated devices; {parameters / 1e6:.1f} M parameters, {show_bytes(state)} of state, "
        f"{show_bytes(state / len(SETTING.devices))} for each device if it is divided evenly\n"
    )
    rows = [("device", "limit", "gpumix", "peak", "FSDP2 even", "peak")]
    for rank, (our, other) in enumerate(zip(ours, others)):
        rows.append(
            (
                SETTING.devices[rank].id,
                show_bytes(SETTING.class_of(rank).memory_bytes),
                _fate(our),
                show_bytes(our.peak_bytes),
                _fate(other),
                show_bytes(other.peak_bytes),
            )
        )
    print(aligned(rows))
    print(plan_line(plan))
    losses = [sum(parts) for parts in zip(*(a.losses for a in ours))]
    print(f"gpumix's losses: {', '.join(f'{loss:.3f}' for loss in losses)}")
    print(f"gpumix's even plan: {refused or 'was NOT refused'}")
    for rank, attempt in enumerate(others):
        if attempt.error:
            print(f"FSDP2 on {SETTING.devices[rank].id}: {attempt.error}: {attempt.message[:150]}")


def _fate(attempt: Attempt) -> str:
    done = f"{len(attempt.losses)} steps"
    return f"{attempt.error} after {done}" if attempt.error else done


if __name__ == "__main__":
    main()
