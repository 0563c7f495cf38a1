"""A module as its author wrote it for one device, with Lightning; and plans that train it."""

from __future__ import annotations

from typing import Any

import torch

from helpers.scripts.programs import model
from helpers.training.reference import Share, plan_for
from helpers.training.staging import rows, staged_plan


def module() -> Any:
    """As its author wrote it, for one device."""
    from lightning.pytorch import LightningModule
    from torchmetrics import MeanMetric, MeanSquaredError, SumMetric

    class Language(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model()
            self.first_words = MeanMetric()
            self.apart = MeanSquaredError(squared=False)  # no mean of parts is the whole's
            self.mean_loss, self.counted_rows = MeanMetric(), SumMetric()
            self.counted, self.words = 0, []

        def training_step(self, batch, batch_idx):
            loss = self.model(**batch).loss
            self.log("loss", loss)
            self.log("rows", float(batch["input_ids"].shape[0]), reduce_fx="max")
            sums = (batch["input_ids"] * batch["attention_mask"]).sum(1)
            self.log("highest", sums.max().float(), reduce_fx="sum")
            self.apart(batch["input_ids"][:, 0].float(), batch["input_ids"][:, 1].float())
            self.log("apart", self.apart)  # of each step, not of the epoch
            self.mean_loss(loss)  # one number a batch, not one a micro-batch
            self.log("mean_loss", self.mean_loss, on_step=True, on_epoch=True)
            self.counted_rows.update(len(batch["input_ids"]))
            self.log("counted_rows", self.counted_rows, on_step=False, on_epoch=True)
            self.log("given_size", loss.detach(), batch_size=len(batch["input_ids"]))
            return loss

        def validation_step(self, batch, batch_idx):
            self.counted += len(batch["input_ids"])
            outputs = self.model(**batch)
            self.words.append(batch["input_ids"][:, 0].float())
            self.first_words.update(outputs.logits[:, 0].argmax(-1).float())
            self.log("val_loss", outputs.loss)
            self.log("first_words", self.first_words)
            words = batch["input_ids"][:, :2].float()
            self.log("most of means", words.mean(), reduce_fx="max")
            self.log("sum of means", words.mean(), reduce_fx="sum")
            self.log("mean of sums", words.sum())
            self.log("least", words.mean(1).min(), reduce_fx="min")
            weights = (batch["input_ids"] % 7 + 1.0) * batch["attention_mask"]
            weighed = (outputs.logits[..., 0] * weights).sum() / weights.sum()
            self.log("weighed", weighed)
            self.log("weighed by tokens", weighed, batch_size=int(batch["attention_mask"].sum()))

        def on_validation_epoch_end(self):
            words = torch.cat(self.words) if self.words else torch.zeros(0)
            total = self.all_gather(words.sum()).sum()
            number = self.all_gather(torch.tensor(float(len(words)))).sum()
            self.log("words", total / number, sync_dist=True)
            for name, value in (("counted", self.counted), ("kept", len(words))):
                self.log(name, float(value), reduce_fx="sum", sync_dist=True)
            self.counted, self.words = 0, []

        def predict_step(self, batch, batch_idx):
            return self.model(**batch).logits.argmax(-1)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            total = self.trainer.estimated_stepping_batches
            scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return Language()


def unlike_ranks() -> Any:
    shares = [Share(8, 3, 1), Share(4, 4, 5), Share(0, 0, 2)]
    return plan_for(module(), shares, zero_stage=3)


def other_ranks() -> Any:
    return plan_for(module(), [Share(5, 2, 3), Share(7, 4, 1)], zero_stage=2)


def two_stages() -> Any:
    from gpumix.engine.sharding.unit_discovery import split_into_units

    plan = staged_plan("llama", rows([12], [8, 4]), zero_stage=1)
    stages = [
        stage.model_copy(
            update={
                "units": tuple(f"model.{name}" for name in stage.units),
                "root": stage.root and tuple(f"model.{name}" for name in stage.root),
            }
        )
        for stage in plan.stages
    ]
    return plan.model_copy(
        update={"model": split_into_units(module()).fingerprint(), "stages": tuple(stages)}
    )


def one_rank() -> Any:
    return plan_for(module(), [Share(12, 6, 1)])
