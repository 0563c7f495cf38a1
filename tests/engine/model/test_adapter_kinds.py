"""Each kind of adapter that PEFT has trains as PEFT does in one process, or is refused before."""

from __future__ import annotations

from functools import cache

import pytest

from gpumix.engine.prepare import prepare
from gpumix.schema.errors import GpumixError
from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.training.models import ARCHITECTURES
from helpers.training.reference import Share, batches, own_rows, plan_for

peft = pytest.importorskip("peft")

from helpers.training.adapter_kinds import adapted, list_kinds, train_by_plan, train_stock  # noqa: E402

TOLERANCE = 1e-5
SIZE = 4
SHARES = {1: [Share(SIZE, 2, 1)], 2: [Share(3, 2, 1), Share(1, 1, 3)]}
KINDS = list_kinds()
# Kinds whose loss, or whose gradients, no plan that cuts a batch can have.
REFUSED = {
    "CPT": "has a hook on its gradient",
    "LILY": "the loss of a batch is not made of the losses of its parts",
    "OSF": "has a hook on its gradient",
    "POLY": "the model's call sets a hook",
    "PVERA": "the loss of a batch is not made of the losses of its parts",  # random numbers
    "SHADOW": "the model calls its units in another order than the plan",  # it has them twice
    "XLORA": "switches its adapters off, or to others",
}
# A penalty on all of its matrices, which PEFT has for models with a task.
OF_LLAMA = {"ADALORA": "is used while its unit is not computed"}
# BERT's prompts look up its embedding themselves, and so does its head, which is tied to it.
OF_BERT = dict.fromkeys(
    ("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "TRAINABLE_TOKENS"),
    "is used while its unit is not computed",
)


USUAL = ("LORA", "LN_TUNING", "PREFIX_TUNING", "TRAINABLE_TOKENS", "VERA", "POLY", "XLORA")
FURTHER = [kind for kind in KINDS if kind not in USUAL]


@cache
def stock_losses(kind, name):
    """Losses of plain PyTorch; for all worlds."""
    found = train_stock(kind, name, SIZE)
    if isinstance(found, str):
        pytest.skip(f"PEFT does not train it: {found}")
    return found


@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.parametrize("kind", left_out(KINDS, FURTHER))
@pytest.mark.parametrize("world", SHARES)
def test_a_kind_trains_as_in_stock_or_is_refused(kind, name, world):
    expected = stock_losses(kind, name)
    found, *_ = run_ranks(train_by_plan, world, kind, name, SHARES[world])
    refused = REFUSED | (OF_BERT if name == "bert" else OF_LLAMA)
    if kind in refused:
        assert isinstance(found, str), found
        assert refused[kind] in found and "  fix: " in found
    else:
        assert found == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_hooks_of_a_call_are_refused_where_micro_batches_run_one_after_the_other(zero_stage):
    (found,) = run_ranks(train_by_plan, 1, "POLY", "llama", SHARES[1], zero_stage)
    assert REFUSED["POLY"] in found


def train_activated():
    """LoRA that begins where a sample's tokens say so: PEFT's layers get the places by hooks."""
    model = adapted("LORA", "llama", alora_invocation_tokens=[3])
    engine = prepare(model, plan_for(model, SHARES[1], zero_stage=3))
    batch = next(batches(ARCHITECTURES["llama"], SIZE, 1))
    try:
        engine.step(own_rows(batch, SHARES[1], 0))
    except GpumixError as error:
        return str(error)
    return None


def test_activated_lora_is_refused():
    (found,) = run_ranks(train_activated, 1)
    assert found is not None and "activated LoRA" in found


def test_hooks_set_before_a_step_are_called():
    (found,) = run_ranks(train_with_hook, 1)
    assert found > 0


def train_with_hook():
    model = ARCHITECTURES["llama"].factory()
    engine = prepare(model, plan_for(model, SHARES[1], zero_stage=3))
    called = []
    batch = own_rows(next(batches(ARCHITECTURES["llama"], SIZE, 1)), SHARES[1], 0)
    for layer in (model.model.layers[0], model.model.layers[1].mlp):
        layer.register_forward_pre_hook(lambda *_: called.append(1))
    engine.step(batch)
    return len(called)
