"""A language model on texts of unlike lengths, evaluated as it goes."""
# variants: two accumulated smoothed

from transformers import Trainer

from scripts_of.parts import VARIANT, arguments, collate, language, llama, outcome

more = {
    "two": {"num_train_epochs": 2, "max_steps": -1},  # the last batch of an epoch has two samples
    "accumulated": {"gradient_accumulation_steps": 3, "max_steps": 3},
    "smoothed": {"label_smoothing_factor": 0.1},
}[VARIANT]
trainer = Trainer(
    model=llama(),
    args=arguments(eval_strategy="steps", eval_steps=2, lr_scheduler_type="cosine", **more),
    train_dataset=language(40 if VARIANT == "accumulated" else 26),
    eval_dataset=language(9, seed=8),
    data_collator=collate,
)
trainer.train()
outcome(trainer)
