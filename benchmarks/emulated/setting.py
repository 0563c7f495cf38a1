"""What is trained, on what: a GPT-2, text that every Python brings along, emulated devices."""

from __future__ import annotations

import argparse
import ast
import inspect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from gpumix.schema.cluster.cluster import Cluster, Device, DeviceClass

TEXTS: tuple[ModuleType, ...] = (argparse, ast, inspect)
VOCABULARY = 264  # 256 bytes and a round number
SEED = 0


@dataclass(frozen=True)
class Setting:
    """One model, one global batch, one cluster; everything else follows from them.

    Dropout is off: systems cut a batch in different ways, so their random numbers would differ.
    """

    cluster: Cluster
    width: int
    layers: int
    heads: int
    global_batch: int = 32
    sequence: int = 128

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of each rank."""
        return self.cluster.in_rank_order()

    def class_of(self, rank: int) -> DeviceClass:
        return self.cluster.class_named(self.devices[rank].device_class)

    @property
    def tokens(self) -> int:
        """Tokens of a global batch."""
        return self.global_batch * self.sequence

    def labels(self, samples: int) -> int:
        """Labels that enter the loss: a sample's first token is predicted by nothing."""
        return samples * (self.sequence - 1)

    def even(self) -> tuple[int, ...]:
        """Samples by rank, the same for all; a remainder goes to the first ranks, one for each."""
        each, rest = divmod(self.global_batch, len(self.devices))
        return tuple(each + (rank < rest) for rank in self._ranks)

    def proportional(self) -> tuple[int, ...]:
        """Samples by rank in proportion to the devices' speed, rounded so that the last device is
        done as early as possible; each has at least one."""
        rates = [self.class_of(rank).emulate_flops_per_s or 0.0 for rank in self._ranks]
        samples = [1 for _ in rates]
        for _ in range(self.global_batch - len(rates)):
            done_first = min(self._ranks, key=lambda rank: (samples[rank] + 1) / rates[rank])
            samples[done_first] += 1
        return tuple(samples)

    def of_devices(self, ids: Iterable[str]) -> Setting:
        """The same on some of the devices."""
        wanted = set(ids)
        devices = tuple(device for device in self.devices if device.id in wanted)
        return replace(self, cluster=self.cluster.model_copy(update={"devices": devices}))

    @property
    def _ranks(self) -> range:
        return range(len(self.devices))

    def build(self) -> nn.Module:
        """The model; its initial weights are the same wherever it is built."""
        from transformers import GPT2Config, GPT2LMHeadModel, logging

        logging.set_verbosity_error()
        config = GPT2Config(
            n_embd=self.width,
            n_layer=self.layers,
            n_head=self.heads,
            n_positions=self.sequence,
            vocab_size=VOCABULARY,
            activation_function="gelu_pytorch_tanh",  # GPT-2's own, as one operation
            bos_token_id=256,
            eos_token_id=256,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
        torch.manual_seed(SEED)
        return GPT2LMHeadModel(config)

    def batch(self, step: int, samples: tuple[int, ...], rank: int) -> dict[str, torch.Tensor]:
        """The part of `rank` in the global batch of `step`, which is cut in the order of ranks."""
        start = step * self.global_batch + sum(samples[:rank])
        return self.rows(start, samples[rank])

    def rows(self, start: int, count: int) -> dict[str, torch.Tensor]:
        """Samples `start` to `start + count` of the text, which has no end."""
        text = _text()
        positions = torch.arange(start * self.sequence, (start + count) * self.sequence)
        tokens = text[positions % len(text)].view(count, self.sequence)
        return {"input_ids": tokens, "labels": tokens}


def _text() -> torch.Tensor:
    """The source of a few modules of the standard library, as bytes."""
    content = b"".join(Path(inspect.getfile(module)).read_bytes() for module in TEXTS)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
