"""What ranks of tests import: the process that they are forked from has imported it already.

A rank would need 0.3 s of its own for it, more than most have to do; for `transformers` a second,
for its trainer and for Lightning half of one.
"""
# ruff: noqa: F401

from contextlib import suppress

import hypothesis.strategies
import pytest
import torch
import torch.distributed.launcher.api
import torch.distributed.pipelining
import torch.distributed.tensor.debug
import torch.distributed.tensor.parallel
import transformers.models.auto.modeling_auto
import transformers.models.bert.modeling_bert
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama
import transformers.models.t5.modeling_t5
import transformers.trainer
from torch._subclasses.fake_tensor import FakeTensorMode

import gpumix.cli
import gpumix.doctor.function.preload
import gpumix.train.controller
import gpumix.train.preload
from helpers.training import reference, staging
from helpers.training.models import ARCHITECTURES

with suppress(ImportError):  # tests of what is not installed are skipped
    import lightning.pytorch
    import torchmetrics
    import trl.trainer.sft_trainer


def _without_values() -> None:
    """Shapes are found by tables of PyTorch's that take it 0.3 s to fill."""
    gpt2 = ARCHITECTURES["gpt2"]
    # The generators of GPUs stay closed: a process that is forked after that can use none.
    random = torch.random.fork_rng(devices=[])
    with random, torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        gpt2.factory()(**gpt2.batch(2, torch.Generator().manual_seed(0)))


_without_values()
