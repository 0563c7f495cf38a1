"""Inventory of all parameters of a model, on any rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from gpumix.engine.quantised.quantised_parameter import QuantisedParameter, WeightFormat
from gpumix.engine.sharding.mixed_precision import TORCH_DTYPE
from gpumix.engine.sharding.unit_discovery import ModelUnits
from gpumix.schema.plan.plan import Plan


@dataclass(frozen=True)
class Stored:
    """A parameter: shape, stored and original dtype, whether trained, the first rank that stores a
    part, and the format if it is packed."""

    shape: torch.Size
    dtype: torch.dtype
    given_dtype: torch.dtype
    trained: bool
    rank: int
    format: WeightFormat | None = None


@dataclass(frozen=True)
class ParameterIndex:
    """Parameters and units of an unsharded model.

    Attributes:
        names: from every name of a parameter in the model to the name of its piece.
        parameters: by the piece's name.
        unit_names: of all units, on any rank.
    """

    names: Mapping[str, str]
    parameters: Mapping[str, Stored]
    unit_names: Sequence[str]
    _stages: Mapping[str, int]
    _plan: Plan

    @classmethod
    def of(cls, model: nn.Module, anatomy: ModelUnits, plan: Plan) -> ParameterIndex:
        """Make the inventory, before parameters are replaced by views of buffers."""
        own = {id(s.original): s.name for unit in anatomy.all for s in unit.slots}
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
                form = old.format if isinstance(old, QuantisedParameter) else None
                parameters[slot.name] = Stored(
                    old.shape, dtype, old.dtype, old.requires_grad, rank, form
                )
        names = {n: own[id(p)] for n, p in model.named_parameters(remove_duplicate=False)}
        units = [unit.name for unit in anatomy.units]
        return cls(names, parameters, units, stages, plan)

    def find_format(self, name: str) -> WeightFormat | None:
        """Return the format of a packed parameter, by any name; None for other names."""
        own = self.names.get(name)
        return None if own is None else self.parameters[own].format

    @cached_property
    def packed_names(self) -> frozenset[str]:
        """Names of the pieces of packed parameters."""
        return frozenset(n for n, one in self.parameters.items() if one.format is not None)

    @property
    def is_single_stage(self) -> bool:
        """True if every rank has a part of every parameter."""
        return len(self._plan.stages) == 1

    @cached_property
    def trains(self) -> bool:
        """True if any parameter is trained, on any rank."""
        return any(stored.trained for stored in self.parameters.values())

    def find_training_rank(self, module: str) -> int:
        """Return the first training rank of the stage that computes a module; of the first stage
        for modules outside of units."""
        stage = next((s for u, s in self._stages.items() if f"{module}.".startswith(f"{u}.")), 0)
        workers = zip(self._plan.ranks_of(stage), self._plan.stages[stage].workers)
        return next(rank for rank, worker in workers if worker.samples)
