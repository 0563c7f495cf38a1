"""Adapters are switched off around an evaluation as in one process; a call of the model that
switches them, which cannot be followed, is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpumix.engine.loss.reduction import SUM_AND_COUNT, SummedLoss
from gpumix.engine.model.forward_coroutine import ModelError
from gpumix.engine.prepare import prepare
from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Mode
from helpers.errors import raises
from helpers.processes.harness import run_ranks
from helpers.training import quantised as q
from helpers.training.reference import optimizer_for

pytest.importorskip("peft")
pytest.importorskip("transformers")

# Whether adapters are on in what is done, in order; an evaluation follows each step.
EVALUATED = (False, True, False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return q.save_base(tmp_path_factory.mktemp("base"))


def load(folder: Path, *, saved: bool = False) -> Any:
    """With a module that is trained in full too, if `saved`."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    torch.manual_seed(1)
    config = LoraConfig(
        r=4, target_modules="all-linear", modules_to_save=["lm_head"] if saved else None
    )
    model: Any = get_peft_model(LlamaForCausalLM.from_pretrained(folder).train(), config)
    model.config.use_cache = False
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.05)
    return model


def train_stock(folder: Path, saved: bool) -> list[float]:
    model = load(folder, saved=saved)
    optimizer = optimizer_for(p for p in model.parameters() if p.requires_grad)
    losses = []
    for number, on in enumerate(EVALUATED):
        optimizer.zero_grad()
        loss = model(**q.make_batch(number)).loss
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            if on:
                evaluated = model(**q.make_batch(9)).loss
            else:
                with model.disable_adapter():
                    evaluated = model(**q.make_batch(9)).loss
        losses += [loss.item(), evaluated.item()]
    return losses


def train(folder: Path, saved: bool, plan: str) -> list[float]:
    model = load(folder, saved=saved)
    engine = prepare(model, Plan.model_validate_json(plan))
    optimizer = optimizer_for(engine.parameters())
    rows = [row for part in engine.plan.rows_of(engine.comm.rank) for row in part]
    own = {key: value[rows] for key, value in q.make_batch(9).items()}
    losses = []
    for number, on in enumerate(EVALUATED):
        losses.append(q.step(engine, optimizer, number))
        if on:
            losses.append(engine.evaluate(own).item())
        else:
            with model.disable_adapter():
                losses.append(engine.evaluate(own).item())
    return losses


@pytest.mark.parametrize("saved", [False, True], ids=["", "head trained"])
@pytest.mark.parametrize("zero_stage", [0, 3])
def test_an_evaluation_without_adapters_is_that_of_stock(folder, saved, zero_stage):
    expected = train_stock(folder, saved)
    assert expected[1] == pytest.approx(expected[5], rel=1e-6) != expected[3]  # the base's
    plan = q.plan_of(load(folder, saved=saved), q.SHARES[3], zero_stage=zero_stage)
    for losses in run_ranks(train, 3, folder, saved, plan):
        assert losses == pytest.approx(expected, rel=1e-5)


def of_both(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss with the base as its reference."""
    with torch.no_grad(), model.disable_adapter():
        of_base = model(**batch).loss
    rows = len(batch["labels"])
    return rows * (model(**batch).loss - of_base).square(), torch.tensor(rows)


@pytest.mark.parametrize("order", ["layered", "sequential"])
def test_a_loss_that_switches_them_is_refused(folder, order):
    model = load(folder)
    calls = [unit.name for unit in split_into_units(model).units]
    mode = Mode(order=order, recompute=False)
    shares = [share._replace(mode=mode) for share in q.SHARES[1]]
    zero_stage = 1 if order == "sequential" else 3
    plan = q.plan_of(model, shares, calls=2 * calls, zero_stage=zero_stage)
    engine = prepare(model, Plan.model_validate_json(plan), loss=SummedLoss(of_both, SUM_AND_COUNT))
    with raises(ModelError, code="adapters-switched") as caught:
        engine.step(q.make_batch(0))
    assert "with model.disable_adapter()" in caught.value.fix


def test_other_adapters_for_a_call_are_refused(folder):
    """`set_adapter` in the loss, as for a reference with adapters of its own."""
    model = load(folder)
    model.add_adapter("reference", q.lora())

    def compare(model: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        model.set_adapter("reference")
        loss = model(**batch).loss
        model.set_adapter("default")
        return loss, torch.ones(())

    plan = q.plan_of(model, q.SHARES[1])
    engine = prepare(model, Plan.model_validate_json(plan), loss=SummedLoss(compare, SUM_AND_COUNT))
    with raises(ModelError, code="adapters-switched"):
        engine.step(q.make_batch(0))
