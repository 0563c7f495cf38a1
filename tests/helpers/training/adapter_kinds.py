"""The smallest configuration of each kind of adapter that PEFT has, on a tiny Llama and BERT, and
the losses of training it: by plain PyTorch in one process, and by a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from gpumix.engine.prepare import prepare
from gpumix.integrations.common.plan_and_shard import check_loaded_weights
from gpumix.schema.errors import GpumixError
from gpumix.schema.plan.plan import ZeroStage
from helpers.training.models import ARCHITECTURES, WIDTH, Architecture, Batch
from helpers.training.reference import Share, batches, own_rows, plan_for

SEED, STEPS = 5, 3
TARGETS = {"llama": ["q_proj", "v_proj"], "bert": ["query", "value"]}
HEADS = {"llama": ["v_proj"], "bert": ["value"]}
FEED_FORWARD = {"llama": ["down_proj"], "bert": ["output.dense"]}
NORMS = {"llama": ["input_layernorm"], "bert": ["LayerNorm"]}
EMBEDDING = {"llama": ["embed_tokens"], "bert": ["word_embeddings"]}
PROMPT = {"num_virtual_tokens": 3}
SETTINGS: dict[str, dict[str, Any]] = {
    "LORA": {"r": 2},
    "ADALORA": {"init_r": 3, "target_r": 2, "total_step": 10},
    "ADAPTION_PROMPT": {"adapter_len": 2, "adapter_layers": 1},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 8},
    "CARTRIDGE": PROMPT,
    "CPT": {"cpt_token_ids": [1, 2, 3], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 3]},
    "FOURIERFT": {"n_frequency": 8},
    "GRALORA": {"r": 4, "gralora_k": 2},
    "LILY": {"r": 2, "num_B": 2, "stride_A": 1},
    "MISS": {"r": 2},
    "MULTITASK_PROMPT_TUNING": {**PROMPT, "num_tasks": 2},
    "OFT": {"oft_block_size": 4, "r": 0},
    "OSF": {"effective_rank": 2},
    "P_TUNING": PROMPT,
    "POLY": {"r": 2, "n_tasks": 2, "n_skills": 2},
    "PREFIX_TUNING": PROMPT,
    "PROMPT_TUNING": PROMPT,
    "ROAD": {"group_size": 8},
    "TRAINABLE_TOKENS": {"token_indices": [3, 4, 5]},
    "UNILORA": {"r": 2, "theta_d_length": 16},
    "VBLORA": {"r": 2, "num_vectors": 4, "vector_length": 8, "topk": 2},
    "WAVEFT": {"n_frequency": 8},
}
PROMPTS = {name for name, given in SETTINGS.items() if "num_virtual_tokens" in given}
UNTARGETED = PROMPTS | {"ADAPTION_PROMPT", "CPT", "SHADOW", "XLORA"}


def list_kinds() -> list[str]:
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    return [kind.value for kind in PEFT_TYPE_TO_CONFIG_MAPPING]


def make_config(kind: str, name: str, **given: Any) -> Any:
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    config = {one.value: config for one, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}[kind]
    given |= SETTINGS.get(kind, {})
    fields = config.__dataclass_fields__
    if "r" in fields and "r" not in given and isinstance(fields["r"].default, int):
        given["r"] = 2
    if kind not in UNTARGETED and "target_modules" in fields:
        given["target_modules"] = TARGETS[name]
    if kind == "IA3":
        given["target_modules"] = TARGETS[name] + FEED_FORWARD[name]
        given["feedforward_modules"] = FEED_FORWARD[name]
    if kind == "LN_TUNING":
        given["target_modules"] = NORMS[name]
    if kind == "TRAINABLE_TOKENS":
        given["target_modules"] = EMBEDDING[name]
    task = "CAUSAL_LM" if name == "llama" else "SEQ_CLS" if kind in PROMPTS else None
    return config(task_type=task, **given)


def of_kind(kind: str, name: str) -> Architecture:
    """The model and its batches: prompts are for BERT with classes, which has labels of samples."""
    if name == "bert" and kind in PROMPTS:
        return Architecture("bert-classes", _bert_with_classes, _classes)
    return ARCHITECTURES[name]


def _bert_with_classes() -> nn.Module:
    from transformers import BertForSequenceClassification

    config: Any = ARCHITECTURES["bert"].factory().config
    config.num_labels = 4
    return BertForSequenceClassification(config)


def _classes(n: int, generator: torch.Generator) -> Batch:
    batch = ARCHITECTURES["bert"].batch(n, generator)
    return {**batch, "labels": torch.randint(4, (n,), generator=generator)}


def adapted(kind: str, name: str, **given: Any) -> nn.Module:
    """A model with an adapter, from the same random numbers each time."""
    from peft import get_peft_model

    with TemporaryDirectory() as folder:
        if kind == "XLORA":  # it mixes adapters that are there
            first = get_peft_model(make_base("LORA", name), make_config("LORA", name))
            first.save_pretrained(folder)
            given |= {"hidden_size": WIDTH, "adapters": {"0": folder}}
        torch.manual_seed(SEED)
        config = make_config(kind, name, **given)
        found: nn.Module = get_peft_model(make_base(kind, name), config).train()
    return found


def make_base(kind: str, name: str) -> Any:
    model: Any = of_kind(kind, name).factory()
    model.config.use_cache = False
    return model


def optimizer_for(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def with_task(kind: str, batch: Batch) -> Batch:
    """Some kinds are of several tasks, and their batches tell which."""
    if kind not in ("MULTITASK_PROMPT_TUNING", "POLY"):
        return batch
    return {**batch, "task_ids": torch.zeros(len(batch["input_ids"]), dtype=torch.long)}


def train_stock(kind: str, name: str, size: int) -> list[float] | str:
    """Losses of plain PyTorch, or why PEFT does not train this kind."""
    try:
        return _train_stock(kind, name, size)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _train_stock(kind: str, name: str, size: int) -> list[float]:
    model = adapted(kind, name)
    optimizer = optimizer_for(p for p in model.parameters() if p.requires_grad)
    found = []
    torch.manual_seed(SEED)
    for batch in batches(of_kind(kind, name), size, STEPS):
        optimizer.zero_grad()
        loss = model(**with_task(kind, batch)).loss
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def train_by_plan(
    kind: str, name: str, shares: Sequence[Share], zero_stage: ZeroStage = 3
) -> list[float] | str:
    """Losses of a plan, on one of its ranks; or the error that refuses it."""
    model = adapted(kind, name)
    found: list[float] = []
    try:
        check_loaded_weights(model)
        engine = prepare(model, plan_for(model, shares, zero_stage=zero_stage))
        optimizer = optimizer_for(engine.parameters())
        for batch in batches(of_kind(kind, name), sum(s.samples for s in shares), STEPS):
            optimizer.zero_grad()
            own = own_rows(with_task(kind, batch), shares, engine.comm.rank)
            loss = engine.step(own)
            optimizer.step()
            found.append(loss.item())
    except GpumixError as error:
        assert not found, "refused before it is trained"
        return str(error)
    return found
