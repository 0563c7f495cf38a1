"""What users of Lightning bring along: batches, losses and settings of their own; what has no
meaning is refused."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from gpumix.schema.plan.plan import Plan
from helpers.extended import chosen, left_out
from helpers.processes.harness import run_ranks
from helpers.scripts.programs import as_launched
from helpers.training.reference import Share, plan_for

pytest.importorskip("lightning")
pytestmark = pytest.mark.slow

WIDTH, SAMPLES = 8, 26


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def rows(samples: int = SAMPLES, seed: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, WIDTH, generator=generator)
    return inputs, (inputs.sum(1, keepdim=True) > 0).float()


class Stream(IterableDataset):
    """Read from its beginning to its end."""

    def __iter__(self):
        return iter(zip(*rows()))


class Shards(IterableDataset):
    """Each worker reads its own part."""

    def __iter__(self):
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return islice(zip(*rows()), first, None, step)


def network(**changes: Any) -> Any:
    from lightning.pytorch import LightningModule
    from torchmetrics.classification import BinaryAccuracy

    class Network(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.blocks = nn.ModuleList(Block() for _ in range(3))
            self.head = nn.Linear(WIDTH, 1)
            self.accuracy, self.hits = BinaryAccuracy(), BinaryAccuracy()

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x)

        def training_step(self, batch):
            inputs, targets = batch
            logits = self(inputs)
            # Positives count double, so the mean is over weights.
            weight = 1 + targets if changes.get("weighted") else torch.ones_like(targets)
            losses = nn.functional.binary_cross_entropy_with_logits(
                logits, targets, reduction="none"
            )
            loss = (losses * weight).sum() / weight.sum()
            guesses = torch.sigmoid(logits)
            self.log("accuracy", self.accuracy(guesses, targets), batch_size=len(targets))
            self.log("right", self.accuracy, on_step=False, on_epoch=True)
            self.hits(guesses, targets)
            self.log("hits", self.hits, on_step=True, on_epoch=True)
            self.log("loss", loss, prog_bar=True)
            return {"loss": loss}

        def configure_optimizers(self):
            kind = changes.get("optimizer", torch.optim.SGD)
            return kind(self.parameters(), lr=0.2)

    return Network()


OF_EPOCHS = ("right", "hits", "hits_epoch")
VARIATIONS: dict[str, dict[str, Any]] = {
    "tuples": {},
    "accumulation": {"trainer": {"accumulate_grad_batches": 2}, "batch": 6},
    "accumulation of whole batches": {
        "trainer": {"accumulate_grad_batches": 2},
        "batch": 6,
        "samples": 33,
        "loader": {"drop_last": True},
    },
    "more accumulation in later epochs": {
        "trainer": {"accumulate_grad_batches": 1},
        "scheduled": {0: 1, 1: 3},
        "batch": 6,
    },
    "accumulation of clipped halves": {
        "trainer": {
            "accumulate_grad_batches": 2,
            "gradient_clip_val": 0.1,
            "precision": "bf16-mixed",
        },
        "batch": 6,
    },
    "a stream": {"data": Stream, "trainer": {"max_epochs": 1}},
    "a stream in shards": {
        "data": Shards,
        "trainer": {"max_epochs": 1},
        "loader": {"num_workers": 2},
    },
    "a weighted mean": {"weighted": True},
    "workers": {"loader": {"num_workers": 2, "drop_last": True}},
    "half": {"trainer": {"precision": "bf16-mixed"}},
    "values clipped": {"trainer": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}},
    "fitted twice": {"fits": 2},
}


def plan(changes: dict[str, Any]) -> Plan:
    dtype = "bf16" if changes.get("trainer", {}).get("precision") else "fp32"
    shares = [Share(5, 2, 1), Share(7, 4, 3)]
    if changes.get("batch") == 6:
        shares = [Share(2, 1, 1), Share(4, 3, 3)]
    return plan_for(network(), shares, zero_stage=2, compute_dtype=dtype)


def trained(folder: Path, ours: bool, names: list[str]) -> dict[str, dict[str, Any]]:
    """What each of these variations of the script ends with."""
    as_launched(folder)
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    found = {}
    for name in names:
        changes = VARIATIONS[name]
        told: list[tuple[float, float]] = []

        class Listener(Callback):
            def on_train_batch_end(self, trainer, module, *others, told=told):
                found = trainer.callback_metrics
                told.append((found["loss"].item(), found["accuracy"].item()))

        more: dict[str, Any] = {}
        if ours:
            from gpumix.integrations.lightning import GpumixStrategy

            count = (lambda batch: (1 + batch[1]).sum()) if changes.get("weighted") else None
            made = None if name == "tuples" else plan(changes)  # once the devices are measured
            more["strategy"] = GpumixStrategy(plan=made, count=count)
        settings = {"max_epochs": 2, **changes.get("trainer", {})}
        callbacks: list[Any] = [Listener()]
        if "scheduled" in changes:
            callbacks.append(GradientAccumulationScheduler(changes["scheduled"]))
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            callbacks=[
                Listener(),
                *(
                    [GradientAccumulationScheduler(later)]
                    if (later := changes.get("scheduled"))
                    else []
                ),
            ],
            default_root_dir=str(folder),
            **settings,
            **more,
        )
        data = (
            changes["data"]()
            if "data" in changes
            else TensorDataset(*rows(changes.get("samples", SAMPLES)))
        )
        module, batch = network(**changes), changes.get("batch", 12) // (2 if ours else 1)
        for fit in range(changes.get("fits", 1)):
            trainer.fit_loop.max_epochs = settings["max_epochs"] * (fit + 1)
            trainer.fit(module, DataLoader(data, batch, **changes.get("loader", {})))
        found[name] = {
            "told": told,
            "right": [trainer.callback_metrics[name].item() for name in OF_EPOCHS],
            "steps": trainer.global_step,
        }
    return found


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("lightning")
    names = list(chosen(request, VARIATIONS, by="name"))
    stock = run_ranks(trained, 1, folder, False, names, timeout_s=120)[0]
    return stock, run_ranks(trained, 2, folder, True, names, timeout_s=240)


# Of what others do as well.
FURTHER = (
    "tuples",
    "accumulation",
    "accumulation of whole batches",
    "more accumulation in later epochs",
    "a stream",
    "a stream in shards",
    "workers",
    "half",
    "values clipped",
    "fitted twice",
)


@pytest.mark.parametrize("name", left_out(VARIATIONS, FURTHER))
def test_a_script_gives_what_it_gave_before(runs, name):
    stock, ours = runs
    for rank in ours:
        tolerance = 2e-2 if "hal" in name else 1e-5
        for found, expected in zip(rank[name]["told"], stock[name]["told"], strict=True):
            assert found == pytest.approx(expected, rel=tolerance)
        assert rank[name]["steps"] == stock[name]["steps"]
        assert rank[name]["right"] == pytest.approx(stock[name]["right"], abs=tolerance)
