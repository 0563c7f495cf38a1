"""Lightning: more steps than calls may nest; nothing may grow by a call in each step."""

import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from scripts_of.parts import BATCH, PROCESSES, collate, folder, language, llama, report

strategy = "auto"

CALLS, STEPS, EVERY = 400, 450, 50
sys.setrecursionlimit(CALLS)
losses = []


class Language(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = llama(hidden_size=16, intermediate_size=16, num_hidden_layers=2)

    def training_step(self, batch, index):
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, index):
        if index % EVERY == 0:
            losses.append(self.trainer.callback_metrics["loss"].item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


rows = language(BATCH * STEPS // 10)
Trainer(
    accelerator="cpu",
    devices=1,
    strategy=strategy,
    max_steps=STEPS,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=folder(),
).fit(Language(), DataLoader(rows, batch_size=BATCH // PROCESSES, collate_fn=collate))
report(losses=losses)
