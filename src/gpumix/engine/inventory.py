"""All parameters of a model, whoever stores them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from gpumix.engine.precision import TORCH_DTYPE
from gpumix.engine.units import Anatomy
from gpumix.spec.plan import Plan


@dataclass(frozen=True)
class Stored:
    """A parameter: its shape, the dtype in which it is stored and the one in which it was given,
    whether it is trained, and the first rank that has a part of it."""

    shape: torch.Size
    dtype: torch.dtype
    given_dtype: torch.dtype
    trained: bool
    rank: int


@dataclass(frozen=True)
class Inventory:
    """Of an unsharded model.

    Attributes:
        names: every name that a parameter has in the model, and the one that its piece has.
        parameters: by the latter.
        unit_names: of all units, whoever computes them.
    """

    names: Mapping[str, str]
    parameters: Mapping[str, Stored]
    unit_names: Sequence[str]
    _stages: Mapping[str, int]
    _plan: Plan

    @classmethod
    def of(cls, model: nn.Module, anatomy: Anatomy, plan: Plan) -> Inventory:
        """Before parameters are replaced by views of buffers."""
        own = {id(s.parameter): s.name for unit in anatomy.all for s in unit.slots}
        stages = {name: n for n, stage in enumerate(plan.stages) for name in stage.units}
        users: dict[str, int] = {}
        for number in reversed(range(len(plan.stages))):
            users |= dict.fromkeys(plan.stages[number].root or (), number)
        sent = TORCH_DTYPE[plan.communication_dtype]
        parameters = {}
        for unit in anatomy.all:
            for slot in unit.slots:
                stage = stages.get(unit.name, users.get(slot.name, 0))
                old = slot.parameter
                frozen = sent if old.is_floating_point() else old.dtype
                dtype = torch.float32 if old.requires_grad else frozen
                rank = plan.ranks_of(stage)[0]
                parameters[slot.name] = Stored(old.shape, dtype, old.dtype, old.requires_grad, rank)
        names = {n: own[id(p)] for n, p in model.named_parameters(remove_duplicate=False)}
        units = [unit.name for unit in anatomy.units]
        return cls(names, parameters, units, stages, plan)

    @property
    def of_one_stage(self) -> bool:
        """Whether every rank has a part of every parameter."""
        return len(self._plan.stages) == 1

    @cached_property
    def trains(self) -> bool:
        """Whether any parameter is trained, by whatever rank."""
        return any(stored.trained for stored in self.parameters.values())

    def keeper(self, module: str) -> int:
        """The first rank that trains on samples, of the stage that computes a module; of the first
        stage, where no unit has it."""
        stage = next((s for u, s in self._stages.items() if f"{module}.".startswith(f"{u}.")), 0)
        workers = zip(self._plan.ranks_of(stage), self._plan.stages[stage].workers)
        return next(rank for rank, worker in workers if worker.samples)
