"""Steps on devices of limited memory: whether they are done, and the peak of each rank.

Memory is that of a real allocator, counted and limited to the byte; devices are not slowed down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

import gpumix
from compared.setting import Batch, Model, Setting
from compared.systems import Fsdp, OnEngine, System, optimizer_of
from emulated.rounds import joined
from gpumix.engine.comm.step_recorder import RecordedStep
from gpumix.hardware.device import open_device
from gpumix.schema.cluster.cluster import Cluster
from gpumix.schema.plan.plan import Plan
from gpumix.train.processes.local_launcher import RankAddress, launch

STEPS = 2  # the second has the optimizer's state beside all else


@dataclass(frozen=True)
class Attempt:
    """What became of one rank: its peak, the error if any, its last step in detail if asked for."""

    peak_bytes: int | None
    error: str = ""
    recording: RecordedStep | None = None


def engine_attempt(cluster: Cluster, model: Model, plan: Plan) -> list[Attempt]:
    """Train by `plan`; by rank."""
    return launch(_by_engine, cluster.in_rank_order(), cluster, model, plan)


def fsdp_attempt(cluster: Cluster, setting: Setting) -> list[Attempt]:
    """Train by FSDP2 in its thriftiest form: all sharded, without gathers ahead of use. By rank."""
    return launch(_by_fsdp, cluster.in_rank_order(), cluster, setting)


def fits(attempts: list[Attempt]) -> bool:
    return not any(attempt.error for attempt in attempts)


def _by_engine(seat: RankAddress, cluster: Cluster, model: Model, plan: Plan) -> Attempt:
    deferred = gpumix.build(model.build, 0)
    own = plan.workers[seat.rank].samples
    begin = sum(worker.samples for worker in plan.workers[: seat.rank])

    def system() -> System:
        engine = gpumix.prepare(deferred, plan)
        return OnEngine(engine, optimizer_of(engine.parameters()))

    def batch(step: int) -> Batch:
        return model.rows(step * plan.global_batch + begin, own)

    return _attempt(seat, cluster, system, batch)


def _by_fsdp(seat: RankAddress, cluster: Cluster, setting: Setting) -> Attempt:
    """Its whole model is made before the device is opened: not in its memory."""
    entrant = Fsdp(reshard=True, ahead=False)
    whole = setting.model.build()

    def system() -> System:
        return entrant.wrap(whole, setting, torch.device("cpu"))

    return _attempt(seat, cluster, system, lambda step: setting.batch(step, seat.rank))


def _attempt(
    seat: RankAddress,
    cluster: Cluster,
    system_of: Callable[[], System],
    batch: Callable[[int], Batch],
) -> Attempt:
    """A few steps, or until this rank or a peer dies."""
    torch.set_num_threads(1)
    device_class = cluster.class_named(seat.device.device_class)
    with open_device(device_class, 0) as runtime:
        runtime.reset_peak()
        try:
            with joined(seat):
                system = system_of()
                for step in range(STEPS):
                    system.step(batch(step))
                done = Attempt(runtime.peak_bytes())
                if isinstance(system, OnEngine):
                    done = replace(done, recording=system.recorded_step(batch(STEPS)))
                del system
        except Exception as error:  # the edge of this process: whatever it died of is the result
            lines = str(error).strip().splitlines() or [""]
            return Attempt(runtime.peak_bytes(), f"{type(error).__name__}: {lines[0]}")
        return done
