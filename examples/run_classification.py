"""Classify texts with `Trainer`: an ordinary transformers script with one line changed, an import.

    gpumix launch examples/run_classification.py --output_dir runs/kinds    # one process per GPU
    python examples/run_classification.py --output_dir runs/kinds           # one device

A small BERT learns to tell lines of code from lines of prose in Markdown files, and the script
prints its accuracy. The tokenizer is trained on the same files: nothing is downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    TrainingArguments,
    set_seed,
)

from gpumix.integrations.transformers import Trainer

SPECIAL = ["<unk>", "<pad>"]
KINDS = ["prose", "code"]


@dataclass
class DataArguments:
    file: str = field(
        default=str(Path(__file__).parents[1] / "README.md"),
        metadata={"help": "The Markdown file."},
    )
    max_length: int = 24
    vocabulary: int = 256


def lines_of(file: str) -> Dataset:
    """Each line and its kind; indented ones are code too."""
    texts, labels, fenced = [], [], False
    for line in Path(file).read_text().splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif line.strip():
            texts.append(line.strip())
            labels.append(int(fenced or line.startswith("    ")))
    return Dataset.from_dict({"text": texts, "label": labels})


def tokenizer_of(texts: list[str], size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    known = {"unk_token": "<unk>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **known)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    guesses = prediction.predictions.argmax(-1)
    return {"accuracy": float(np.mean(guesses == prediction.label_ids))}


def main() -> None:
    parser = HfArgumentParser((DataArguments, TrainingArguments))
    data, args = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    lines = lines_of(data.file)
    tokenizer = tokenizer_of(lines["text"], data.vocabulary)

    def tokens(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return dict(tokenizer(rows["text"], truncation=True, max_length=data.max_length))

    split = lines.map(tokens, batched=True).train_test_split(test_size=0.2, seed=args.seed)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=data.max_length,
        num_labels=len(KINDS),
        id2label=dict(enumerate(KINDS)),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=tokenizer.pad_token_id,
    )
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=args,
        train_dataset=split["train"],
        eval_dataset=split["test"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_metrics=accuracy,
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
