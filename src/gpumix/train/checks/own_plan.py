"""A run's own plan, for a resumed run whose measurements are no longer in the cache.

It holds if the job and the devices are those of the last start. Imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpumix.profiler.cache.measurement_cache import model_hash
from gpumix.schema.cluster.cluster import Cluster
from gpumix.schema.errors import InputError
from gpumix.schema.job.job import Job
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile
from gpumix.train.checks.user_plan import limit_profile_memory
from gpumix.train.run_log import run_files
from gpumix.train.run_manifest import RunRecord

_OF_LENGTH = {"max_steps"}  # keys without influence on measurements and plans


def load_own_plan(job: Job, folder: Path, cluster: Cluster) -> tuple[Plan, Profile] | None:
    """Return the plan and profile of the last start of a job; None unless both still hold."""
    output = job.output_dir
    try:
        record = RunRecord.load(output / run_files.RUN)
        plan = Plan.load(output / run_files.PLAN)
        profile = Profile.load(output / run_files.PROFILE)
    except InputError:  # not there, or of another version
        return None
    before = {key: value for key, value in record.job.items() if key not in _OF_LENGTH}
    same = (
        before == job.model_dump(mode="json", exclude=_OF_LENGTH)
        and profile.job_model == model_hash(job, folder)
        and profile.model.fingerprint == plan.model
        and _list_devices(profile.cluster) == _list_devices(cluster)
        and limit_profile_memory(profile, cluster) is profile
    )
    return (plan, profile) if same else None


def _list_devices(cluster: Cluster) -> tuple[Any, ...]:
    """Return devices and GPU types to compare, without free memory and found links."""
    devices = sorted((d.id, d.host, d.device_class) for d in cluster.devices)
    types = {c.name: c.model_dump(exclude={"memory_bytes"}) for c in cluster.classes}
    return devices, types
