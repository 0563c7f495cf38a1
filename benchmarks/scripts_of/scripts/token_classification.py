"""A label for each word, with those of padding left out of the metrics."""

import numpy as np
from transformers import Trainer

from scripts_of.parts import arguments, bert, collate, labelled, outcome

rows = labelled(lambda text: [-100, *(word % 5 for word in text[1:])])


def metrics(predicted):
    kept = predicted.label_ids != -100
    best = predicted.predictions.argmax(-1)
    return {"accuracy": float(np.mean(best[kept] == predicted.label_ids[kept]))}


trainer = Trainer(
    model=bert("TokenClassification", num_labels=5),
    args=arguments(eval_strategy="steps", eval_steps=2),
    train_dataset=rows,
    eval_dataset=rows[:9],
    data_collator=collate,
    compute_metrics=metrics,
)
trainer.train()
outcome(trainer)
