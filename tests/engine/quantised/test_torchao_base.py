"""Adapters on a base in torchao's int8, weights only, train as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpumix.engine.access_between_steps import unshard
from gpumix.engine.prepare import prepare
from gpumix.engine.quantised.weight_formats import iterate_quantised_parameters
from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import Plan
from helpers.errors import raises
from helpers.processes.harness import run_ranks
from helpers.training import quantised as q
from helpers.training.reference import Trained, optimizer_for, worst_error

pytest.importorskip("torchao")
pytest.importorskip("peft")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return q.save_base(tmp_path_factory.mktemp("base"))


def adapted(folder: Path) -> Any:
    from peft import get_peft_model
    from torchao.quantization import Int8WeightOnlyConfig, quantize_
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
    model.config.use_cache = False
    quantize_(model.model, Int8WeightOnlyConfig())
    torch.manual_seed(1)
    model = get_peft_model(model.train(), q.lora())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.05)
    return model


def train_alone(folder: Path) -> Trained:
    model = adapted(folder)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = optimizer_for(iter(trained.values()))
    losses = []
    for number in range(3):
        optimizer.zero_grad()
        loss = model(**q.make_batch(number)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, {name: p.detach().numpy() for name, p in trained.items()})


def train_rank(folder: Path, plan: str) -> tuple[list[float], Any]:
    engine = prepare(adapted(folder), Plan.model_validate_json(plan))
    optimizer = optimizer_for(engine.parameters())
    losses = [q.step(engine, optimizer, number) for number in range(3)]
    return losses, q.trained_pieces(engine)


@pytest.mark.parametrize("world", [1, 3])
def test_plans_train_as_one_process(folder, world):
    plan = q.plan_of(adapted(folder), q.SHARES[world], zero_stage=3)
    ranks = [train_rank(folder, plan)] if world == 1 else run_ranks(train_rank, 3, folder, plan)
    assert worst_error(q.merged(ranks), train_alone(folder)) < 1e-4


def test_constants_are_counted_and_come_back(folder):
    model, alone = adapted(folder), adapted(folder)
    packed = dict(iterate_quantised_parameters(model))
    assert {one.format.kind for one in packed.values()} == {"torchao-Int8Tensor"}
    assert q.packed_bytes(model) > q.weights_of(model)
    engine = prepare(model, Plan.model_validate_json(q.plan_of(model, q.SHARES[1])))
    state = engine.state_dict()
    for name, value in alone.state_dict().items():
        if name in packed:
            assert torch.equal(state[name].dequantize(), value.dequantize()), name
    unshard(model)
    with torch.no_grad():
        batch = q.make_batch(5)
        assert model(**batch).loss.item() == pytest.approx(alone(**batch).loss.item(), rel=1e-6)


def test_another_dtype_than_that_of_the_weights_is_refused(folder):
    model = adapted(folder)
    plan = Plan.model_validate_json(q.plan_of(model, q.SHARES[1], compute_dtype="bf16"))
    with raises(InputError, code="quantised-dtype-mismatch", what="torch.float32"):
        prepare(model, plan)
