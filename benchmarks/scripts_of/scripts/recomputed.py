"""Activations are computed again, gradients clipped; a tied head, and a bare optimizer."""

# plan: C
from transformers import Trainer

from scripts_of.parts import arguments, collate, language, llama, outcome

args = arguments(
    gradient_checkpointing=True, max_grad_norm=0.5, optim="sgd", learning_rate=0.3, weight_decay=0.0
)
trainer = Trainer(
    model=llama(tie_word_embeddings=True),
    args=args,
    train_dataset=language(),
    data_collator=collate,
)
trainer.train()
outcome(trainer)
