"""Adapters that are loaded, with nothing to train, are evaluated."""

import peft
from transformers import Trainer

from scripts_of.parts import MAIN, arguments, collate, folder, language, llama, report

place = f"{folder()}/adapters-{'of' if MAIN else 'not'}"
peft.get_peft_model(
    llama(), peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
).save_pretrained(place)
model = peft.PeftModel.from_pretrained(llama(), place)
trainer = Trainer(
    model=model,
    args=arguments(),
    eval_dataset=language(11),
    data_collator=collate,
    compute_metrics=lambda p: {"best": int(p.predictions.argmax(-1).sum())},
)
evaluated = trainer.evaluate()
report(loss=evaluated["eval_loss"], best=evaluated["eval_best"])
