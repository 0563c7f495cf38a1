"""More steps than Python allows calls inside of calls: nothing grows with steps."""

# variants: trainer accelerate lightning
import torch
from accelerate import Accelerator
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from torch.utils.data import DataLoader
from transformers import Trainer

from scripts_of.parts import (
    BATCH,
    MAIN,
    PROCESSES,
    VARIANT,
    arguments,
    collate,
    folder,
    language,
    llama,
    report,
)

strategy = "auto"

STEPS, EVERY, SGD_RATE = 1100, 100, 0.01
rows = language(BATCH * STEPS // 10)
loader = DataLoader(rows, batch_size=BATCH // PROCESSES, collate_fn=collate)
model = llama(hidden_size=16, intermediate_size=16, num_hidden_layers=2)


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model

    def training_step(self, batch, index):
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, index):
        losses.append(self.trainer.callback_metrics["loss"].item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=SGD_RATE)


losses = []
if VARIANT == "trainer":
    trainer = Trainer(
        model=model,
        args=arguments(
            max_steps=STEPS,
            logging_steps=EVERY,
            optim="sgd",
            learning_rate=SGD_RATE,
            weight_decay=0.0,
        ),
        train_dataset=rows,
        data_collator=collate,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
if VARIANT == "accelerate":
    accelerator = Accelerator()
    optimizer = torch.optim.SGD(model.parameters(), lr=SGD_RATE)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step in range(STEPS):
        if step % len(loader) == 0:
            batches = iter(loader)
        batch = next(batches)
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % EVERY == 0:
            counted = (batch["labels"][:, 1:] != -100).sum().float()
            both = accelerator.gather(torch.stack([loss.detach() * counted, counted])[None]).sum(0)
            losses.append((both[0] / both[1]).item())
if VARIANT == "lightning":
    LightningTrainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder(),
    ).fit(Module(), loader)
    losses = losses[::EVERY]
report(losses=losses, steps=STEPS if MAIN else 0)
