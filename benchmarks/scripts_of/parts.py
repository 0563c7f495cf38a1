"""What the scripts have in common: small models, data, arguments, and what they report.

A script is written for one process or several: a batch of all processes has `BATCH` samples.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import pad
from transformers import TrainingArguments

PROCESSES = int(os.environ.get("WORLD_SIZE", 1))
MAIN = os.environ.get("RANK", "0") == "0"
VARIANT = sys.argv[1] if len(sys.argv) > 1 else ""
BATCH, RATE, WORDS = 12, 1e-2, 97
NOT_COMPARED = ("runtime", "_time", "per_second", "flos", "epoch", "step")
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

reported: dict[str, Any] = {}


def report(**found: Any) -> None:
    """Tell results, which are compared; `weights` those of the first process alone."""
    reported.update(found)
    if MAIN:
        print(*(f"{name}: {str(value)[:300]}" for name, value in found.items()), sep="\n")


def folder() -> str:
    """Where this run writes: the same folder on all processes."""
    return os.environ.get("OUTPUT") or tempfile.mkdtemp(prefix="script-")


# -- models ----------------------------------------------------------------------------------------


def llama(**more: Any) -> Any:
    transformers.set_seed(3)
    known = {"vocab_size": WORDS, "num_key_value_heads": 2, "pad_token_id": 0, **SIZES}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(known | more)))


def bert(head: str, **more: Any) -> Any:
    transformers.set_seed(3)
    config = transformers.BertConfig(vocab_size=WORDS, **SIZES, **NO_DROPOUT, **more)
    return getattr(transformers, f"BertFor{head}")(config)


def t5() -> Any:
    transformers.set_seed(3)
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=WORDS, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
            dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip


# -- data ------------------------------------------------------------------------------------------


def texts(number: int = 26, *, seed: int = 1, least: int = 3, most: int = 18) -> list[list[int]]:
    """Texts of unlike lengths, as tokens."""
    draw = random.Random(seed)
    return [draw.choices(range(5, WORDS), k=draw.randint(least, most)) for _ in range(number)]


def language(number: int = 26, *, seed: int = 1) -> list[dict[str, list[int]]]:
    """Texts whose beginnings are not trained on."""
    draw = random.Random(seed)
    rows = []
    for text in texts(number, seed=seed):
        begin = draw.randrange(len(text) - 1)
        labels = [-100] * begin + text[begin:]
        rows.append({"input_ids": text, "attention_mask": [1] * len(text), "labels": labels})
    return rows


def labelled(
    label: Callable[[list[int]], Any], number: int = 26, *, seed: int = 1
) -> list[dict[str, Any]]:
    """Texts with the label of each."""
    return [
        {"input_ids": text, "attention_mask": [1] * len(text), "labels": label(text)}
        for text in texts(number, seed=seed)
    ]


def without_labels(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "labels"} for row in rows]


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch of rows, padded at their ends: labels with -100, all else with 0."""
    batch = {}
    for name in rows[0]:
        values = [torch.as_tensor(row[name]) for row in rows]
        if values[0].ndim:
            longest = max(len(one) for one in values)
            fill = -100 if name == "labels" else 0
            rest = [0, 0] * (values[0].ndim - 1)
            values = [pad(v, (*rest, 0, longest - len(v)), value=fill) for v in values]
        batch[name] = torch.stack(values)
    return batch


def pictures(number: int = 26, *, size: int = 16, seed: int = 2) -> Tensor:
    return torch.randn(number, 3, size, size, generator=torch.Generator().manual_seed(seed))


# -- Trainer ---------------------------------------------------------------------------------------


def arguments(kind: type[TrainingArguments] = TrainingArguments, **more: Any) -> Any:
    """Rounding moves what has no gradient, as a key's bias, by whole steps of AdamW's; by far less
    with this epsilon."""
    known = {
        "per_device_train_batch_size": BATCH // PROCESSES,
        "per_device_eval_batch_size": 6 // PROCESSES,
        "max_steps": 4,
        "learning_rate": RATE,
        "adam_epsilon": 1e-3,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 5,
    }
    return kind(folder(), **(known | more))


def logged(trainer: Any) -> list[dict[str, Any]]:
    """All that was logged except times and paths."""
    return [
        {k: v for k, v in entry.items() if not any(part in k for part in NOT_COMPARED)}
        for entry in trainer.state.log_history
    ]


def saved(trainer: Any, name: str = "saved") -> dict[str, Tensor]:
    """The weights of all files that `save_model` writes; on the first process alone."""
    place = Path(trainer.args.output_dir) / name
    trainer.save_model(str(place))
    return weights_in(place)


def weights_in(place: Path) -> dict[str, Tensor]:
    if not MAIN:
        return {}
    return {
        k: v for path in sorted(place.glob("*.safetensors")) for k, v in load_file(path).items()
    }


def outcome(trainer: Any, **more: Any) -> None:
    """Report a trainer's logs and weights."""
    weights = saved(trainer)
    report(logs=logged(trainer), weights=weights, **more)
