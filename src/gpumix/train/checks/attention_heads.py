"""Checks of tensor-parallel groups against the heads of a job's model.

The checks run before ranks start if the job has the model's configuration. A model from a factory
is known only to ranks: they check before they measure or train.
"""

from __future__ import annotations

from typing import Any

from gpumix.engine.tensor_parallel.parallelize import check_heads
from gpumix.schema.cluster.cluster import Cluster
from gpumix.schema.errors import InputError
from gpumix.schema.job.job import Job
from gpumix.schema.job.search_space import Space
from gpumix.schema.job.tensor_parallel_degrees import check_degrees_fit, get_allowed_degrees
from gpumix.schema.plan.plan import Plan
from gpumix.schema.reading.error_location import locate_errors
from gpumix.train.rank_setup.model import make_config


def check_plan_heads(plan: Plan, job: Job) -> None:
    """Refuse a plan with a tensor-parallel group unable to divide the heads.

    Raises:
        InputError: naming its stage.
    """
    if job.model.config is None:
        return
    config = make_config(job.model)
    for number, stage in enumerate(plan.stages, 1):
        with locate_errors(f"stage {number}"):
            check_heads(config, stage.tensor)


def check_job_heads(job: Job, cluster: Cluster) -> None:
    """Refuse a job wanting tensor parallelism if no degree can divide the heads.

    Raises:
        InputError: no degree divides the heads, or no host has enough devices for a group.
    """
    check_degrees_fit(cluster, job.space)
    if job.model.config is not None:
        check_config_heads(make_config(job.model), cluster, job.space)


def check_config_heads(config: Any, cluster: Cluster, techniques: Space) -> None:
    """Refuse a model configuration if no tensor-parallel degree can divide the heads.

    Raises:
        InputError: the error of the smallest degree.
    """
    every = get_allowed_degrees(cluster, techniques).values()
    failures: list[InputError] = []
    for degree in sorted({degree for degrees in every for degree in degrees}):
        try:
            check_heads(config, degree)
        except InputError as error:
            failures.append(error)
        else:
            return
    raise failures[0]
