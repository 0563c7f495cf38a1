"""Adapters of PEFT on a frozen language model, saved as PEFT saves them."""

# variants: lora dora ia3 loha modules prompts encoded prefix
import peft
from transformers import Trainer

from scripts_of.parts import VARIANT, arguments, collate, language, llama, outcome

parts, task = ["q_proj", "v_proj"], "CAUSAL_LM"
transformation = {
    "lora": lambda: peft.LoraConfig(r=4, target_modules=parts, task_type=task),
    "dora": lambda: peft.LoraConfig(r=4, target_modules=parts, use_dora=True, task_type=task),
    "ia3": lambda: peft.IA3Config(
        target_modules=[*parts, "down_proj"], feedforward_modules=["down_proj"], task_type=task
    ),
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=parts, task_type=task),
    "modules": lambda: peft.LoraConfig(
        r=4, target_modules=parts, modules_to_save=["lm_head"], task_type=task
    ),
    "prompts": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type=task),
    "encoded": lambda: peft.PromptEncoderConfig(num_virtual_tokens=3, task_type=task),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type=task),
}[VARIANT]()
model = peft.get_peft_model(llama(), transformation)
trainer = Trainer(
    model=model,
    args=arguments(learning_rate=1e-2),
    train_dataset=language(),
    eval_dataset=language(7, seed=9),
    data_collator=collate,
)
trainer.train()
evaluated = trainer.evaluate()["eval_loss"]
outcome(trainer, evaluated=evaluated)
