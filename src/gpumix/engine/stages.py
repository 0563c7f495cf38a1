"""What a rank's stages have of a model, and who divides it."""

from __future__ import annotations

from dataclasses import dataclass

from gpumix.engine.comm import Communicator
from gpumix.engine.division import Division
from gpumix.engine.elsewhere import Elsewhere
from gpumix.engine.parts import Storage
from gpumix.engine.units import Anatomy, Unit
from gpumix.spec.plan import Plan, Stage, of_several


@dataclass(frozen=True)
class Shared:
    """Parameters of the root that several stages have, and who divides them."""

    names: tuple[str, ...]
    division: Division


@dataclass(frozen=True)
class Divided:
    """How a plan's state is divided, as far as this rank has a part of it: of each of its stages
    what is that stage's alone, and what several stages have together."""

    alone: dict[int, Division]
    shared: tuple[Shared, ...]


def divided(plan: Plan, comm: Communicator) -> Divided:
    """Of the stages of a plan. Collective: it makes process groups."""
    together = of_several([stage.root or () for stage in plan.stages])
    each = [(number,) for number in range(len(plan.stages))]
    divisions = Division.of_stages(plan, comm, [*each, *together])
    alone = {number: d for (number,), d in zip(each, divisions) if d is not None}
    shared = zip(together.values(), divisions[len(each) :])
    return Divided(alone, tuple(Shared(tuple(n), d) for n, d in shared if d is not None))


def part_of(anatomy: Anatomy, stage: Stage, divided: Divided) -> Anatomy:
    """The units of a stage, and those parameters of the root that are the stage's alone."""
    shared = {name for one in divided.shared for name in one.names}
    used = set(stage.root or ()) - shared
    root = anatomy.root
    slots = tuple(slot for slot in root.slots if slot.name in used)
    units = tuple(unit for unit in anatomy.units if unit.name in stage.units)
    return Anatomy(units, Unit(root.name, root.module, root.kind, slots))


def stand_ins(anatomy: Anatomy, plan: Plan, rank: int, storage: Storage) -> Elsewhere:
    """What a rank has in the places of what its stages lack."""
    own = [plan.stages[number] for number in plan.stages_of(rank)]
    units = {name for stage in own for name in stage.units}
    used = {name for stage in own for name in stage.root or ()}
    elsewhere = Elsewhere(anatomy, storage.device, storage.dtypes.compute)
    elsewhere.install([s for unit in anatomy.units if unit.name not in units for s in unit.slots])
    elsewhere.install([slot for slot in anatomy.root.slots if slot.name not in used])
    return elsewhere
