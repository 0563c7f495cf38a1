"""Sailor's measured runs of OPT-350M, as plans: those whose pipelines have one stage.

They ran on an engine after Megatron and DeepSpeed: all state replicated over data parallelism
(ZeRO 0), graphs kept, micro-batches of one size one after the other, then gradients are reduced and
only then the optimizer steps. So nothing hides anything: a contention of 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpumix.spec.plan import Collectives, Mode, Plan, Stage, Worker
from gpumix.spec.profile import Profile
from published import DATA, NotHereError, read
from published.sailor import Group, Setup, profile
from published.sailor_links import network

# DeepSpeed holds two more fp32 copies of the parameters beside Adam's moments: the bucket that
# gradients are reduced from, and the flat copy that it starts from. 24 bytes a parameter in all.
OPTIMIZER_BYTES = 16

# Measured memory is what nvidia-smi shows: CUDA's context, loaded and fused kernels, workspaces,
# NCCL's buffers and what the allocator holds without need are in it. Published planners set 2 to
# 5 GB aside for that; a prediction that must not be too low takes the upper end.
FRAMEWORK_BYTES = 5_000_000_000

SETUP = Setup(framework_bytes=FRAMEWORK_BYTES, optimizer_bytes=OPTIMIZER_BYTES, contention=1.0)
MODE = Mode(recompute=False, order="sequential")
NAMED = Collectives(gather="padded", reduce="padded")


@dataclass(frozen=True)
class Run:
    """One measured run: what ran, and what was measured."""

    name: str
    groups: tuple[Group, ...]  # of one device each, in the order of the run
    micro_batch: int
    global_batch: int
    step_s: float
    reduce_s: float
    peak_bytes: int  # of one GPU, the fullest

    @property
    def degree(self) -> int:
        return self.groups[0].degree

    def profile(self) -> Profile:
        return profile(list(self.groups), SETUP, network(self.groups))

    def plan(self, of: Profile) -> Plan:
        """What ran, on the devices of its profile."""
        count = len(self.groups)
        each = self.global_batch // count
        workers = tuple(
            Worker(
                device=device.id,
                device_class=device.device_class,
                host=device.host,
                samples=each,
                micro_batch=min(self.micro_batch, each),
                state_share=1 / count,
                mode=MODE,
            )
            for device in of.cluster.devices
        )
        return Plan(
            strategy="measured",
            model=of.model.fingerprint,
            sequence_length=of.sequence_length,
            global_batch=self.global_batch,
            stages=(Stage(units=of.model.calls, workers=workers),),
            zero_stage=0,
            collectives=NAMED,
        )


def runs() -> Iterator[Run]:
    """The measured runs that a plan of one stage can express, by name.

    Raises:
        NotHereError: the folder is not on this machine.
    """
    folder = DATA / "sailor" / "measured"
    if not folder.exists():
        raise NotHereError(f"skipped: the published measurements are not here ({folder})")
    for file in sorted(folder.rglob("*.json")):
        found = read(str(file.relative_to(DATA)))
        run = _run(f"{file.parent.name}/{file.stem.removeprefix('plan_config_')}", found)
        if run is not None:
            yield run


def _run(name: str, found: dict[str, Any]) -> Run | None:
    """None for a pipeline of several stages, and for replicas of unlike width."""
    pipelines = found["pipeline_list"]
    if len(pipelines) != 1 or pipelines[0]["num_stages"] != 1:
        return None
    (stage,) = pipelines[0]["tmp_per_stage"]
    groups = tuple(Group(machines[0][0], degree, 1) for machines, degree in stage)
    if len({group.degree for group in groups}) > 1 or found["gbs"] % len(groups):
        return None
    return Run(
        name=name,
        groups=groups,
        micro_batch=found["mbs"],
        global_batch=found["gbs"],
        step_s=found["real"],
        reduce_s=found["red_grads"],
        peak_bytes=found["max_mem"],
    )
