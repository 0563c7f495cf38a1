"""Whether there can be as many stages as a job wants.

Told before ranks start where the job has the model's configuration. What a factory makes only ranks
build: they look before they measure.
"""

from __future__ import annotations

from torch import nn

from gpumix.engine.units import dissect
from gpumix.planner.no_stages import refuse_number, refuse_one_unit, wants_stages
from gpumix.planner.way import rounds_of
from gpumix.spec.cluster import Cluster
from gpumix.spec.job import Job


def check_number(model: nn.Module, job: Job, cluster: Cluster) -> None:
    """Refuse a job that wants more stages than its model has units, or than its devices can have.

    What is found once units are measured, as calls that none may be cut between, may still leave
    fewer.

    Raises:
        InputError: so it is.
    """
    space = job.techniques
    if not wants_stages(job.strategy, space):
        return
    units = len(dissect(model, job.model.units).units)
    refuse_one_unit(units)
    if job.strategy == "model":
        return
    degree = min(space.tensor)
    refuse_number(
        space,
        most_groups=len(cluster.devices) // degree,
        units=units,
        rounds=max(map(rounds_of, space.schedules)),
        degree=degree,
    )
