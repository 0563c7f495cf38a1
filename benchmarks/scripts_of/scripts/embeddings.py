"""Pairs of texts whose embeddings are drawn together, and away from those of all others."""

from torch.nn import functional
from transformers import Trainer

from scripts_of.parts import arguments, bert, collate, labelled, outcome


class Contrast(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs.pop("labels")
        outputs = model(**inputs)
        embedded = functional.normalize(outputs.logits, dim=-1)
        likeness = embedded @ embedded.T / 0.1
        others = likeness.roll(1, 0)
        loss = functional.cross_entropy(others, likeness.argmax(-1))
        return (loss, outputs) if return_outputs else loss


trainer = Contrast(
    model=bert("SequenceClassification", num_labels=8),
    args=arguments(),
    train_dataset=labelled(lambda text: 0),
    data_collator=collate,
)
trainer.train()
outcome(trainer)
