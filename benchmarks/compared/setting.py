"""What is trained in a comparison: one model and its batches, and how a step is cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.plan.plan import Collectives, Plan, ZeroStage
from gpumix.schema.plan.stage import ComputeDtype, Mode, Stage, Worker

SEED = 0
HEAD_WIDTH = 64
Order = Literal["layered", "sequential"]
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Model:
    """A language model of `transformers` with random weights, without dropout."""

    family: Literal["llama", "gpt2"] = "llama"
    width: int = 384
    layers: int = 6
    vocabulary: int = 2048
    sequence: int = 128

    @property
    def heads(self) -> int:
        return max(1, self.width // HEAD_WIDTH)

    def build(self) -> nn.Module:
        """The same weights wherever it is built."""
        import transformers

        transformers.logging.set_verbosity_error()
        torch.manual_seed(SEED)
        if self.family == "gpt2":
            return transformers.GPT2LMHeadModel(self._gpt2())
        return transformers.LlamaForCausalLM(self._llama())

    def rows(self, start: int, count: int) -> Batch:
        """Samples `start` to `start + count` of an endless text with something to learn: each token
        is the one before it, plus one of eight steps."""
        generator = torch.Generator().manual_seed(SEED + start)
        steps = torch.randint(1, 9, (count, self.sequence), generator=generator)
        tokens = steps.cumsum(1) % self.vocabulary
        return {"input_ids": tokens, "labels": tokens}

    def _llama(self) -> Any:
        from transformers import LlamaConfig

        return LlamaConfig(
            hidden_size=self.width,
            intermediate_size=self.width * 11 // 4,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.sequence,
            use_cache=False,
        )

    def _gpt2(self) -> Any:
        from transformers import GPT2Config

        return GPT2Config(
            n_embd=self.width,
            n_layer=self.layers,
            n_head=self.heads,
            n_positions=self.sequence,
            vocab_size=self.vocabulary,
            activation_function="gelu_pytorch_tanh",  # GPT-2's own, as one operation
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )


@dataclass(frozen=True)
class Rates:
    """The settings of AdamW, which is fused and does not clip; by default torch's own."""

    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01


USUAL_RATES = Rates()


@dataclass(frozen=True)
class Setting:
    """How all systems train: each rank the same number of samples, in equal micro-batches."""

    model: Model
    world: int
    samples: int = 4
    micro_batches: int = 1
    recompute: bool = False
    dtype: ComputeDtype = "fp32"
    rates: Rates = USUAL_RATES

    def __post_init__(self) -> None:
        if self.samples % self.micro_batches:
            raise ValueError(f"{self.samples} samples make no {self.micro_batches} micro-batches")

    @property
    def tokens(self) -> int:
        """Tokens of a global batch."""
        return self.world * self.samples * self.model.sequence

    @property
    def devices(self) -> list[Device]:
        return [Device(id=f"rank-{rank}", device_class="equal") for rank in range(self.world)]

    def batch(self, step: int, rank: int) -> Batch:
        """The part of `rank` in a step's global batch."""
        return self.model.rows((step * self.world + rank) * self.samples, self.samples)

    def plan(
        self, model: nn.Module, zero_stage: ZeroStage, order: Order, *, nccl: bool = False
    ) -> Plan:
        """Equal parts for all ranks, at a ZeRO stage."""
        anatomy = split_into_units(model)
        workers = tuple(
            Worker(
                device=device.id,
                device_class=device.device_class,
                samples=self.samples,
                micro_batch=self.samples // self.micro_batches,
                state_share=1 / self.world,
                mode=Mode(recompute=self.recompute, order=order),
                compute_dtype=self.dtype,
            )
            for device in self.devices
        )
        lists = Collectives(gather="list", reduce="list")
        return Plan(
            strategy="even",
            model=anatomy.fingerprint(),
            sequence_length=self.model.sequence,
            global_batch=self.samples * self.world,
            communication_dtype=self.dtype,
            stages=(Stage(units=tuple(u.name for u in anatomy.units), workers=workers),),
            zero_stage=zero_stage,
            collectives=lists if nccl else Collectives(),
        )

    def __str__(self) -> str:
        ranks = f"{self.world} ranks" if self.world > 1 else "1 rank"
        kept = "recompute" if self.recompute else "graphs kept"
        return f"{ranks}, {self.micro_batches} micro-batch(es), {kept}"
