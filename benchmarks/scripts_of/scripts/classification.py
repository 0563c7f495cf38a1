"""BERT that sorts texts, with an accuracy, of datasets' own tables; the best checkpoint is kept."""

# variants: A B numbers groups accumulated
import numpy as np
from datasets import Dataset
from transformers import Trainer

from scripts_of.parts import VARIANT, arguments, bert, collate, labelled, outcome

number = VARIANT == "numbers"
label = (lambda text: sum(text) / 500.0) if number else (lambda text: sum(text) % 3)
train, held_out = (Dataset.from_list(labelled(label, n, seed=n)) for n in (30, 11))


def metrics(predicted):
    if number:
        return {"distance": float(np.abs(predicted.predictions[:, 0] - predicted.label_ids).mean())}
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


trainer = Trainer(
    model=bert("SequenceClassification", num_labels=1 if number else 3),
    args=arguments(
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        max_steps=-1,
        num_train_epochs=2,
        gradient_accumulation_steps=2 if VARIANT == "accumulated" else 1,
        train_sampling_strategy="group_by_length" if VARIANT == "groups" else "random",
    ),
    train_dataset=train,
    eval_dataset=held_out,
    data_collator=collate,
    compute_metrics=metrics,
)
trainer.train()
predicted = trainer.predict(held_out)
# By length, samples of one length come in a random order.
rows = sorted(predicted.predictions.tolist())
outcome(trainer, predicted=rows, test_loss=predicted.metrics["test_loss"])
