"""BERT on masked words, which are masked once."""

# plan: C
import random

from transformers import Trainer

from scripts_of.parts import arguments, bert, collate, outcome, texts

draw, rows = random.Random(4), []
for text in texts(26, least=6):
    masked = [draw.random() < 0.3 or n == 1 for n in range(len(text))]
    rows.append(
        {
            "input_ids": [3 if m else word for m, word in zip(masked, text)],
            "attention_mask": [1] * len(text),
            "labels": [word if m else -100 for m, word in zip(masked, text)],
        }
    )
trainer = Trainer(
    model=bert("MaskedLM"),
    args=arguments(eval_strategy="steps", eval_steps=4),
    train_dataset=rows,
    eval_dataset=rows[:7],
    data_collator=collate,
)
trainer.train()
outcome(trainer)
