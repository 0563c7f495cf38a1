"""A stream of texts without a length."""

import torch
from transformers import Trainer

from scripts_of.parts import arguments, collate, language, llama, outcome


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(language(60))


trainer = Trainer(model=llama(), args=arguments(), train_dataset=Stream(), data_collator=collate)
trainer.train()
outcome(trainer)
