"""Sailor's profiles of OPT-350M as a gpumix profile, with memory by the model's architecture.

A tensor-parallel group counts as one device with the memory of all its GPUs, for a worker of
several ranks is a later issue. Times are of 26 layers: embedding, 24 blocks, head. The model is the
one that their engine builds: width 1024 throughout, embedding and head with weights of their own,
fp32, dropout after attention and MLP but none inside attention.

Activations follow Korthikanti et al., "Reducing activation recomputation in large transformer
models" (MLSys 2023), whose table counts s b h (10 + 24/t + 5 a s / (h t)) bytes for a block in fp16
on each of t GPUs. In fp32 the two-byte entries double and the one-byte masks stay, and without
dropout in attention only its softmax is kept: s b h (18 + 48/t + 4 a s / (h t)). That is what a
measured group keeps per sample, to within 5% (see `planner_accuracy.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, median

from gpumix.schema.cluster.cluster import Cluster, Device, DeviceClass
from gpumix.schema.cluster.network import Network
from gpumix.schema.curve import Curve
from gpumix.schema.plan.plan import Collectives
from gpumix.schema.plan.stage import StageInput
from gpumix.schema.profile.profile import (
    ROOT,
    CallInputs,
    ClassProfile,
    ModelProfile,
    Profile,
    RootParameter,
    RootUnit,
    UnitKind,
    UnitTimes,
)
from published import GIB, SAMPLES, read

WIDTH, HEADS, TOKENS, VOCABULARY, BLOCKS = 1024, 16, 2048, 50272, 24
FP32 = 4
HEAD = BLOCKS + 1  # the last of the profiled layers; 0 is the embedding

BLOCK_FLOPS = 24.0 * TOKENS * WIDTH**2 + 4.0 * TOKENS**2 * WIDTH  # of one sample's forward
BLOCK_PARAMETERS = 12 * WIDTH**2 + 13 * WIDTH  # matrices, biases, two norms
BLOCK_SAVED = 16.5 * TOKENS * WIDTH + HEADS * TOKENS**2  # elements of a sample; see above
OF_ROOT = {
    "embedding": (VOCABULARY + TOKENS) * WIDTH, "norm": 2 * WIDTH, "head": VOCABULARY * WIDTH,
}  # fmt: skip
ROOT_PARAMETERS = sum(OF_ROOT.values())
PARAMETERS = BLOCKS * BLOCK_PARAMETERS + ROOT_PARAMETERS

ONE_OUTPUT = FP32 * TOKENS * WIDTH  # of one block and sample, on each GPU of a group
SCORES = FP32 * HEADS * TOKENS**2  # attention scores of one sample, all heads
LOGITS = FP32 * TOKENS * VOCABULARY
LOGITS_HELD = 3  # themselves, the softmax that the loss keeps, and their gradient

GPU_MEMORY_GIB = {
    "A100-40": 40, "V100-16": 16, "GH-96": 96, "RTX-3090": 24, "RTX-2080": 11, "Titan-RTX": 24,
}  # fmt: skip
HOST_GPUS = {
    "A100-40": 4, "V100-16": 4, "GH-96": 4, "RTX-3090": 8, "RTX-2080": 8, "Titan-RTX": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Group:
    """So many devices, each of `degree` GPUs of one type that divide every layer."""

    gpu: str
    degree: int
    count: int

    @property
    def name(self) -> str:
        return self.gpu if self.degree == 1 else f"{self.gpu}.x{self.degree}"


@dataclass(frozen=True)
class Setup:
    """What is not measured: what an engine keeps, and whether it hides its collectives."""

    framework_bytes: int  # of one GPU, before any tensor
    optimizer_bytes: int = 8  # of one parameter, beside itself and its gradient; Adam's moments
    contention: float = 0.0


def profile(
    groups: list[Group], setup: Setup, network: Network | None, *, blocks_a_unit: int = 1
) -> Profile:
    """OPT-350M on these groups, in hosts of as many GPUs as each type has there.

    A group of few GPUs is taken to keep what the widest one keeps beside its division.
    """
    return Profile(
        sequence_length=TOKENS,
        optimizer_bytes_per_element=setup.optimizer_bytes,
        torch_version="published",
        cluster=_cluster(groups, network),
        model=model(max(group.degree for group in groups), blocks_a_unit),
        classes=tuple(_class(group, setup, blocks_a_unit) for group in _kinds(groups)),
        collectives=Collectives(gather="list", reduce="list"),
        contention=setup.contention,
    )


def model(degree: int, blocks_a_unit: int = 1) -> ModelProfile:
    """OPT-350M; a group of `degree` GPUs holds what is not divided that many times.

    Scores, their softmax and the gradients of both exist for one block at a time.
    """
    units = BLOCKS // blocks_a_unit
    saved = blocks_a_unit * saved_bytes(degree)
    block = UnitKind(
        name="block",
        trainable=blocks_a_unit * BLOCK_PARAMETERS,
        kept=_line(degree * ONE_OUTPUT),
        saved=_line(saved),
        saved_forward=_line(SCORES),  # as they go into their softmax
        saved_backward=_line(2 * SCORES + 2 * degree * ONE_OUTPUT),
        gradient=_line(degree * ONE_OUTPUT),
        forward=_line(2 * SCORES + 6 * degree * ONE_OUTPUT),  # and q, k, v, and so on
        backward=_line(saved + 2 * SCORES + 2 * degree * ONE_OUTPUT),
        outputs={0: _line(ONE_OUTPUT)},  # a group sends it once, each GPU its part
    )
    root = RootUnit(
        trainable=ROOT_PARAMETERS,
        parameters=tuple(RootParameter(name=n, trainable=size) for n, size in OF_ROOT.items()),
        kept=_line(degree * ONE_OUTPUT),
        head=_line(LOGITS_HELD * LOGITS + 2 * degree * ONE_OUTPUT),
    )
    return ModelProfile(
        fingerprint=f"opt-350m.x{degree}.by{blocks_a_unit}",
        calls=tuple(f"blocks.{i}" for i in range(units)),
        kind_of_call=("block",) * units,
        needs=(
            CallInputs(root=("embedding",)),
            *(CallInputs(outputs=(StageInput(call=k, output=0),)) for k in range(units - 1)),
            CallInputs(root=("norm", "head"), outputs=(StageInput(call=units - 1, output=0),)),
        ),
        kinds=(block,),
        root=root,
    )


def saved_bytes(degree: int) -> int:
    """What one block keeps of one sample for its backward, on all GPUs of a group together."""
    return TOKENS * WIDTH * (18 * degree + 48) + SCORES


def layers(gpu: str, degree: int) -> dict[int, dict[int, tuple[float, float, float]]]:
    """Seconds of forward, backward and update by micro-batch and layer."""
    measured = read(f"sailor/profiles/OPT-350/{gpu}/profile.json")
    return {
        size: {
            int(layer): tuple(times) for layer, times in measured[str(size)][str(degree)].items()
        }
        for size in sorted(map(int, measured))
        if str(degree) in measured[str(size)]
    }


def _class(group: Group, setup: Setup, blocks_a_unit: int) -> ClassProfile:
    by_size = layers(group.gpu, group.degree)
    forward, gradient = (
        {
            m: blocks_a_unit * fmean(at[k][which] for k in range(1, HEAD))
            for m, at in by_size.items()
        }
        for which in (0, 1)
    )
    block = UnitTimes(
        forward=_curve(forward),
        backward=_curve({m: forward[m] + gradient[m] for m in by_size}),
        gradient=_curve(gradient),
    )
    root = UnitTimes(
        forward=_curve({m: at[0][0] for m, at in by_size.items()}),
        backward=_curve({m: at[HEAD][0] + at[HEAD][1] + at[0][1] for m, at in by_size.items()}),
        gradient=_curve({m: at[0][1] for m, at in by_size.items()}),
    )
    update = median(sum(times[2] for times in at.values()) for at in by_size.values())
    return ClassProfile(
        device_class=group.name,
        units={"block": block, ROOT: root},
        optimizer_s_per_element=update / PARAMETERS,
        framework_bytes=group.degree * setup.framework_bytes,
        largest_micro_batch=max(by_size),
    )


def _cluster(groups: list[Group], network: Network | None) -> Cluster:
    devices = []
    for number, group in enumerate(groups):
        a_host = max(1, HOST_GPUS[group.gpu] // group.degree)
        devices += [
            Device(
                id=f"{number}-{group.name}-{i:04d}",
                device_class=group.name,
                host=f"{number}-{group.name}-{i // a_host:04d}",
                ordinal=i % a_host,
            )
            for i in range(group.count)
        ]
    classes = tuple(
        DeviceClass(
            name=group.name,
            accelerator="cuda",
            memory_bytes=group.degree * GPU_MEMORY_GIB[group.gpu] * GIB,
            product=f"{group.degree} x {group.gpu}" if group.degree > 1 else group.gpu,
        )
        for group in _kinds(groups)
    )
    return Cluster(classes=classes, devices=tuple(devices), network=network)


def _kinds(groups: list[Group]) -> list[Group]:
    """One group of each class."""
    return list({group.name: group for group in groups}.values())


def _curve(points: dict[int, float]) -> Curve:
    return Curve(sizes=tuple(points), values=tuple(points.values()))


def _line(slope: float) -> Curve:
    return Curve(sizes=(1.0, SAMPLES), values=(float(slope), slope * SAMPLES))
