"""A run that ends after three steps, and goes on from its checkpoint in a new trainer."""

from transformers import Trainer

from scripts_of.parts import arguments, collate, language, llama, outcome


def trainer_of(steps):
    args = arguments(
        max_steps=steps, save_strategy="steps", save_steps=3, lr_scheduler_type="constant"
    )
    return Trainer(model=llama(), args=args, train_dataset=language(), data_collator=collate)


trainer_of(3).train()
trainer = trainer_of(6)
trainer.train(resume_from_checkpoint=True)
outcome(trainer)
