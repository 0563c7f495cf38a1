"""The plan of the run that a program goes on with."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from transformers.trainer_utils import get_last_checkpoint

from gpumix.engine.groups import all_ranks, device_of_group
from gpumix.engine.units import dissect
from gpumix.integrations.gathering import all_texts
from gpumix.profiler.library import cluster_of_ranks
from gpumix.spec.errors import InputError
from gpumix.spec.plan import Plan
from gpumix.spec.profile import Profile
from gpumix.train import run_files


def run_of(resumed: str | bool | None, output: str) -> Path | None:
    """The folder of gpumix's files of the run that a trainer goes on with.

    Args:
        resumed: a checkpoint, or True for the last one in `output`.
    """
    if resumed is True:
        resumed = get_last_checkpoint(output) if Path(output).is_dir() else None
    return Path(resumed).parent / run_files.OF_SCRIPT if resumed else None


def earlier_plan(folder: Path | None, model: nn.Module, *, global_batch: int) -> Plan | None:
    """The plan that a run has left in its folder; None unless it is for the model, for steps of
    `global_batch` samples, and for the devices of all ranks. Collective: the first rank reads it.
    """
    if folder is None:
        return None
    comm = all_ranks(device_of_group())
    cluster, text = cluster_of_ranks(), ""
    if comm.rank == 0:
        try:
            plan = Plan.load(folder / run_files.PLAN)
            profile = Profile.load(folder / run_files.PROFILE)
        except InputError:
            plan = None
        if (
            plan is not None
            and (plan.global_batch, plan.model) == (global_batch, dissect(model).fingerprint())
            and profile.cluster == cluster
        ):
            text = plan.model_dump_json()
    text = all_texts(text, comm, "exchange of the earlier plan")[0]
    return Plan.model_validate_json(text) if text else None
