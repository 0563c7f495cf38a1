"""Epochs whose last step has fewer batches, and whose last batch has fewer samples."""

# variants: kept dropped
# plan: B
from transformers import Trainer

from scripts_of.parts import PROCESSES, VARIANT, arguments, collate, language, llama, outcome

args = arguments(
    per_device_train_batch_size=6 // PROCESSES,
    gradient_accumulation_steps=2,
    max_steps=-1,
    num_train_epochs=2,
    dataloader_drop_last=VARIANT == "dropped",
    warmup_steps=2,
)
trainer = Trainer(model=llama(), args=args, train_dataset=language(34), data_collator=collate)
trainer.train()
outcome(trainer, steps=trainer.state.global_step)
