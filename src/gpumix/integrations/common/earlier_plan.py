"""The plan of an earlier run that a program resumes."""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn
from transformers.trainer_utils import get_last_checkpoint

from gpumix.engine.comm.process_groups import get_group_device, make_communicator
from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.integrations.common.gather import gather_texts
from gpumix.profiler.api import gather_cluster
from gpumix.schema.cluster.cluster import Cluster
from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile
from gpumix.train.run_log import run_files


def find_resumed_run(resumed: str | bool | None, output: str) -> Path | None:
    """Return the folder of gpumix's files of the run to resume.

    Args:
        resumed: a checkpoint, or True for the last checkpoint in `output`.
    """
    if resumed is True:
        resumed = get_last_checkpoint(output) if Path(output).is_dir() else None
    return Path(resumed).parent / run_files.SCRIPT_FOLDER if resumed else None


def load_earlier_plan(folder: Path | None, model: nn.Module, *, global_batch: int) -> Plan | None:
    """Return the plan in a run's folder if made for the model, for steps of `global_batch` samples
    and for the devices of all ranks; otherwise None. Collective: the first rank reads."""
    if folder is None:
        return None
    comm = make_communicator(get_group_device())
    told = (
        _read_plan_and_cluster(folder, split_into_units(model).fingerprint(), global_batch)
        if comm.rank == 0
        else ""
    )
    found = json.loads(gather_texts(told, comm, "exchange of the earlier plan")[0] or "{}")
    if not found or Cluster.model_validate(found["cluster"]) != gather_cluster():
        return None
    return Plan.model_validate(found["plan"])


def _read_plan_and_cluster(folder: Path, model: str, global_batch: int) -> str:
    """Return a run's plan and cluster as JSON; "" unless the plan is for the model, given by
    fingerprint, and for steps of `global_batch` samples."""
    try:
        plan = Plan.load(folder / run_files.PLAN)
        profile = Profile.load(folder / run_files.PROFILE)
    except InputError:
        return ""
    if (plan.global_batch, plan.model) != (global_batch, model):
        return ""
    return json.dumps(
        {"plan": plan.model_dump(mode="json"), "cluster": profile.cluster.model_dump(mode="json")}
    )
