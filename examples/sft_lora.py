"""Train LoRA adapters with TRL's `SFTTrainer`: one line is changed, its import.

    gpumix launch examples/sft_lora.py --output_dir runs/lora    # one process per GPU
    python examples/sft_lora.py --output_dir runs/lora           # one device

Frozen weights are sharded over the devices like trained ones. Nothing is downloaded: the model
has random weights, and the tokenizer knows a few words.
"""

from __future__ import annotations

import random

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    set_seed,
)
from trl import SFTConfig

from gpumix.integrations.trl import SFTTrainer

SPECIAL = ["<unk>", "<pad>", "<eos>"]
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def tokenizer() -> PreTrainedTokenizerFast:
    words = [*SPECIAL, *NUMBERS, "plus", "is"]
    known = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<unk>"))
    known.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=known, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"
    )


def sums(samples: int) -> Dataset:
    """Texts as `two plus three is five`."""
    draw = random.Random(0)
    pairs = [(draw.randrange(5), draw.randrange(5)) for _ in range(samples)]
    texts = [f"{NUMBERS[a]} plus {NUMBERS[b]} is {NUMBERS[a + b]}" for a, b in pairs]
    return Dataset.from_dict({"text": texts})


def main() -> None:
    parser = HfArgumentParser((SFTConfig,))
    if not torch.cuda.is_available():  # TRL computes in bf16, for which it asks for a GPU
        parser.set_defaults(bf16=False)
    (args,) = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
    )
    trainer = SFTTrainer(
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=sums(200),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"]),
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    main()
