"""Hand-written plans, to test a model under an uneven split on a CPU.

    plan = plan_for(model, [Share(5, 2, state=1), Share(1, 1, state=3)])

is for two ranks: the first computes 5 of 6 samples, 2 at a time, and stores a quarter of the state.
`gpumix.prepare` and the `plan` of `Trainer` and `Accelerator` accept it; nothing is measured.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch import nn

from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.schema.plan.dtypes import choose_communication_dtype
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import PLAIN, ComputeDtype, Mode, Stage, Worker

__all__ = ["Share", "plan_for"]


class Share(NamedTuple):
    """Part of a plan for one rank.

    Attributes:
        samples: of each global batch; 0 for a rank that only stores.
        micro_batch: the most samples computed at once.
        state: its part of the state, relative to other ranks.
        mode: how it runs micro-batches.
        kept: the number of (call, micro-batch) pairs exempt from activation checkpointing.
        host: its name.
    """

    samples: int
    micro_batch: int
    state: int
    mode: Mode = PLAIN
    kept: int = 0
    host: str = "localhost"


def plan_for(
    model: nn.Module,
    shares: Sequence[Share],
    *,
    calls: Sequence[str] = (),
    units: Sequence[str] = (),
    stage: Mapping[str, Any] | None = None,
    on_host: Collection[int] = (),
    head: Literal["whole", "chunked"] | None = None,
    compute_dtype: ComputeDtype | Sequence[ComputeDtype] = "fp32",
    **settings: Any,
) -> Plan:
    """Make a plan of one stage for `model`, with a share for each rank.

    Args:
        calls: the order of the unit calls; default: the order of registration.
        units: class or module names of the units, as for `gpumix.prepare`; default: found.
        stage: further fields of the stage.
        on_host: ranks with CPU offload of their state.
        head: of all ranks, instead of their modes' head.
        compute_dtype: of all ranks, or of each.
        settings: further fields of the plan, such as `zero_stage`; `sequence_length` is 1 if not
            given, which has no effect. With `parameters_on="host"` all ranks are in `on_host`.

    Raises:
        InputError: no units were found.
        ValueError: the shares make no plan.
    """
    anatomy = split_into_units(model, units)
    if isinstance(compute_dtype, str):
        compute_dtype = [compute_dtype] * len(shares)
    settings.setdefault("sequence_length", 1)
    settings.setdefault("communication_dtype", choose_communication_dtype(compute_dtype))
    by_host = settings.get("sharding") == "host"
    if settings.get("parameters_on") == "host":
        on_host = range(len(shares))
    workers = tuple(
        Worker(
            device=f"d{rank}",
            device_class="cpu",
            samples=share.samples,
            micro_batch=share.micro_batch,
            state_share=share.state
            / sum(s.state for s in shares if s.host == share.host or not by_host),
            mode=share.mode.model_copy(update={"head": head}) if head else share.mode,
            kept_graphs=share.kept,
            host=share.host,
            state_on="host" if rank in on_host else "device",
            compute_dtype=compute_dtype[rank],
        )
        for rank, share in enumerate(shares)
    )
    names = tuple(calls) or tuple(unit.name for unit in anatomy.units)
    return Plan(
        strategy="by hand",
        model=anatomy.fingerprint(),
        global_batch=sum(share.samples for share in shares),
        stages=(Stage(units=names, workers=workers, **(stage or {})),),
        **settings,
    )
