"""Embeddings and the first layers stay as they are; others learn at rates of their own."""

# variants: bottom rates
# plan: B
import torch
from transformers import Trainer

from scripts_of.parts import VARIANT, arguments, collate, language, llama, outcome

model, more = llama(), {}
if VARIANT == "bottom":
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[:2].requires_grad_(False)
else:
    head = list(model.lm_head.parameters())
    known = {id(p) for p in head}
    body = [p for p in model.parameters() if id(p) not in known]
    groups = [{"params": body, "lr": 1e-3}, {"params": head, "lr": 1e-2, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, eps=1e-3)
    more["optimizers"] = (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
trainer = Trainer(
    model=model, args=arguments(), train_dataset=language(), data_collator=collate, **more
)
trainer.train()
outcome(trainer)
