"""Means over tokens: the recipe of Accelerate's guide with gathered counts, or a plain own mean."""

# variants: recipe mean
import torch
from accelerate import Accelerator
from torch.nn import functional
from torch.utils.data import DataLoader

from scripts_of.parts import PROCESSES, VARIANT, collate, language, llama, report

accelerator = Accelerator()
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = DataLoader(language(36), batch_size=6 // PROCESSES, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses, batches = [], iter(loader)
for _ in range(3):
    parts = [next(batches) for _ in range(2 if VARIANT == "recipe" else 1)]
    items = sum((part["labels"][:, 1:] != -100).sum() for part in parts)
    items = accelerator.gather(items).sum().item()
    total = 0.0
    for part in parts:
        labels = part.pop("labels")
        logits = model(**part).logits[:, :-1].flatten(0, 1)
        labels = labels[:, 1:].flatten()
        lost = functional.cross_entropy(logits, labels, reduction="sum")
        if VARIANT == "recipe":
            loss = lost * accelerator.num_processes / items
        else:
            loss = functional.cross_entropy(logits, labels)
        accelerator.backward(loss)
        total = total + lost.detach() / items
    optimizer.step()
    optimizer.zero_grad()
    losses.append(accelerator.gather(total.reshape(1)).sum().item())
weights = accelerator.get_state_dict(model)
weights = weights if accelerator.is_main_process else {}
report(losses=losses, weights=weights)
