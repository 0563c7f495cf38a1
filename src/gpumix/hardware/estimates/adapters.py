"""Estimates of fine-tuning with LoRA on a frozen base, in 16 bits or quantised.

Bytes of a quantised weight are those of bitsandbytes: NF4 has 4 bits and an fp32 constant for every
64 weights, or, quantised twice, a constant of 8 bits and an fp32 one for every 256 of these; int8
has a byte and an fp32 constant for every row. Only matrices of blocks are quantised; embeddings,
head and norms stay in the compute dtype. Pure: no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from gpumix.schema.curve import Curve
from gpumix.schema.plan.optimizer_state import LEAST_QUANTISED
from gpumix.schema.plan.stage import DTYPE_BYTES, ComputeDtype
from gpumix.schema.profile.profile import (
    EndParameters,
    ModelProfile,
    RootParameter,
    RootUnit,
    UnitKind,
)

Base = Literal["16bit", "int8", "nf4", "nf4-double"]
NF4_BLOCK, NESTED_BLOCK = 64, 256  # weights, and constants, that share a constant
# Alignment of a quantised parameter's tensors, and of such parameters, in the engine's buffers.
PART_BYTES, WEIGHT_BYTES = 16, 64

S = TypeVar("S", EndParameters, RootParameter)


@dataclass(frozen=True)
class LinearSizes:
    """Input and output width of a linear layer, and how many of them a block has."""

    inputs: int
    outputs: int
    count: int = 1


@dataclass(frozen=True)
class FineTuning:
    """What of a model is trained: all of it (`lora_rank` 0), or LoRA adapters of that rank on the
    linear layers of every block, with a frozen base."""

    lora_rank: int = 0
    base: Base = "16bit"

    @property
    def trains_all(self) -> bool:
        return self.lora_rank == 0

    def packed_bytes(self, block: BlockSizes) -> int:
        """Return the bytes of a block's quantised matrices; 0 for a base in 16 bits."""
        if self.base == "16bit":
            return 0
        return sum(
            one.count * compute_quantised_bytes(self.base, one.outputs, one.inputs)
            for one in block.linears
        )

    def base_bytes(self, block: BlockSizes, dtype: ComputeDtype) -> int:
        """Return the bytes of a block's frozen parameters."""
        wide = block.parameters if self.base == "16bit" else block.parameters - block.matrices
        return self.packed_bytes(block) + wide * DTYPE_BYTES[dtype]

    def unpacked_bytes(self, block: BlockSizes, dtype: ComputeDtype) -> int:
        """Return the bytes that a GPU moves to unpack a block's matrices once: it reads the packed
        ones, and writes and reads those in the compute dtype. Products of int8 unpack nothing."""
        if self.base in ("16bit", "int8"):
            return 0
        return self.packed_bytes(block) + block.matrices * 2 * DTYPE_BYTES[dtype]

    def describe(self) -> str:
        if self.trains_all:
            return "full fine-tuning"
        base = {
            "16bit": "",
            "int8": " on an int8 base",
            "nf4": " on an NF4 base",
            "nf4-double": " on an NF4 base with quantised constants",
        }[self.base]
        return f"LoRA of rank {self.lora_rank}{base}"


FULL = FineTuning()


def compute_quantised_bytes(base: Base, outputs: int, inputs: int) -> int:
    """Return the bytes of a quantised matrix with its constants."""
    numel = outputs * inputs
    blocks = -(-numel // NF4_BLOCK)
    tensors = {
        "16bit": (2 * numel,),
        "int8": (numel, 4 * outputs),
        "nf4": (-(-numel // 2), 4 * blocks),
        "nf4-double": (-(-numel // 2), blocks, 4 * -(-blocks // NESTED_BLOCK), 4),
    }[base]
    begun = sum(-(-size // PART_BYTES) * PART_BYTES for size in tensors[:-1])
    return -(-(begun + tensors[-1]) // WEIGHT_BYTES) * WEIGHT_BYTES


@dataclass(frozen=True)
class BlockSizes:
    """Sizes of a decoder block: elements of all parameters, and its linear layers."""

    parameters: int
    linears: tuple[LinearSizes, ...]

    @property
    def matrices(self) -> int:
        """Elements of the linear layers."""
        return sum(one.inputs * one.outputs * one.count for one in self.linears)

    def adapter(self, rank: int) -> int:
        """Return the elements of LoRA adapters of a rank on all linear layers."""
        return sum(rank * (one.inputs + one.outputs) * one.count for one in self.linears)

    def small_adapters(self, rank: int) -> int:
        """Return the elements of those adapters' matrices whose optimizer state is never in 8
        bits."""
        sizes = ((rank * n, one.count) for one in self.linears for n in (one.inputs, one.outputs))
        return sum(numel * count for numel, count in sizes if numel < LEAST_QUANTISED)


def freeze_base(
    model: ModelProfile, block: BlockSizes, tuning: FineTuning, *, tokens: int
) -> ModelProfile:
    """Return the profile of the model with a frozen base and LoRA adapters in every block.

    Args:
        model: profile of full training, with one kind of block.
        block: sizes of that kind.
        tokens: of a sample.
    """
    if tuning.trains_all:
        return model
    dtype = model.compute_dtype
    adapter = block.adapter(tuning.lora_rank)
    widest = max(one.inputs * one.outputs for one in block.linears) * DTYPE_BYTES[dtype]
    unpacked = 0 if tuning.base == "16bit" else widest
    # Each adapter keeps its narrow product, and computes two narrow products more.
    narrow = tokens * tuning.lora_rank * sum(one.count for one in block.linears)
    of_adapter = 2.0 * tokens * adapter

    def frozen_kind(kind: UnitKind) -> UnitKind:
        saved = None if kind.saved is None else _raised(kind.saved, narrow * DTYPE_BYTES[dtype])
        return kind.model_copy(
            update={
                "trainable": adapter,
                "matrices": adapter,
                "small": block.small_adapters(tuning.lora_rank),
                "frozen_bytes": tuning.base_bytes(block, dtype),
                "packed_bytes": tuning.packed_bytes(block),
                "unpacked_bytes": tuning.unpacked_bytes(block, dtype),
                "saved": saved,
                "flops": kind.flops + of_adapter,
                # Gradients of inputs for all products, gradients of weights for adapters alone.
                "backward_flops": kind.flops + 2 * of_adapter,
                **_working_sets(kind, unpacked),
            }
        )

    kinds = tuple(map(frozen_kind, model.kinds))
    root = _freeze_root(model.root, DTYPE_BYTES[dtype])
    return model.model_copy(
        update={"kinds": kinds, "root": root, "fingerprint": f"{model.fingerprint}:{tuning}"}
    )


def _working_sets(kind: UnitKind, unpacked: int) -> dict[str, Any]:
    """Return the working sets with room for a matrix that was unpacked in place of the gradient of
    a weight, which a frozen matrix has none of."""
    found: dict[str, Any] = {"forward": _shifted(kind.forward, unpacked)}
    if kind.saved_forward is not None:
        found["saved_forward"] = _shifted(kind.saved_forward, unpacked)
    return found


def _freeze_root(root: RootUnit, width: int) -> RootUnit:
    def frozen(one: S) -> S:
        return one.model_copy(update={"trainable": 0, "frozen_bytes": one.trainable * width})

    return root.model_copy(
        update={
            "trainable": 0,
            "frozen_bytes": root.trainable * width,
            "before": frozen(root.before),
            "after": frozen(root.after),
            "parameters": tuple(map(frozen, root.parameters)),
            "backward_flops": root.flops,
        }
    )


def _raised(curve: Curve, per_sample: float) -> Curve:
    values = tuple(v + per_sample * n for n, v in zip(curve.sizes, curve.values, strict=True))
    return Curve(sizes=curve.sizes, values=values)


def _shifted(curve: Curve, by: float) -> Curve:
    return Curve(sizes=curve.sizes, values=tuple(v + by for v in curve.values))
