"""Values that a module logs are a batch's, also where the first batches do not tell what they are
means over."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from gpumix.engine.model.forward_coroutine import ModelError
from helpers.processes.harness import run_ranks
from helpers.scripts.programs import as_launched
from helpers.training.reference import Share, plan_for

pytest.importorskip("lightning")
pytestmark = pytest.mark.slow

WIDTH, CLASSES, BATCH, BATCHES = 8, 5, 12, 4
UNLABELLED = (0, 1, 5, 10, 11)  # of each batch but the first; a rank has the last two


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Rows(Dataset):
    """Samples, all of which have a label in the first batch."""

    def __init__(self, *, hides: bool) -> None:
        generator = torch.Generator().manual_seed(4)
        self._inputs = torch.randn(BATCH * BATCHES, WIDTH, generator=generator)
        self._classes = torch.randint(CLASSES, (BATCH * BATCHES,), generator=generator)
        self._hides = hides

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        counts = place < BATCH or place % BATCH not in UNLABELLED
        hidden = torch.tensor(-100) if self._hides and not counts else self._classes[place]
        return {"x": self._inputs[place], "y": hidden, "counts": torch.tensor(float(counts))}


def masked(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return (values * counts).sum() / counts.sum()


def module(kind: str) -> Any:
    from lightning.pytorch import LightningModule

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.head = nn.Linear(WIDTH, CLASSES)
            self.steps, self.hits = [], torch.zeros(())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return self.head(x)

        def training_step(self, batch, batch_idx):
            logits, labels = self(batch["x"]), batch["y"]
            if kind in ("labels", "all labelled"):
                return F.cross_entropy(logits, labels)
            right = (logits.argmax(1) == labels).float()
            each = F.cross_entropy(logits, labels, reduction="none")
            counts = (labels != 2).float() if kind == "classes" else batch["counts"]
            self.log("accuracy", right.mean())
            self.log("share", counts.mean())
            self.log("confidence", logits.softmax(-1).amax(-1).mean())
            if kind == "clamped":
                return (each * counts).sum() / counts.sum().clamp(min=1)
            return masked(each, counts)

        def validation_step(self, batch, batch_idx):
            logits, labels = self(batch["x"]), batch["y"]
            there = labels != -100
            right = logits.argmax(1) == labels
            self.log("val_loss", F.cross_entropy(logits, labels))
            self.log("given_size", F.cross_entropy(logits, labels), batch_size=len(labels))
            self.log("val_accuracy", (right & there).sum() / there.sum())
            self.log("val_masked", masked(right.float(), batch["counts"]))
            self.log("rare", (batch["x"][:, 0] > 1.5).float().sum())

        def on_train_batch_end(self, outputs, batch, batch_idx):
            told = self.trainer.callback_metrics
            names = ("accuracy", "share", "confidence")
            self.steps.append([told[name].item() for name in names if name in told])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Classifier()


def trained(folder: Path, ours: bool, kind: str) -> dict[str, Any]:
    as_launched(folder)
    from lightning.pytorch import Trainer

    more: dict[str, Any] = {}
    if ours:
        from gpumix.integrations.lightning import GpumixStrategy

        shares = [Share(10, 5, 1), Share(2, 1, 2)]
        more["strategy"] = GpumixStrategy(plan=plan_for(module(kind), shares, zero_stage=3))
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gpumix").addHandler(handler)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
        default_root_dir=str(folder),
        **more,
    )
    of_rank = BATCH // (2 if ours else 1)
    hides = kind in ("labels", "all labelled")
    rows = Rows(hides=kind == "labels")
    model = module(kind)
    trainer.fit(model, DataLoader(rows, of_rank), DataLoader(Rows(hides=hides), of_rank))
    told = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return {"steps": model.steps, "told": told, "warned": warned}


@pytest.mark.parametrize("kind", ["all labelled", "labels", "masks", "classes"])
def test_values_are_those_of_one_process(kind, tmp_path):
    stock = run_ranks(trained, 1, tmp_path, False, kind, timeout_s=120)[0]
    for rank in run_ranks(trained, 2, tmp_path, True, kind, timeout_s=240):
        assert rank["told"] == pytest.approx(stock["told"], rel=1e-4)
        for found, expected in zip(rank["steps"], stock["steps"], strict=True):
            assert found == pytest.approx(expected, rel=1e-4)
        assert not rank["warned"]


def test_the_fix_of_a_loss_that_does_not_add_up_is_one_for_lightning(tmp_path):
    with pytest.raises(ModelError) as caught:
        run_ranks(trained, 2, tmp_path, True, "clamped", timeout_s=240)
    assert "GpumixStrategy(count=" in caught.value.fix


def with_a_copying_callback(folder: Path) -> list[bool]:
    """A callback that holds a method of the module, as metrics loggers do, and is copied."""
    as_launched(folder)
    from lightning.pytorch import Callback, Trainer

    from gpumix.integrations.lightning import GpumixStrategy

    copies: list[bool] = []

    class Copied(Callback):
        def on_fit_start(self, trainer, pl_module):
            self.log_of_module = pl_module.log
            twice = copy.deepcopy(copy.deepcopy(trainer.callbacks))
            copies.append(len(twice) == len(trainer.callbacks))

    model = module("all labelled")
    plan = plan_for(module("all labelled"), [Share(12, 6, 1)], zero_stage=3)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=str(folder),
        strategy=GpumixStrategy(plan=plan),
        callbacks=[Copied()],
    )
    trainer.fit(model, DataLoader(Rows(hides=False), BATCH))
    return copies


def test_callbacks_that_hold_the_module_can_be_copied(tmp_path):
    assert run_ranks(with_a_copying_callback, 1, tmp_path, timeout_s=120) == [[True]]
