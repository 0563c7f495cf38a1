"""Texts without labels are looked at before the model is trained, and after."""

# plan: C
from transformers import Trainer

from scripts_of.parts import arguments, bert, collate, labelled, outcome, without_labels

rows = labelled(lambda text: sum(text) % 3)
trainer = Trainer(
    model=bert("SequenceClassification", num_labels=3),
    args=arguments(),
    train_dataset=rows,
    data_collator=collate,
)
unlabelled = without_labels(rows[:8])
before = trainer.predict(unlabelled).predictions
trainer.train()
outcome(trainer, before=before, after=trainer.predict(unlabelled).predictions)
