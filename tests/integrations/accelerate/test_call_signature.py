"""What a model is measured with is what a loop calls it with, as far as that can be told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gpumix.integrations.accelerate.call_signature import bind_batch
from gpumix.schema.errors import InputError
from helpers.errors import raises

X, Y = torch.zeros(2, 3), torch.ones(2)


class OfOne(nn.Module):
    def forward(self, x: Any) -> Any: ...


class OfTwo(nn.Module):
    def forward(self, x: Any, mask: Any, scale: float = 1.0) -> Any: ...


class OfNames(nn.Module):
    """As those of transformers."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any: ...


class OfAnything(nn.Module):
    def forward(self, **batch: Any) -> Any: ...


class Adapted(nn.Module):
    """As those of PEFT."""

    def get_base_model(self) -> nn.Module:
        return OfNames()

    def forward(self, *args: Any, **kwargs: Any) -> Any: ...


@pytest.mark.parametrize(
    ("model", "batch", "args", "kwargs"),
    [
        (OfOne, [X, Y], [], {"x": X}),
        (OfOne, (X,), [], {"x": X}),
        (OfOne, X, [], {"x": X}),
        (OfOne, {"x": X, "y": Y}, [], {"x": X}),
        (OfOne, {"y": Y, "x": X}, [], {"x": X}),
        (OfOne, {"inputs": X, "labels": Y}, [], {"x": X}),
        (OfTwo, {"mask": Y, "inputs": X, "y": Y}, [], {"mask": Y, "x": X}),
        (OfTwo, [X, Y, Y], [], {"x": X, "mask": Y}),
        (OfNames, {"input_ids": X, "labels": Y}, [], {"input_ids": X, "labels": Y}),
        (OfNames, {"input_ids": X, "length": Y}, [], {"input_ids": X}),
        (OfNames, {"ids": X, "y": Y}, [X], {}),
        (OfNames, [X, Y], [X], {}),
        (OfAnything, {"a": X, "b": Y}, [], {"a": X, "b": Y}),
        (Adapted, {"input_ids": X, "length": Y}, [], {"input_ids": X}),
    ],
)
def test_parts_go_by_name_then_in_order(model, batch, args, kwargs):
    found = bind_batch(model(), batch)
    assert [id(one) for one in found["args"]] == [id(one) for one in args]
    assert {k: id(v) for k, v in found["kwargs"].items()} == {k: id(v) for k, v in kwargs.items()}


def test_a_batch_with_less_than_forward_needs_is_told():
    with raises(InputError, code="model-inputs-unknown") as told:
        bind_batch(OfTwo(), {"inputs": X})
    assert "Accelerator(plan=...)" in told.value.fix
