"""Programs that train adapters on a model that bitsandbytes quantised: as stock libraries run them
in one process, and by plans with another import.

Functions run in ranks of `harness.run_ranks`, or in a process of its own; results are plain Python.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from helpers.scripts.programs import (
    CHAT_TEMPLATE,
    as_launched,
    make_accelerator,
    tokenizer,
    train_in_loop,
)
from helpers.training import quantised as q
from helpers.training.reference import Share

STEPS, BATCH = 6, 8
ADAPTERS = "adapter_model.safetensors"


class Tokens:
    """Random samples, always the same."""

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: rows[0] for name, rows in q.make_batch(100 + index, 1).items()}


def plan(folder: Path, base: str, *, other: bool = False) -> Any:
    """Two unlike ranks: the second one stores most of the state; or the other way round."""
    shares = [Share(5, 2, 1), Share(3, 3, 3)]
    shares = shares[::-1] if other else shares
    settings = {"sequence_length": q.LENGTH, "zero_stage": 3}
    return q.plan_for(q.load_adapted(folder, base), shares, **settings)


def settings(folder: Path, world: int, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": BATCH // world,
        "per_device_eval_batch_size": BATCH // world,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 5,
        **more,
    }


def run_trainer(folder: Path, world: int, resumes: bool = False) -> dict[str, Any]:
    from transformers import TrainingArguments

    more: dict[str, Any] = {}
    if world == 1:
        from transformers import Trainer
    else:
        from gpumix.integrations.transformers import Trainer

        more["plan"] = plan(folder / "base", "nf4", other=resumes)
    model = q.load_adapted(folder / "base", "nf4")
    q.lay_out_nothing(model)
    output = folder / f"trainer-{world}"
    saving = {"save_strategy": "steps", "save_steps": 3} if world > 1 else {}
    arguments = TrainingArguments(**settings(output, world, **saving))
    trainer = Trainer(
        model=model, args=arguments, train_dataset=Tokens(), eval_dataset=Tokens(), **more
    )
    checkpoint = str(output / "checkpoint-3") if resumes else None
    trainer.train(resume_from_checkpoint=checkpoint)
    return _finished(trainer, output)


def run_sft(folder: Path, world: int, kind: str = "sft") -> dict[str, Any]:
    from datasets import Dataset
    from trl import SFTConfig

    more: dict[str, Any] = {}
    if world == 1:
        from trl import SFTTrainer
    else:
        from gpumix.integrations.trl import SFTTrainer
    output, known = folder / f"{kind}-{world}", tokenizer()
    texts = [
        {"input_ids": one["input_ids"].tolist()} for one in map(Tokens().__getitem__, range(40))
    ]
    if kind == "sft in packs":
        texts = [{"input_ids": one["input_ids"][: 3 + n % 7]} for n, one in enumerate(texts)]
    elif kind == "sft of completions":
        texts = [one | {"completion_mask": mask_of(n)} for n, one in enumerate(texts)]
    elif kind == "sft of answers":
        texts = [{"messages": talk(n)} for n in range(len(texts))]
        known.chat_template = CHAT_TEMPLATE
    loading = {
        "quantization_config": q.make_config("nf4-double"),
        "device_map": {"": "cpu"},
        "dtype": "float32",
    }
    trainer = SFTTrainer(
        model=str(folder / "base"),
        args=SFTConfig(
            **settings(output, world, bf16=False, max_length=q.LENGTH, model_init_kwargs=loading),
            packing=kind == "sft in packs",
            completion_only_loss=kind == "sft of completions",
            assistant_only_loss=kind == "sft of answers",
        ),
        train_dataset=Dataset.from_list(texts),
        eval_dataset=Dataset.from_list(texts[:9]),
        processing_class=known,
        peft_config=q.lora(dora=True),
        **more,
    )
    q.lay_out_nothing(trainer.model)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad:  # TRL updates adapters of such a base in bf16; we never do
            parameter.data = parameter.data.float()
    trainer.train()
    return _finished(trainer, output)


def _finished(trainer: Any, output: Path) -> dict[str, Any]:
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(output / "final"))
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": [entry["loss"] for entry in logged],
        "evaluated": evaluated,
        "saved": str(output / "final" / ADAPTERS),
        "files": sorted(path.name for path in (output / "final").glob("*.safetensors")),
    }


def run_loop(folder: Path, world: int) -> dict[str, Any]:
    import torch
    from torch.utils.data import DataLoader

    accelerator = make_accelerator(world, lambda: plan(folder / "base", "int8"))
    model = q.load_adapted(folder / "base", "int8")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    loader = DataLoader(Tokens(), batch_size=BATCH // world)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = train_in_loop(accelerator, model, optimizer, loader)
    model.eval()
    with torch.no_grad():
        evaluated = model(**q.make_batch(7, BATCH)).loss.item() if world == 1 else None
    output = folder / f"loop-{world}"
    accelerator.unwrap_model(model).save_pretrained(
        str(output), is_main_process=accelerator.is_main_process
    )
    files = sorted(path.name for path in output.glob("*.safetensors"))
    saved = str(output / ADAPTERS)
    return {"losses": losses, "evaluated": evaluated, "saved": saved, "files": files}


def mask_of(number: int) -> list[int]:
    """Of a sample: its first tokens are not trained on, of each a different number."""
    prompt = 2 + number % 8
    return [0] * prompt + [1] * (q.LENGTH - prompt)


def talk(number: int) -> list[dict[str, str]]:
    words = [f"w{(5 * number + place) % 50}" for place in range(8)]
    said = {"user": words[: 1 + number % 4], "assistant": words[1 + number % 4 :]}
    return [{"role": role, "content": " ".join(content)} for role, content in said.items()]


KINDS_OF_SFT = ("sft", "sft in packs", "sft of completions", "sft of answers")
RUN = {
    "trainer": run_trainer,
    "loop": run_loop,
    **{kind: partial(run_sft, kind=kind) for kind in KINDS_OF_SFT},
}


def run_each(folder: Path, world: int) -> dict[str, dict[str, Any]]:
    as_launched(folder)
    os.environ["OMP_NUM_THREADS"] = "1"
    return {kind: run(folder, world) for kind, run in RUN.items()}
