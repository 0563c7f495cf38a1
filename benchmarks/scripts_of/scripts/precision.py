"""Computed in half precision, where the stock trainer casts within operations."""

# variants: bf16 fp16
# limit: 1e-2
from transformers import Trainer

from scripts_of.parts import VARIANT, arguments, collate, language, llama, outcome

trainer = Trainer(
    model=llama(),
    args=arguments(learning_rate=1e-3, **{VARIANT: True}),
    train_dataset=language(),
    eval_dataset=language(7, seed=9),
    data_collator=collate,
)
trainer.train()
outcome(trainer, evaluated=trainer.evaluate()["eval_loss"])
