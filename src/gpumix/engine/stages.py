"""What a stage has of a model, and who divides it."""

from __future__ import annotations

import torch

from gpumix.engine.comm import Communicator
from gpumix.engine.division import Division
from gpumix.engine.elsewhere import Elsewhere
from gpumix.engine.parts import Shared
from gpumix.engine.units import Anatomy, Unit
from gpumix.spec.plan import Plan, Stage


def part_of(
    anatomy: Anatomy, stage: Stage, device: torch.device, dtype: torch.dtype
) -> tuple[Anatomy, Elsewhere]:
    """The units and root parameters of a stage; in the model's modules stand-ins take the places of
    all others."""
    own, root = set(stage.units), anatomy.root
    foreign = [unit for unit in anatomy.units if unit.name not in own]
    used = set(stage.root or ())
    elsewhere = Elsewhere(foreign, device, dtype)
    elsewhere.install([slot for slot in root.slots if slot.name not in used])
    slots = tuple(slot for slot in root.slots if slot.name in used)
    units = tuple(unit for unit in anatomy.units if unit.name in own)
    return Anatomy(units, Unit(root.name, root.module, root.kind, slots)), elsewhere


def divided(plan: Plan, comm: Communicator) -> tuple[Division, list[Shared]]:
    """How this rank's stage divides its state, and what it has together with other stages.
    Collective: it makes process groups."""
    users: dict[str, list[int]] = {}
    for number, stage in enumerate(plan.stages):
        for name in stage.root or ():
            users.setdefault(name, []).append(number)
    together: dict[tuple[int, ...], list[str]] = {}
    for name, stages in users.items():
        if len(stages) > 1:
            together.setdefault(tuple(stages), []).append(name)
    alone = [(number,) for number in range(len(plan.stages))]
    divisions = Division.of_stages(plan, comm, [*alone, *together])
    own = next(d for d in divisions[: len(alone)] if d is not None)
    shared = [
        Shared(tuple(names), division)
        for names, division in zip(together.values(), divisions[len(alone) :])
        if division is not None
    ]
    return own, shared
