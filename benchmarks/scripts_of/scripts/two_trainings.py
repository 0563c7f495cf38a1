"""The head alone is trained first, then all of the same model, by a second trainer."""

import torch
from transformers import Trainer

from scripts_of.parts import arguments, bert, collate, labelled, logged, outcome, report

rows = labelled(lambda text: sum(text) % 3)
model = bert("SequenceClassification", num_labels=3)
model.bert.requires_grad_(False)
first = Trainer(model=model, args=arguments(), train_dataset=rows, data_collator=collate)
first.train()
report(first=logged(first))
model.bert.requires_grad_(True)
trainer = Trainer(model=model, args=arguments(), train_dataset=rows, data_collator=collate)
trainer.train()
with torch.no_grad():
    model.eval()
    called = model(input_ids=torch.tensor([[5, 6, 7]])).logits
outcome(trainer, called=called)
