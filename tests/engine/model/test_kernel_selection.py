"""A model that computes in the way that was chosen for its device trains as it always did."""

from __future__ import annotations

import pytest
import torch

from gpumix.engine.model.kernel_selection import apply_efficiency, to_channels_last
from gpumix.schema.cluster.kernels import KernelSettings
from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.extended import left_out
from helpers.training.models import ARCHITECTURES
from helpers.training.reference import SEED, Share, assert_step_is_plain, build, plan_for, prepare


@pytest.mark.parametrize("name", left_out(["llama", "vit", "t5"], ["llama", "vit"]))
def test_a_step_is_that_of_plain_pytorch(name):
    architecture = ARCHITECTURES[name]
    model = build(architecture.factory, SEED)
    plan = plan_for(model, [Share(3, 2, 1)])
    (stage,), efficiency = plan.stages, KernelSettings(attention="eager", channels_last=True)
    workers = tuple(w.model_copy(update={"efficiency": efficiency}) for w in stage.workers)
    plan = plan.model_copy(update={"stages": (stage.model_copy(update={"workers": workers}),)})
    batch = architecture.batch(3, torch.Generator().manual_seed(1))
    assert_step_is_plain(prepare(model, plan), architecture.factory, batch)
    assert model.config._attn_implementation == "eager"


def test_images_lie_with_channels_last_and_nothing_else():
    images = torch.randn(2, 3, 4, 4)
    assert to_channels_last(images).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(to_channels_last(images), images)
    for other in (torch.randn(2, 3, 4), torch.ones(2, 3, 4, 4, dtype=torch.int64)):
        assert to_channels_last(other) is other


def test_attention_that_a_model_lacks_is_named():
    model = ARCHITECTURES["plain-own-blocks"].factory()
    with raises(InputError, code="attention-not-selectable"):
        apply_efficiency(model, KernelSettings(attention="sdpa"), torch.device("cpu"))
    with raises(InputError, code="attention-unknown", what="flash_attention_2"):
        llama = ARCHITECTURES["llama"].factory()
        apply_efficiency(llama, KernelSettings(attention="flash"), torch.device("cpu"))
