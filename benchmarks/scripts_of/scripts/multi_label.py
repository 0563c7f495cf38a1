"""Several labels for each text, which are floats."""

# plan: B
from transformers import Trainer

from scripts_of.parts import arguments, bert, collate, labelled, outcome

rows = labelled(lambda text: [float(word in text) for word in range(10, 50, 10)])
for row in rows:
    row["labels"] = [float(x) for x in row["labels"]]
model = bert("SequenceClassification", num_labels=4, problem_type="multi_label_classification")
trainer = Trainer(
    model=model, args=arguments(), train_dataset=rows, eval_dataset=rows[:8], data_collator=collate
)
trainer.train()
evaluated = trainer.evaluate()
outcome(trainer, evaluated=evaluated["eval_loss"])
