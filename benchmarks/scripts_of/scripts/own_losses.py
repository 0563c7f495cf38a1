"""A loss of one's own: in compute_loss, as a function, of two terms, or a penalty on weights."""

# variants: weights sum function two penalty teacher smoothness accumulated
import torch
from torch.nn import functional
from transformers import Trainer

from scripts_of.parts import VARIANT, arguments, bert, collate, labelled, outcome

start = {}
teacher = bert("SequenceClassification", num_labels=3).eval()
of_class = torch.tensor([0.2, 1.0, 3.0])


class OwnTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if VARIANT == "function":
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits
        if VARIANT == "weights":
            loss = functional.cross_entropy(logits, labels, weight=of_class)
        elif VARIANT == "sum":
            loss = functional.cross_entropy(logits, labels, reduction="sum")
        else:
            loss = functional.cross_entropy(logits, labels)
        if VARIANT == "two":
            loss = loss + 0.1 * logits.square().mean()
        if VARIANT == "penalty":
            for name, weight in model.named_parameters():
                loss = loss + 1e-3 * (weight - start[name]).square().sum()
        if VARIANT == "teacher":
            with torch.no_grad():
                taught = teacher(**inputs).logits.softmax(-1)
            divergence = functional.kl_div(logits.log_softmax(-1), taught, reduction="batchmean")
            loss = loss + divergence
        if VARIANT == "smoothness":
            loss = loss + logits.var()  # of all samples of a batch together
        return (loss, outputs) if return_outputs else loss


def function(outputs, labels, num_items_in_batch=None):
    lost = functional.cross_entropy(outputs.logits, labels, reduction="sum")
    return lost / (len(labels) if num_items_in_batch is None else num_items_in_batch)


rows = labelled(lambda text: sum(text) % 3)
model = bert("SequenceClassification", num_labels=3)
start.update((name, 0.5 * weight.detach().clone()) for name, weight in model.named_parameters())
trainer = OwnTrainer(
    model=model,
    args=arguments(gradient_accumulation_steps=2 if VARIANT == "accumulated" else 1),
    train_dataset=rows,
    eval_dataset=rows[:8],
    data_collator=collate,
    compute_loss_func=function if VARIANT == "function" else None,
)
trainer.train()
outcome(trainer, evaluated=trainer.evaluate()["eval_loss"])
