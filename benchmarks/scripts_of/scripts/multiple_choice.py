"""Four endings for each text; the right one is the label."""

import torch
from transformers import Trainer

from scripts_of.parts import arguments, bert, outcome, texts

words = torch.tensor(texts(26 * 4, least=9, most=9)).view(26, 4, 9)
rows = [{"input_ids": four, "labels": int(four.sum()) % 4} for four in words]
trainer = Trainer(
    model=bert("MultipleChoice"), args=arguments(), train_dataset=rows, eval_dataset=rows[:7]
)
trainer.train()
evaluated = trainer.evaluate()
outcome(trainer, evaluated=evaluated["eval_loss"], predicted=trainer.predict(rows[:7]).predictions)
