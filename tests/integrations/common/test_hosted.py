"""A program's model is hosted: where it writes, what may not be replaced is told before anything is
measured; and what the program trained before is let go of."""

from __future__ import annotations

import gc
import json
import weakref
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from gpumix.integrations.common import plan_and_shard
from gpumix.schema.errors import InputError
from helpers.training.staging import rows, staged_plan


@pytest.mark.parametrize("kind", ["run", "plan", "profile"])
def test_what_a_newer_gpumix_left_is_kept(tmp_path, monkeypatch, kind):
    def measured(*arguments, **options):
        raise AssertionError("the model was measured")

    monkeypatch.setattr(plan_and_shard, "profile", measured)
    file = tmp_path / f"{kind}.json"
    newer = json.dumps({"kind": kind, "schema_version": 99})
    file.write_text(newer)
    training = plan_and_shard.TrainingSetup(torch.zeros, sequence_length=1, global_batch=1)
    with pytest.raises(InputError) as caught:
        plan_and_shard.shard_by_plan(nn.Linear(1, 1), training, folder=tmp_path)
    assert caught.value.why == "a newer gpumix wrote it"
    assert file.read_text() == newer


@pytest.mark.parametrize("asked, told", [("bf16", True), ("fp32", False), ("auto", False)])
def test_a_given_plan_that_computes_in_another_dtype_is_told(monkeypatch, asked, told):
    for name in ("check_equal_models", "own_device", "register_leave_at_exit", "prepare"):
        monkeypatch.setattr(plan_and_shard, name, Mock())
    plan, said = staged_plan("gpt2", rows([1])), []
    batch = plan.global_batch
    training = plan_and_shard.TrainingSetup(
        torch.zeros, sequence_length=1, global_batch=batch, precision=asked
    )
    plan_and_shard.shard_by_plan(nn.Linear(1, 1), training, plan=plan, say=said.append)
    line = "devices compute in fp32, as the plan says, not in bf16"
    assert said == ([line] if told else [])


class Trained:
    """By a program whose objects know each other."""

    def __init__(self) -> None:
        self.trainer = self


def test_memory_of_what_was_trained_before_is_free_for_what_comes(monkeypatch):
    for name in ("check_equal_models", "own_device", "register_leave_at_exit"):
        monkeypatch.setattr(plan_and_shard, name, Mock())
    plan = staged_plan("gpt2", rows([1]))
    training = plan_and_shard.TrainingSetup(
        torch.zeros, sequence_length=1, global_batch=plan.global_batch
    )
    gc.disable()
    try:
        before = weakref.ref(Trained())
        assert before() is not None
        monkeypatch.setattr(plan_and_shard, "prepare", lambda *given, **more: before())
        assert plan_and_shard.shard_by_plan(nn.Linear(1, 1), training, plan=plan) is None
    finally:
        gc.enable()
