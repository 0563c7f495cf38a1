"""Sailor's measured runs of OPT-350M, as plans.

They ran on an engine after Megatron and DeepSpeed: all state replicated over data parallelism
(ZeRO 0), graphs kept, micro-batches of one size one after the other, then gradients are reduced and
only then the optimizer steps. So nothing hides anything: a contention of 1. Pipelines take turns as
in `published/deepspeed.py`; a plan of ours with the schedule 1F1B holds as many micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from gpumix.schema.cluster.cluster import Device
from gpumix.schema.plan.plan import Collectives, Plan
from gpumix.schema.plan.stage import Mode, Stage, Worker
from gpumix.schema.profile.profile import Profile
from published import DATA, NotHereError, read
from published.deepspeed import DeepSpeedStep
from published.sailor import HEAD, Group, Setup, profile
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
class Part:
    """One stage of a run: its groups, each of one device, and how many blocks they compute."""

    groups: tuple[Group, ...]
    blocks: int


@dataclass(frozen=True)
class Run:
    """One measured run: what ran, and what was measured."""

    name: str
    parts: tuple[Part, ...]
    micro_batch: int
    global_batch: int
    step_s: float
    reduce_s: float
    peak_bytes: int  # of one GPU, the fullest

    @property
    def groups(self) -> tuple[Group, ...]:
        """Of all stages, in the order of the run."""
        return tuple(group for part in self.parts for group in part.groups)

    @property
    def degree(self) -> int:
        return self.groups[0].degree

    def profile(self) -> Profile:
        return profile(list(self.groups), SETUP, network(self.groups))

    def plan(self, of: Profile) -> Plan:
        """What ran, on the devices of its profile."""
        devices, stages, begin = iter(of.cluster.devices), [], 0
        for part in self.parts:
            end = begin + part.blocks
            needs = of.model.needs_of(begin, end)
            workers = tuple(
                self._worker(device, len(part.groups))
                for device in islice(devices, len(part.groups))
            )
            units = of.model.calls[begin:end]
            if len(self.parts) == 1:
                stages.append(Stage(units=units, workers=workers))
            else:
                stages.append(
                    Stage(units=units, workers=workers, takes=needs.outputs, root=needs.root)
                )
            begin = end
        return Plan(
            strategy="measured",
            model=of.model.fingerprint,
            sequence_length=of.sequence_length,
            global_batch=self.global_batch,
            stages=tuple(stages),
            zero_stage=0,
            collectives=NAMED,
        )

    def _worker(self, device: Device, beside: int) -> Worker:
        each = self.global_batch // beside
        return Worker(
            device=device.id,
            device_class=device.device_class,
            host=device.host,
            samples=each,
            micro_batch=min(self.micro_batch, each),
            state_share=1 / beside,
            mode=MODE,
        )

    def step(self, of: Profile, *, moved: bool = True) -> DeepSpeedStep:
        """One step of its pipelines; `moved`: whether communication takes time."""
        return DeepSpeedStep(of, self.plan(of), moved=moved)


def runs() -> Iterator[Run]:
    """All measured runs, by name.

    Raises:
        NotHereError: the folder is not on this machine.
    """
    folder = DATA / "sailor" / "measured"
    if not folder.exists():
        raise NotHereError(f"skipped: the published measurements are not here ({folder})")
    for file in sorted(folder.rglob("*.json")):
        found = read(str(file.relative_to(DATA)))
        yield _run(f"{file.parent.name}/{file.stem.removeprefix('plan_config_')}", found)


def _run(name: str, found: dict[str, Any]) -> Run:
    (pipelines,) = found["pipeline_list"]
    parts = []
    for groups, layers in zip(pipelines["tmp_per_stage"], pipelines["layers_per_stage"]):
        blocks = sum(0 < layer < HEAD for layer in layers)
        parts.append(Part(tuple(Group(gpus[0][0], n, 1) for gpus, n in groups), blocks))
    return Run(
        name=name,
        parts=tuple(parts),
        micro_batch=found["mbs"],
        global_batch=found["gbs"],
        step_s=found["real"],
        reduce_s=found["red_grads"],
        peak_bytes=found["max_mem"],
    )
