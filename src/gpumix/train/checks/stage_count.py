"""Check of the number of stages wanted by a job.

Done before ranks start if the job has the model's configuration. Models of factories are built by
ranks only, and checked there before measuring.
"""

from __future__ import annotations

from gpumix.engine.sharding.unit_discovery import ModelUnits
from gpumix.planner.common.stage_preconditions import (
    check_stage_count,
    needs_several_stages,
    refuse_one_unit,
)
from gpumix.planner.pipeline_parallel.candidate import get_stages_per_group
from gpumix.schema.cluster.cluster import Cluster
from gpumix.schema.job.job import Job


def check_job_stage_count(anatomy: ModelUnits, job: Job, cluster: Cluster) -> None:
    """Refuse a job wanting more stages than the model's units or the devices allow.

    Measuring may leave fewer, if calls of units cannot be separated.

    Raises:
        InputError: too many stages are wanted.
    """
    space = job.space
    if not needs_several_stages(job.strategy, space):
        return
    units = len(anatomy.units)
    refuse_one_unit(units)
    if job.strategy == "model":
        return
    degree = min(space.tensor_parallel_size)
    check_stage_count(
        space,
        most_groups=len(cluster.devices) // degree,
        units=units,
        rounds=max(map(get_stages_per_group, space.pipeline_schedules)),
        degree=degree,
    )
