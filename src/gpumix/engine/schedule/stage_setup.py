"""Parts of a model on a rank's stages, and the shard layouts of their state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpumix.engine.comm.communicator import Communicator
from gpumix.engine.schedule.remote_stage_values import RemoteStages
from gpumix.engine.sharding.shard_layout import ShardLayout
from gpumix.engine.sharding.unit_discovery import ModelUnits, Unit
from gpumix.engine.tensor_parallel.parallelize import ModelPart, ModuleChanges, select_whole_model
from gpumix.engine.unit.sharded_units import Storage
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Stage, group_shared_names


@dataclass(frozen=True)
class SharedRoots:
    """Root parameters shared by several stages, with their shard layout."""

    names: tuple[str, ...]
    layout: ShardLayout


@dataclass(frozen=True)
class StageShardLayouts:
    """Shard layouts of the state of which this rank has a part: for each of its stages, the state
    of the stage alone, and state shared by several stages."""

    alone: dict[int, ShardLayout]
    shared: tuple[SharedRoots, ...]


def make_stage_shard_layouts(
    plan: Plan, comm: Communicator, tp_groups: Mapping[int, Communicator]
) -> StageShardLayouts:
    """Return the shard layouts of a plan's stages. Collective: makes process groups.

    Args:
        tp_groups: tensor-parallel group of this rank, by stage.
    """
    alone = {
        number: layout
        for number in range(len(plan.stages))
        if (layout := ShardLayout.of_stage(plan, comm, number, tp_groups.get(number))) is not None
    }
    shared = [
        SharedRoots(tuple(names), layout)
        for stages, names in group_shared_names([stage.root or () for stage in plan.stages]).items()
        if (layout := ShardLayout.of_stages(plan, comm, stages)) is not None
    ]
    return StageShardLayouts(alone, tuple(shared))


def make_tensor_parallel_groups(plan: Plan, comm: Communicator) -> dict[int, Communicator]:
    """Return this rank's tensor-parallel group, by stage with divided units. Collective: makes
    process groups."""
    found = {}
    for number, stage in enumerate(plan.stages):
        for ranks in plan.list_tp_groups(number) if stage.tensor > 1 else ():
            tp_group = comm.among(ranks)
            if tp_group is not None:
                found[number] = tp_group
    return found


def select_stage_part(anatomy: ModelUnits, stage: Stage, layouts: StageShardLayouts) -> ModelUnits:
    """Return the units of a stage, and the root parameters that belong to the stage alone."""
    shared = {name for one in layouts.shared for name in one.names}
    used = set(stage.root or ()) - shared
    root = anatomy.root
    slots = tuple(slot for slot in root.slots if slot.name in used)
    units = tuple(unit for unit in anatomy.units if unit.name in stage.units)
    return ModelUnits(units, Unit(root.name, root.module, root.kind, slots))


def select_rank_part(anatomy: ModelUnits, plan: Plan, rank: int) -> ModelPart:
    """Return the units and the unshared root parameters of a rank's stages."""
    if len(plan.stages) == 1:
        return select_whole_model(anatomy)
    own = [plan.stages[number] for number in plan.stages_of(rank)]
    together = group_shared_names([stage.root or () for stage in plan.stages]).values()
    shared = {name for names in together for name in names}
    used = {name for stage in own for name in stage.root or ()}
    units = frozenset(name for stage in own for name in stage.units)
    return ModelPart(units, frozenset(used - shared))


def install_placeholders(
    anatomy: ModelUnits, changes: ModuleChanges, plan: Plan, rank: int, storage: Storage
) -> RemoteStages:
    """Install stand-ins for units and root parameters that a rank's stages lack."""
    own = [plan.stages[number] for number in plan.stages_of(rank)]
    units = {name for stage in own for name in stage.units}
    used = {name for stage in own for name in stage.root or ()}
    with changes.undo_temporarily():
        elsewhere = RemoteStages(
            anatomy, storage.device, storage.dtypes.compute, changes.undo_temporarily
        )
    elsewhere.install([s for unit in anatomy.units if unit.name not in units for s in unit.slots])
    elsewhere.install([slot for slot in anatomy.root.slots if slot.name not in used])
    return elsewhere
