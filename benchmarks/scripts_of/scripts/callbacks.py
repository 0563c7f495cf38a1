"""Callbacks that read weights and gradients, stop, or let the model write while it trains."""

# variants: weights gradients stop generate
import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from scripts_of.parts import VARIANT, arguments, collate, language, llama, outcome

seen = []


class Watch(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **more):
        if VARIANT == "gradients":
            seen.append({n: p.grad.norm().item() for n, p in model.named_parameters()})

    def on_step_end(self, args, state, control, model=None, **more):
        if VARIANT == "weights":
            seen.append({n: p.detach().norm().item() for n, p in model.named_parameters()})
        if VARIANT == "generate" and state.global_step % 2 == 0:
            model.eval()
            with torch.no_grad():
                begin = torch.tensor([[5, 6, 7]])
                seen.append(model.generate(begin, max_new_tokens=5, do_sample=False).tolist())
            model.train()


more, watch = {}, Watch()
if VARIANT == "stop":
    watch = EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=10.0)
    more = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    more |= {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
trainer = Trainer(
    model=llama(),
    args=arguments(**more),
    train_dataset=language(),
    eval_dataset=language(7, seed=9),
    data_collator=collate,
    callbacks=[watch],
)
trainer.train()
outcome(trainer, seen=seen, steps=trainer.state.global_step)
