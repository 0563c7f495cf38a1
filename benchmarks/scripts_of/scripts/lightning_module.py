"""Lightning: fit with validation, predict, test; batches accumulated, also at uneven ends."""

# variants: plain accumulated ends
import torch
import torchmetrics
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from scripts_of.parts import (
    BATCH,
    MAIN,
    PROCESSES,
    VARIANT,
    bert,
    collate,
    folder,
    labelled,
    report,
)

strategy = "auto"


class Sorter(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = bert("SequenceClassification", num_labels=3)
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.losses, self.norms = [], []

    def training_step(self, batch, index):
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, index):
        self.losses.append(self.trainer.callback_metrics["loss"].item())

    def validation_step(self, batch, index):
        outputs = self.model(**batch)
        self.accuracy(outputs.logits, batch["labels"])
        self.log("accuracy", self.accuracy)
        self.log("val_loss", outputs.loss)

    test_step = validation_step

    def predict_step(self, batch, index):
        return self.model(**batch).logits

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]


rows = labelled(lambda text: sum(text) % 3, 24 if VARIANT == "accumulated" else 26)
train = DataLoader(rows, batch_size=BATCH // PROCESSES, collate_fn=collate)
held_out = DataLoader(rows[:10], batch_size=6 // PROCESSES, collate_fn=collate)
trainer = Trainer(
    accelerator="cpu",
    devices=1,
    strategy=strategy,
    max_epochs=2,
    gradient_clip_val=0.5,
    accumulate_grad_batches=1 if VARIANT == "plain" else 2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=folder(),
)
module = Sorter()
trainer.fit(module, train, held_out)
validated = {name: value.item() for name, value in trainer.callback_metrics.items()}
trainer.save_checkpoint(f"{folder()}/end.ckpt")
weights = torch.load(f"{folder()}/end.ckpt", weights_only=True)["state_dict"] if MAIN else {}
predicted = torch.cat(trainer.predict(module, held_out))
tested = trainer.test(module, held_out, verbose=False)[0]
if VARIANT == "plain":  # else batches are counted in steps
    report(losses=module.losses)
else:
    validated.pop("loss")
report(validated=validated, tested=tested, predicted=predicted, weights=weights)
