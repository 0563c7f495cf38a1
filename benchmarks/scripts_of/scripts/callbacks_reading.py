"""Callbacks that read weights and gradients, of a model that no rank divides."""

# variants: weights gradients
# plan: D
from transformers import Trainer, TrainerCallback

from scripts_of.parts import VARIANT, arguments, collate, language, llama, outcome

seen = []


class Watch(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **more):
        if VARIANT == "gradients":
            seen.append({n: p.grad.norm().item() for n, p in model.named_parameters()})

    def on_step_end(self, args, state, control, model=None, **more):
        if VARIANT == "weights":
            seen.append({n: p.detach().norm().item() for n, p in model.named_parameters()})


trainer = Trainer(
    model=llama(),
    args=arguments(),
    train_dataset=language(),
    data_collator=collate,
    callbacks=[Watch()],
)
trainer.train()
outcome(trainer, seen=seen)
