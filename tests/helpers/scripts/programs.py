"""What tests of integrations train: stock programs, and the same ones with another import.

Functions run in ranks of `harness.run_ranks`; results are plain Python.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.report.run import Run
from gpumix.schema.plan.plan import Plan
from helpers.processes.commands import share_compiled
from helpers.training.models import ARCHITECTURES
from helpers.training.reference import SEED, Share, plan_for
from helpers.training.staging import rows, staged_plan

LLAMA = ARCHITECTURES["llama"]
SAMPLES, GLOBAL_BATCH = 50, 12  # the last batch of an epoch has 2 samples


class Texts(Dataset):
    """Samples of unequal length, padded; of few words, so that something is learnt."""

    def __init__(self, samples: int = SAMPLES, seed: int = 1) -> None:
        rows = LLAMA.batch(samples, torch.Generator().manual_seed(seed))
        tokens = rows["input_ids"] % 4
        labels = tokens.masked_fill(rows["labels"] == -100, -100)
        self.rows = {**rows, "input_ids": tokens, "labels": labels}

    def __len__(self) -> int:
        return len(self.rows["input_ids"])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: values[index] for name, values in self.rows.items()}


def model() -> nn.Module:
    """As a script makes it: whole, on each rank."""
    torch.manual_seed(SEED)
    return LLAMA.factory()


def unlike_ranks() -> Plan:
    """One computes most, one little, one nothing; they store other parts than that."""
    shares = [Share(8, 3, 1), Share(4, 4, 5), Share(0, 0, 2)]
    return plan_for(model(), shares, zero_stage=3)


def other_ranks() -> Plan:
    return plan_for(model(), [Share(5, 2, 3), Share(7, 4, 1)], zero_stage=2)


def two_stages() -> Plan:
    plan = staged_plan("llama", rows([12], [8, 4]), zero_stage=1)
    return plan.model_copy(update={"model": split_into_units(model()).fingerprint()})


def as_launched(folder: Path) -> None:
    """Let this rank of the harness look as if a launcher had started it, on made-up devices."""
    multiprocessing.current_process()._config["daemon"] = False  # it may have data workers
    default, *_ = multiprocessing.get_all_start_methods()  # they start as those of a script
    multiprocessing.set_start_method(default, force=True)
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    os.environ.update(OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true")
    share_compiled(folder / "cache" / "gpumix")
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    if world > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ.update({name: str(value) for name, value in place.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    cluster = folder / f"cluster-{rank}.yaml"
    cluster.write_text(f"- {{class: d, count: {world}, memory: 300MB, accelerator: cpu}}\n")
    os.environ["GPUMIX_CLUSTER"] = str(cluster)


def arguments(output: Path, batch: int, **settings: Any) -> Any:
    """`TrainingArguments` of the tests' script."""
    from transformers import TrainingArguments

    defaults = {
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_steps": 4,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "per_device_eval_batch_size": 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 5,
    }
    return TrainingArguments(
        output_dir=str(output),
        per_device_train_batch_size=batch,
        **(defaults | settings),
    )


def make_accelerator(
    world: int, plan: Callable[[], Plan | None] = lambda: None, **settings: Any
) -> Any:
    """Accelerate's own accelerator on one rank, gpumix's by a plan on several."""
    if world == 1:
        from accelerate import Accelerator

        return Accelerator(**settings)
    from gpumix import Accelerator

    return Accelerator(plan=plan(), **settings)


def train_in_loop(accelerator: Any, network: Any, optimizer: Any, loader: Any) -> list[float]:
    """The losses of a plain loop over what was prepared."""
    losses = []
    for batch in loader:
        loss = network(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def accuracy(prediction: Any) -> dict[str, float]:
    """Of next tokens, where there are labels."""
    guessed, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    counted = labels != -100
    return {"accuracy": float((guessed == labels)[counted].mean()), "seen": int(counted.sum())}


def best(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def told_of_input(run: Run) -> None:
    """A run tells what all of its time was spent on, and that batches were waited for."""
    classes = [one.shares for one in run.figures.classes]
    assert classes
    for shares in (*classes, *(one.shares for one in run.history.steps)):
        assert shares is not None
        assert sum(asdict(shares).values()) == pytest.approx(1.0)
        assert shares.compute > 0.0
    assert all(shares is not None and shares.input > 0.0 for shares in classes)


def log_of(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def saved(folder: Path) -> dict[str, np.ndarray]:
    """The weights in a folder that transformers wrote."""
    from transformers import LlamaForCausalLM

    found = LlamaForCausalLM.from_pretrained(folder).state_dict()
    return {name: value.numpy() for name, value in found.items()}


# -- what programs find on their disks -------------------------------------------------------------


# Which tokens are trained on is for the template to say.
CHAT_TEMPLATE = """
{%- for message in messages -%}
{{- message['role'] + ' ' -}}
{%- if message['role'] == 'assistant' -%}
{% generation %}{{ message['content'] + ' <eos>' }}{% endgeneration %}
{%- else -%}{{ message['content'] + ' <eos> ' }}
{%- endif -%}
{%- endfor -%}
"""


def tokenizer(words: int = 60) -> Any:
    """Knows so many words, `w0` and the others, one token each."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = ["<unk>", "<pad>", "<eos>", *(f"w{number}" for number in range(words))]
    levels = models.WordLevel({word: n for n, word in enumerate(known)}, unk_token="<unk>")
    splits = Tokenizer(levels)
    splits.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=splits, **special)


def in_folder(network: Any, folder: Path) -> str:
    """A model's folder, as `save_pretrained` makes it, with the tokenizer."""

    def make(making: Path) -> None:
        network.save_pretrained(making)
        tokenizer().save_pretrained(making)

    return str(_made_once(folder, make))


def in_hub_cache(network: Any, cache: Path) -> str:
    """The name of a model that lies in the cache of the hub, which this process cannot reach."""
    from huggingface_hub import constants

    def make(making: Path) -> None:
        (making / "refs").mkdir(parents=True)
        (making / "refs" / "main").write_text("0" * 40)
        in_folder(network, making / "snapshots" / ("0" * 40))

    constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = str(cache), True
    _made_once(cache / "models--owner--small", make)
    return "owner/small"


def _made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Ranks make it at once: it is there whole, or not at all."""
    if not folder.exists():
        making = folder.with_name(f"{folder.name}-{os.getpid()}")
        make(making)
        with suppress(OSError):
            making.rename(folder)
    return folder
