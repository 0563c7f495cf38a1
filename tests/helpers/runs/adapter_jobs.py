"""Jobs that train adapters, and the same training by stock libraries in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from toys import tokens

from gpumix.engine.sharding.initial_weights import make_source
from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.schema.job.job import ModelSpec
from gpumix.schema.reading.read import read_job
from gpumix.train.rank_setup.model import build_model
from helpers.runs.jobs import LENGTH, metrics, write_job
from helpers.training import quantised as q

STEPS, SAMPLES = 4, 8


def adapter_job(folder: Path, base: Path, kind: str | None, **more: Any) -> Path:
    """Each step trains on all samples."""
    lora = {"rank": q.RANK, **more.pop("lora", {})}
    model = {"config": str(base / "config.json"), "weights": str(base), "lora": lora, "base": kind}
    return write_job(
        folder,
        model={key: value for key, value in model.items() if value is not None},
        data={"factory": "toys:tokens", "arguments": {"samples": SAMPLES}, "validation_split": 0},
        global_batch_size=SAMPLES,
        max_steps=STEPS,
        optimizer={"lr": 1e-2, "weight_decay": 0.0},
        max_grad_norm=None,
        lr_scheduler={"type": "constant"},
        logging_steps=1,
        **more,
    )


def losses(job_file: Path) -> list[float]:
    return [one["loss"] for one in metrics(job_file.parent / "run")]


def stock_losses(base: Path, job_file: Path) -> list[float]:
    """The libraries' own in one process, with adapters that begin as those of the job."""
    spec = read_job(job_file).model
    assert spec.lora is not None
    ours = build_model(spec, folder=job_file.parent, seed=0)
    source = make_source(ours, spec.weights)
    slots = {s.name: s for unit in split_into_units(ours).all for s in unit.slots}
    model = load_adapted(base, spec)
    begin = {n.removeprefix("base_model.model."): p for n, p in model.named_parameters()}
    trained = {name: p for name, p in begin.items() if p.requires_grad}
    assert {n for n, s in slots.items() if s.parameter.requires_grad} == trained.keys()
    with torch.no_grad():
        for name, parameter in trained.items():
            recipe = slots[name].parameter
            parameter.copy_(source(name, recipe, 0, recipe.numel()).view(recipe.shape))
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    rows = tokens(SAMPLES, LENGTH)
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def load_adapted(base: Path, spec: ModelSpec) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    assert spec.lora is not None
    if spec.base is None:
        model = LlamaForCausalLM.from_pretrained(base).train()
    else:
        model = q.load_base(base, spec.base)
    config = LoraConfig(
        r=spec.lora.rank,
        lora_alpha=2 * spec.lora.rank,
        target_modules="all-linear",
        use_dora=spec.lora.dora,
    )
    return get_peft_model(model, config)
