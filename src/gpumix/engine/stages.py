"""What a rank's stages have of a model, and who divides it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpumix.engine.comm import Communicator
from gpumix.engine.division import Division
from gpumix.engine.elsewhere import Elsewhere
from gpumix.engine.parts import Storage
from gpumix.engine.tensor import Changes, Part, all_of
from gpumix.engine.units import Anatomy, Unit
from gpumix.spec.plan import Plan
from gpumix.spec.stage import Stage, of_several


@dataclass(frozen=True)
class Shared:
    """Parameters of the root that several stages have, and who divides them."""

    names: tuple[str, ...]
    division: Division


@dataclass(frozen=True)
class Divisions:
    """How a plan's state is divided, as far as this rank has a part of it: of each of its stages
    what is that stage's alone, and what several stages have together."""

    alone: dict[int, Division]
    shared: tuple[Shared, ...]


def divisions(plan: Plan, comm: Communicator, teams: Mapping[int, Communicator]) -> Divisions:
    """Of the stages of a plan. Collective: it makes process groups.

    Args:
        teams: of this rank's stages, who computes together.
    """
    alone = {
        number: division
        for number in range(len(plan.stages))
        if (division := Division.of_stage(plan, comm, number, teams.get(number))) is not None
    }
    shared = [
        Shared(tuple(names), division)
        for stages, names in of_several([stage.root or () for stage in plan.stages]).items()
        if (division := Division.of_stages(plan, comm, stages)) is not None
    ]
    return Divisions(alone, tuple(shared))


def teams_of(plan: Plan, comm: Communicator) -> dict[int, Communicator]:
    """By stage whose units are divided, who computes them together with this rank. Collective: it
    makes process groups."""
    found = {}
    for number, stage in enumerate(plan.stages):
        for ranks in plan.teams_of(number) if stage.tensor > 1 else ():
            team = comm.among(ranks)
            if team is not None:
                found[number] = team
    return found


def part_of(anatomy: Anatomy, stage: Stage, divisions: Divisions) -> Anatomy:
    """The units of a stage, and those parameters of the root that are the stage's alone."""
    shared = {name for one in divisions.shared for name in one.names}
    used = set(stage.root or ()) - shared
    root = anatomy.root
    slots = tuple(slot for slot in root.slots if slot.name in used)
    units = tuple(unit for unit in anatomy.units if unit.name in stage.units)
    return Anatomy(units, Unit(root.name, root.module, root.kind, slots))


def own_parts(anatomy: Anatomy, plan: Plan, rank: int) -> Part:
    """What a rank's stages have of a model."""
    if len(plan.stages) == 1:
        return all_of(anatomy)
    own = [plan.stages[number] for number in plan.stages_of(rank)]
    together = of_several([stage.root or () for stage in plan.stages]).values()
    shared = {name for names in together for name in names}
    used = {name for stage in own for name in stage.root or ()}
    units = frozenset(name for stage in own for name in stage.units)
    return Part(units, frozenset(used - shared))


def stand_ins(
    anatomy: Anatomy, changes: Changes, plan: Plan, rank: int, storage: Storage
) -> Elsewhere:
    """What a rank has in the places of what its stages lack."""
    own = [plan.stages[number] for number in plan.stages_of(rank)]
    units = {name for stage in own for name in stage.units}
    used = {name for stage in own for name in stage.root or ()}
    with changes.undone():
        elsewhere = Elsewhere(anatomy, storage.device, storage.dtypes.compute, changes.undone)
    elsewhere.install([s for unit in anatomy.units if unit.name not in units for s in unit.slots])
    elsewhere.install([slot for slot in anatomy.root.slots if slot.name not in used])
    return elsewhere
