"""Packed or padded, and whoever takes which of them: documents train as they do one by one."""

from __future__ import annotations

import numpy as np
import pytest

from gpumix.data.core.source import Source
from gpumix.data.loader import Loader, evaluation_batches
from gpumix.data.order.sampler import ByLength
from gpumix.engine.model.deferred_init import build
from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import PLAIN, Mode
from gpumix.train.checks.packed_documents import check_documents
from helpers.errors import raises
from helpers.extended import left_out
from helpers.training.documents import STEPS, documents, one_by_one, packs, trained
from helpers.training.models import ARCHITECTURES
from helpers.training.reference import (
    SEED,
    Share,
    assert_gradients_equal,
    engine_for,
    plain_step,
    plan_for,
    tensor_errors,
    worst_error,
)
from helpers.training.staging import rows, staged_plan

GRADIENTS = 1e-4
UNEVEN = [Share(4, 2, 1), Share(1, 1, 0), Share(3, 3, 2)]
EIGHT = sum(share.samples for share in UNEVEN)
BY_LENGTH = ByLength(bucketing=True, attention=0.02, window_batches=3)


STAGED = {
    "stages": rows([6, 2], [8], micro_batch=2, mode=Mode(recompute=False)),
    "waves": rows([4, 4], [4, 4]),
    "a TP group, then one": rows([8], [8], tensor=[2, 1], sequence=True, micro_batch=3),
}


def plan_of(kind: str, name: str) -> Plan:
    if kind == "one stage":
        return one_stage(name)
    if kind == "one after the other":
        return one_stage(name, Mode(order="sequential", recompute=False), zero_stage=1)
    waves = {"zero_stage": 3, "waves": 2} if kind == "waves" else {"zero_stage": 1}
    return staged_plan(name, STAGED[kind], **waves)


def one_stage(name: str, mode: Mode = PLAIN, zero_stage: int = 3) -> Plan:
    shares = [share._replace(mode=mode) for share in UNEVEN]
    return plan_for(build(ARCHITECTURES[name].factory, SEED), shares, zero_stage=zero_stage)


# -- packed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    left_out(
        [("gpt2", "one stage"), ("bert", "one stage"), ("qwen3", "a TP group, then one")],
        [("bert", "one stage"), ("qwen3", "a TP group, then one")],
    ),
)
def test_packed_documents_train_as_one_by_one(name, kind):
    source = packs(name, 90)
    found, gradients, read = trained(source, name, plan_of(kind, name), ByLength())
    batches = [
        np.concatenate([source.documents_in(k) for k in {k for own in read for k in own[step]}])
        for step in range(STEPS)
    ]
    assert sum(map(len, batches)) > 1.5 * EIGHT * STEPS  # there are several documents in a pack
    held_out = np.concatenate([source.documents_in(k) for k in range(EIGHT)])
    wanted, of_plain = one_by_one(name, documents(name, 90), batches, held_out)
    assert worst_error(found, wanted) < 2e-5
    assert_gradients_equal(gradients, of_plain, GRADIENTS)


def test_without_positions_documents_would_see_each_other():
    """So the tests above can fail."""
    batch = packs("llama", 90).rows(np.arange(8))
    _, apart = plain_step(ARCHITECTURES["llama"].factory, batch)
    del batch["position_ids"]
    _, together = plain_step(ARCHITECTURES["llama"].factory, batch)
    assert max(tensor_errors(together, apart).values()) > 100 * GRADIENTS


@pytest.mark.parametrize(
    ("name", "refused"),
    [("gpt2", False), ("gemma2", False), ("mistral", False), ("opt", False), ("bloom", True)],
)
def test_whether_a_model_keeps_documents_apart_is_tried_out(name, refused):
    engine = engine_for(ARCHITECTURES[name].factory, [Share(2, 2, 1)])
    if refused:
        with raises(InputError, code="packed-documents-mixed"):
            check_documents(engine)
    else:
        assert check_documents(engine) == ""


def test_a_model_that_does_not_look_back_tells_nothing():
    engine = engine_for(ARCHITECTURES["gpt2"].factory, [Share(1, 1, 1)])
    state = engine.state_dict()
    zeros = {key: v * 0 if "attn.c_proj" in key else v for key, v in state.items()}
    engine.load_state_dict(zeros)
    assert "cannot be told" in check_documents(engine)


# -- padded ----------------------------------------------------------------------------------------


KINDS = ["one stage", "one after the other", *STAGED]


@pytest.mark.parametrize("kind", left_out(KINDS, KINDS[1:]))
def test_padded_documents_train_as_one_by_one(kind):
    source = documents("qwen3", 50)
    found, gradients, read = trained(source, "qwen3", plan_of(kind, "qwen3"), BY_LENGTH)
    batches = [np.array(sorted({k for own in read for k in own[step]})) for step in range(STEPS)]
    assert [len(numbers) for numbers in batches] == [EIGHT] * STEPS
    wanted, of_plain = one_by_one("qwen3", source, batches, np.arange(EIGHT))
    assert worst_error(found, wanted) < 2e-5
    assert_gradients_equal(gradients, of_plain, GRADIENTS)


@pytest.mark.extended
def test_who_takes_what_changes_no_loss():
    """By cost, or as samples come: the same samples a step, by other ranks."""
    source, plan = documents("gpt2", 50), plan_of("one stage", "gpt2")
    dealt, _, by_cost = trained(source, "gpt2", plan, ByLength(attention=0.02))
    source._lengths = None
    as_they_come, _, in_a_row = trained(source, "gpt2", plan, ByLength())
    assert by_cost != in_a_row
    assert worst_error(dealt, as_they_come) < 2e-5
    assert max(tensor_errors(dealt.weights, as_they_come.weights).values()) < 2e-5


def widths_seen(source: Source) -> list[list[int]]:
    """On the one rank of a plan: how wide each micro-batch is that reaches the model."""
    seen: list[int] = []
    engine = engine_for(ARCHITECTURES["gpt2"].factory, [Share(6, 2, 1)])
    engine.model.register_forward_pre_hook(
        lambda _, args, given: seen.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    with Loader(source, [6], 0) as loader:
        engine.step(next(loader))
        numbers = loader.last_indices.reshape(3, 2)
        batch = source.rows(numbers.reshape(-1))
        batch["odd"] = batch["input_ids"]  # what it holds for each token is not known
        parts = engine._cut(batch, engine._state.rows)
    ((held, _),) = evaluation_batches(source, [6], 0, batches=1)
    engine.evaluate(held)
    longest = [source.lengths[numbers].max(1), source.lengths[:6].reshape(3, 2).max(1)]
    assert {looks[0][1] for looks in (part.looks for part in parts)} == {longest[0].max()}
    return [seen, np.concatenate(longest).tolist()]


def test_a_micro_batch_is_as_wide_as_its_longest_sample():
    seen, wanted = widths_seen(documents("gpt2", 50))
    assert seen == wanted and len(set(seen)) > 2
