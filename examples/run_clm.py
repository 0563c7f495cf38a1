"""Train a language model with `Trainer`: a transformers script with one line changed, an import.

    gpumix launch examples/run_clm.py --output_dir runs/clm    # one process per GPU
    python examples/run_clm.py --output_dir runs/clm           # one device

A small GPT-2 learns from text files, with a tokenizer trained on the same files: nothing is
downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

from gpumix.integrations.transformers import Trainer


@dataclass
class DataArguments:
    files: list[str] = field(
        default_factory=lambda: [str(Path(__file__).parents[1] / "README.md")],
        metadata={"help": "Text files to train on."},
    )
    block_size: int = 32
    vocabulary: int = 256


def tokenizer_of(lines: list[str], size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def blocks_of(lines: list[str], tokenizer: PreTrainedTokenizerFast, size: int) -> Dataset:
    """All tokens one behind the other, cut into blocks."""
    tokens = list(chain.from_iterable(tokenizer(lines)["input_ids"]))
    blocks = [tokens[n : n + size] for n in range(0, len(tokens) - size + 1, size)]
    return Dataset.from_dict({"input_ids": blocks, "labels": blocks})


def main() -> None:
    parser = HfArgumentParser((DataArguments, TrainingArguments))
    data, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    lines = [line for file in data.files for line in Path(file).read_text().splitlines()]
    tokenizer = tokenizer_of(lines, data.vocabulary)
    blocks = blocks_of(lines, tokenizer, data.block_size)
    split = blocks.train_test_split(test_size=0.1, seed=args.seed)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=data.block_size,
        n_embd=64,
        n_layer=3,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=args,
        train_dataset=split["train"],
        eval_dataset=split["test"],
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.save_state()


if __name__ == "__main__":
    main()
