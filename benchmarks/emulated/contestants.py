"""What is measured on emulated devices: a system with its part of the batch for each rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

import gpumix
from compared.systems import Fsdp
from emulated.setting import SEED, Setting
from emulated.systems import Batch, Gpumix, System
from emulated.ways import Way
from gpumix.hardware.device import DeviceRuntime
from gpumix.schema.plan.plan import Plan

Start = Callable[[DeviceRuntime], System]
"""Makes the system on the open device of this rank."""


@dataclass(frozen=True)
class OnTorch:
    """A loop with torch's own means. `samples`: by rank."""

    name: str
    samples: tuple[int, ...]
    way: Way

    def batch(self, setting: Setting, step: int, rank: int) -> Batch:
        """The part of `rank` in a step."""
        return setting.batch(step, self.samples, rank)

    def start(self, setting: Setting) -> Start:
        """FSDP2's whole model is made before the device is open, so that it is in nobody's memory:
        one can also shard a model that is read piece by piece."""
        if isinstance(self.way.form, Fsdp):
            whole = self.way.model(setting)
            return lambda runtime: self.way.system(whole, setting, runtime)
        return lambda runtime: self.way.system(self.way.model(setting), setting, runtime)


@dataclass(frozen=True)
class ByPlan:
    """gpumix by a plan. `deferred`: no rank ever holds the whole model, whose weights are then not
    those of the other systems."""

    name: str
    plan: Plan
    deferred: bool = False

    def batch(self, setting: Setting, step: int, rank: int) -> Batch:
        """The part of `rank` in a step; ranks of a tensor-parallel group, and stages, have the
        same samples."""
        first = step * setting.global_batch
        rows = self.plan.rows_of(rank) or (range(0),)
        parts = [setting.rows(first + part.start, len(part)) for part in rows]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def start(self, setting: Setting) -> Start:
        if self.deferred:
            return lambda runtime: Gpumix(gpumix.build(setting.build, SEED), self.plan)
        return lambda runtime: Gpumix(setting.build(), self.plan)


Contestant = OnTorch | ByPlan
