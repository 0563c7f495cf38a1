"""Where an answer begins and ends."""

# plan: B
from transformers import Trainer

from scripts_of.parts import arguments, bert, collate, outcome, texts

rows = [
    {
        "input_ids": text,
        "attention_mask": [1] * len(text),
        "start_positions": 1,
        "end_positions": len(text) - 1,
    }
    for text in texts(26)
]
trainer = Trainer(
    model=bert("QuestionAnswering"),
    args=arguments(),
    train_dataset=rows,
    eval_dataset=rows[:10],
    data_collator=collate,
)
trainer.train()
predicted = trainer.predict(rows[:10])
outcome(trainer, predicted=predicted.predictions, evaluated=trainer.evaluate()["eval_loss"])
