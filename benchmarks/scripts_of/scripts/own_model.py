"""A model that is no transformers model: a loss and logits in a tuple, as nanoGPT returns them."""

# variants: blocks plain
# plan: B
import torch
from torch import nn
from torch.nn import functional
from transformers import Trainer

from scripts_of.parts import VARIANT, WORDS, arguments, outcome, texts


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.mix = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x):
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[None, :, None]
        return x + self.mix(self.norm(past))


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(3 if VARIANT == "blocks" else 1))
        self.head = nn.Linear(32, WORDS)

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        if labels is None:
            return (logits,)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


torch.manual_seed(3)
rows = [
    {"input_ids": torch.tensor(t[:-1]), "labels": torch.tensor(t[1:])}
    for t in texts(26, least=9, most=9)
]
trainer = Trainer(model=Small(), args=arguments(), train_dataset=rows, eval_dataset=rows[:7])
trainer.train()
evaluated = trainer.evaluate()["eval_loss"]
outcome(trainer, evaluated=evaluated, predicted=trainer.predict(rows[:5]).predictions)
