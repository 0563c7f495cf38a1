"""What has no meaning with a plan is refused in one clear error, before anything is computed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.processes.harness import run_ranks

pytest.importorskip("lightning")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    StochasticWeightAveraging,
)

from gpumix.integrations.lightning import GpumixStrategy

DATA = TensorDataset(torch.zeros(8, 2))


class Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))

    def training_step(self, batch, batch_idx):
        return self.blocks[1](self.blocks[0](batch[0])).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Manual(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(Plain):
    def backward(self, loss):
        loss.backward()


class Several(Plain):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD(self.parameters(), 0.1)


class Reads(Plain):
    def training_step(self, dataloader_iter):
        return next(dataloader_iter)


class ReadsToEvaluate(Plain):
    def validation_step(self, dataloader_iter):
        return next(dataloader_iter)


class NoOptimizer(Plain):
    def configure_optimizers(self):
        return None


class OwnBatches(BatchSampler):
    pass


def fit(module: Any = None, loader: Any = None, **settings: Any) -> None:
    trainer = Trainer(
        strategy=GpumixStrategy(),
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        **{"devices": 1, **settings},
    )
    trainer.fit(module or Plain(), loader or DataLoader(DATA, 4))


CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "manual": ("manual optimization", {"module": Manual}),
    "backward": ("OwnBackward.backward", {"module": OwnBackward}),
    "reads": (r"training_step\(dataloader_iter\)", {"module": Reads}),
    "reads to evaluate": (r"validation_step\(dataloader_iter\)", {"module": ReadsToEvaluate}),
    "no optimizer": ("returned no optimizer", {"module": NoOptimizer}),
    "several": ("returned several", {"module": Several}),
    "precision": ("precision '64-true'", {"precision": "64-true"}),
    "batch norm": ("sync_batchnorm", {"sync_batchnorm": True}),
    "devices": ("one process for 2 devices", {"devices": 2}),
    "averaging": (
        "StochasticWeightAveraging",
        {"callbacks": lambda: [StochasticWeightAveraging(0.1)]},
    ),
    "a range": ("a range gives the batches", {"loader": lambda: range(4)}),
    "own batches": (
        "batch sampler of its own",
        {
            "loader": lambda: DataLoader(
                DATA, batch_sampler=OwnBatches(SequentialSampler(DATA), 4, drop_last=False)
            )
        },
    ),
    "several loaders": (
        "several loaders",
        {"loader": lambda: {"a": DataLoader(DATA, 4), "b": DataLoader(DATA, 4)}},
    ),
}


@pytest.fixture(scope="module")
def refused() -> dict[str, tuple[str, str]]:
    """What is said of each call, and the fix; in a process of its own, for some open a device."""
    return run_ranks(_refused, 1)[0]


def _refused() -> dict[str, tuple[str, str]]:
    found = {}
    for name, (_, settings) in CALLS.items():
        try:
            fit(**{key: value() if callable(value) else value for key, value in settings.items()})
        except InputError as error:
            found[name] = str(error), error.fix
    return found


@pytest.mark.parametrize("name", CALLS)
def test_it_is_refused(name, refused):
    said, fix = refused[name]
    assert re.search(CALLS[name][0], said)
    assert fix


def test_checkpoints_are_in_a_file_system():
    from gpumix.integrations.lightning.checkpoints import get_state_folder

    with raises(InputError, code="checkpoint-not-in-file-system", what="s3"):
        get_state_folder("s3://bucket/last.ckpt")
