"""A language model: more steps than calls may nest; nothing may grow by a call in each step."""

import sys

from transformers import Trainer

from scripts_of.parts import BATCH, arguments, collate, language, llama, outcome

CALLS, STEPS = 400, 450
sys.setrecursionlimit(CALLS)
trainer = Trainer(
    model=llama(hidden_size=16, intermediate_size=16, num_hidden_layers=2),
    args=arguments(
        max_steps=STEPS, logging_steps=50, optim="sgd", learning_rate=0.01, weight_decay=0.0
    ),
    train_dataset=language(BATCH * STEPS // 10),
    data_collator=collate,
)
trainer.train()
outcome(trainer, steps=trainer.state.global_step)
