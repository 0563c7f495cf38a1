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
from gpumix.schema.job.tensor_parallel_degrees import degrees_of, refuse_too_large
from gpumix.schema.plan.plan import Plan
from gpumix.schema.reading.error_location import placed
from gpumix.train.worker.model import config_of


def check_plan(plan: Plan, job: Job) -> None:
    """Refuse a plan with a tensor-parallel group unable to divide the heads.

    Raises:
        InputError: naming its stage.
    """
    if job.model.config is None:
        return
    config = config_of(job.model)
    for number, stage in enumerate(plan.stages, 1):
        with placed(f"stage {number}"):
            check_heads(config, stage.tensor)


def check_job(job: Job, cluster: Cluster) -> None:
    """Refuse a job wanting tensor parallelism if no degree can divide the heads.

    Raises:
        InputError: no degree divides the heads, or no host has enough devices for a group.
    """
    refuse_too_large(cluster, job.techniques)
    if job.model.config is not None:
        check_techniques(config_of(job.model), cluster, job.techniques)


def check_techniques(config: Any, cluster: Cluster, techniques: Space) -> None:
    """Refuse a model configuration if no tensor-parallel degree can divide the heads.

    Raises:
        InputError: the error of the smallest degree.
    """
    every = degrees_of(cluster, techniques).values()
    failures: list[InputError] = []
    for degree in sorted({degree for degrees in every for degree in degrees}):
        try:
            check_heads(config, degree)
        except InputError as error:
            failures.append(error)
        else:
            return
    raise failures[0]
