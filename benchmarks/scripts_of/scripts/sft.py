"""TRL's trainer: texts, prompts with completions, packs, adapters."""

# variants: texts prompts packed wrapped adapters
import random

import peft
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import SFTConfig, SFTTrainer

from scripts_of.parts import VARIANT, arguments, llama, logged, report, saved

known = ["<unk>", "<pad>", "<eos>", *(f"w{number}" for number in range(60))]
levels = Tokenizer(models.WordLevel({w: n for n, w in enumerate(known)}, unk_token="<unk>"))
levels.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=levels, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"
)
draw = random.Random(1)
lines = [" ".join(draw.choices(known[3:], k=draw.randint(3, 14))) for _ in range(60)]
if VARIANT == "prompts":
    halves = [line.partition(" ") for line in lines]
    data = Dataset.from_list([{"prompt": a, "completion": f" {b}"} for a, _, b in halves])
else:
    data = Dataset.from_dict({"text": lines})
packed = VARIANT in ("packed", "wrapped")
trainer = SFTTrainer(
    model=llama(vocab_size=64, num_hidden_layers=2),
    args=arguments(
        SFTConfig,
        max_steps=3,
        max_length=16,
        bf16=False,
        packing=packed,
        packing_strategy="wrapped" if VARIANT == "wrapped" else "bfd",
    ),
    train_dataset=data,
    eval_dataset=data.select(range(9)),
    processing_class=tokenizer,
    peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    if VARIANT == "adapters"
    else None,
)
trainer.train()
evaluated = trainer.evaluate()["eval_loss"]
names = ("loss", "grad_norm", "learning_rate", "num_tokens")
logs = [{k: v for k, v in entry.items() if k in names} for entry in logged(trainer)]
report(logs=logs, evaluated=evaluated, weights=saved(trainer))
