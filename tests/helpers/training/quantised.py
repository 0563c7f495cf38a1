"""A small pretrained model, its base quantised by bitsandbytes, with adapters: as programs load it,
trained by one process and by plans.

The single process is the libraries' own: `from_pretrained` with a `BitsAndBytesConfig`, PEFT, a
plain loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gpumix.engine.engine import Engine
from gpumix.engine.loss.objective import make_objective
from gpumix.engine.prepare import prepare
from gpumix.engine.quantised.weight_formats import iterate_quantised_parameters
from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.integrations.common.plan_and_shard import without_weights
from gpumix.profiler.compute.dataflow import find_flows
from gpumix.profiler.compute.unit_kinds import separate_kinds
from gpumix.profiler.compute.unit_runner import UnitRunner
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Stage, Worker
from gpumix.testing.plans import Share, plan_for
from helpers.training.reference import Trained, joined, optimizer_for, pieces_of

VOCABULARY, LENGTH, BATCH, RANK = 64, 12, 6, 4
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4-double": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },
    "int8": {"load_in_8bit": True},
}
# Alone, two, and three ranks of which one only stores and one only computes.
SHARES = {
    1: [Share(6, 2, 1)],
    2: [Share(2, 1, 3), Share(4, 3, 1)],
    3: [Share(3, 2, 1), Share(0, 0, 3), Share(3, 2, 0)],
}


def save_base(folder: Path) -> Path:
    """A Llama with random weights, in a folder as the hub has them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=4, **SIZES)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_config(base: str, **settings: Any) -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(**CONFIGS[base], **settings)


def load_base(folder: Path, base: str, **settings: Any) -> Any:
    """The model as a program loads it."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(
        folder,
        quantization_config=make_config(base, **settings),
        device_map={"": "cpu"},
        dtype=torch.float32,
    )
    model.config.use_cache = False
    return model.train()


def lay_out_nothing(model: nn.Module) -> None:
    """Keep bitsandbytes from laying out weights anew in evaluation, as it does on some CPUs: it
    rounds constants then, and trains no further."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def lora(*, dora: bool = False) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=RANK, target_modules="all-linear", use_dora=dora)


def load_adapted(folder: Path, base: str, *, dora: bool = False, **settings: Any) -> nn.Module:
    """The same with adapters, which have begun to differ from none."""
    from peft import get_peft_model

    torch.manual_seed(1)
    model = get_peft_model(load_base(folder, base, **settings), lora(dora=dora))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.05)
    return model


def make_batch(number: int, size: int = BATCH) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCABULARY, (size, LENGTH), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def train_stock(folder: Path, base: str, *, dora: bool = False, steps: int = 3) -> Trained:
    """Train in this process, without any of gpumix."""
    model = load_adapted(folder, base, dora=dora)
    if base == "int8" and dora:
        _keep_constants(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = optimizer_for(iter(trained.values()))
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        loss = model(**make_batch(number)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, {name: p.detach().numpy() for name, p in trained.items()})


def _keep_constants(model: nn.Module) -> None:
    """On CPUs PEFT's DoRA replaces an int8 weight by one without constants in each pass, which
    bitsandbytes then takes for new ones; they are given back."""
    from bitsandbytes.nn import Linear8bitLt

    def give_back(module: Any, *_: Any) -> None:
        if module.weight.CB is not None and module.weight.SCB is None:
            module.weight.SCB = module.state.SCB

    for module in model.modules():
        if isinstance(module, Linear8bitLt):
            module.register_forward_pre_hook(give_back)


def train_rank(
    folder: Path, base: str, plan: str, *, dora: bool = False, steps: int = 3
) -> tuple[list[float], Any]:
    """Train on a rank by a plan, as JSON: the losses, and this rank's part of what is trained."""
    engine, optimizer = engine_for(folder, base, Plan.model_validate_json(plan), dora=dora)
    losses = [step(engine, optimizer, number) for number in range(steps)]
    return losses, trained_pieces(engine)


def engine_for(
    folder: Path, base: str, plan: Plan, *, dora: bool = False
) -> tuple[Engine, torch.optim.Optimizer]:
    engine = prepare(load_adapted(folder, base, dora=dora), plan)
    return engine, optimizer_for(engine.parameters())


def step(engine: Engine, optimizer: torch.optim.Optimizer, number: int) -> float:
    rows = [row for part in engine.plan.rows_of(engine.comm.rank) for row in part]
    optimizer.zero_grad()
    loss = engine.step({key: value[rows] for key, value in make_batch(number).items()})
    optimizer.step()
    return loss.item()


def trained_pieces(engine: Engine) -> Any:
    return pieces_of(engine, only={name for name, _ in engine.named_parameters()})


def merged(results: Sequence[tuple[list[float], Any]]) -> Trained:
    """What all ranks came to."""
    whole = joined([pieces for _, pieces in results])
    assert not any(np.isnan(values).any() for values in whole.values())
    return Trained(results[0][0], whole)


def plan_of(model: nn.Module, shares: Sequence[Share], **settings: Any) -> str:
    return plan_for(model, shares, sequence_length=LENGTH, **settings).model_dump_json()


def plan_of_stages(model: nn.Module, workers: Sequence[int], **settings: Any) -> str:
    """A plan of stages, by the samples of the only worker of each."""
    anatomy = split_into_units(model)
    calls, needs = [unit.name for unit in anatomy.units], _find_needs(model)
    ends = [len(calls) * n // len(workers) for n in range(len(workers) + 1)]
    stages = []
    for number, (begin, end) in enumerate(pairwise(ends)):
        wanted = [*needs[begin:end], *(needs[-1:] if end == len(calls) else ())]
        samples = workers[number]
        worker = Worker(
            device=f"d{number}",
            device_class="cpu",
            samples=samples,
            micro_batch=2,
            state_share=1.0,
        )
        outputs = (taken for one in wanted for taken in one.outputs if taken.call < begin)
        stages.append(
            Stage(
                units=tuple(calls[begin:end]),
                workers=(worker,),
                root=tuple(dict.fromkeys(name for one in wanted for name in one.root)),
                takes=tuple(dict.fromkeys(outputs)),
            )
        )
    return Plan(
        strategy="test",
        model=anatomy.fingerprint(),
        sequence_length=LENGTH,
        global_batch=workers[0],
        stages=tuple(stages),
        **settings,
    ).model_dump_json()


def _find_needs(model: nn.Module) -> Any:
    empty = without_weights(model)
    runner = UnitRunner(
        empty,
        split_into_units(empty),
        device=torch.device("cpu"),
        compute_dtype=torch.float32,
        objective=make_objective(empty),
    )
    batch = make_batch(0, 2)
    separate_kinds(runner, batch)
    return find_flows(runner, batch, in_chunks=False).needs


def packed_bytes(model: nn.Module) -> int:
    """Bytes of all quantised weights with their constants."""
    return sum(one.format.nbytes for _, one in iterate_quantised_parameters(model))


def weights_of(model: nn.Module) -> int:
    """Elements of all quantised weights."""
    return sum(one.format.shape.numel() for _, one in iterate_quantised_parameters(model))
