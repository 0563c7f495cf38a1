"""Programs that ask for AdamW in 8 bits get one that fits any plan; bitsandbytes may be absent."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import gpumix
from gpumix.integrations.common.optimizer_adapter import (
    convert_optimizer,
    make_factory_from_optimizer,
)
from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.scripts.programs import (
    GLOBAL_BATCH,
    Texts,
    arguments,
    as_launched,
    log_of,
    model,
    train_in_loop,
    unlike_ranks,
)


class AdamW8bit(torch.optim.Optimizer):
    """As bitsandbytes' own looks from outside."""

    def __init__(self, params: Any, lr: float = 1e-3, optim_bits: int = 8, **more: Any) -> None:
        settings = {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-7, "weight_decay": 0.2}
        super().__init__(params, {**settings, "alpha": 0.0, "t_alpha": None})
        self.args = SimpleNamespace(optim_bits=optim_bits, min_8bit_size=512, max_unorm=0.0)

    def step(self, closure: Any = None) -> None:
        raise AssertionError("ours is in its place")


AdamW8bit.__module__ = "bitsandbytes.optim.adamw"


class Lion8bit(AdamW8bit):
    pass


Lion8bit.__module__ = "bitsandbytes.optim.lion"


def test_bitsandbytes_own_gives_way():
    p = nn.Parameter(torch.ones(1024))
    theirs = AdamW8bit([p], lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(theirs, 1, 0.5)
    ours = convert_optimizer(theirs)
    assert type(ours) is gpumix.AdamW8bit
    assert ours.param_groups is theirs.param_groups
    p.grad = torch.ones_like(p)
    ours.step()
    assert ours.state[p]["exp_avg_codes"].dtype == torch.uint8  # of 512 elements and more
    scheduler.step()
    (group,) = ours.param_groups
    assert (group["lr"], group["betas"], group["eps"]) == (0.25, (0.9, 0.99), 1e-7)
    made = make_factory_from_optimizer(theirs)([nn.Parameter(torch.ones(2))])
    assert type(made) is gpumix.AdamW8bit
    assert (made.defaults["lr"], made.defaults["min_8bit_size"]) == (0.5, 512)


def test_others_stay_or_are_refused():
    p = nn.Parameter(torch.ones(8))
    plain = AdamW8bit([p], optim_bits=32)
    assert convert_optimizer(plain) is plain
    assert convert_optimizer(own := torch.optim.AdamW([p])) is own
    with raises(InputError, code="optimizer-not-elementwise"):
        make_factory_from_optimizer(Lion8bit([p]))


# -- whole programs --------------------------------------------------------------------------------


def _by_trainer(folder: Path, optim: str, plan: Any) -> Any:
    as_launched(folder)
    from gpumix.integrations.transformers import Trainer

    trainer = Trainer(
        model=model(),
        args=arguments(
            folder / optim,
            GLOBAL_BATCH // 3,
            max_steps=4,
            optim=optim,
            eval_strategy="no",
            save_strategy="no",
        ),
        train_dataset=Texts(),
        plan=plan,
    )
    trainer.train()
    return type(trainer.optimizer).__module__, log_of(trainer, "loss")


@pytest.mark.slow
@pytest.mark.parametrize("optim", left_out(["adamw_8bit", "adamw_bnb_8bit"], ["adamw_8bit"]))
def test_a_trainer_takes_it_by_name(optim, tmp_path):
    """Small parameters keep fp32: a small model trains as by AdamW."""
    plan = unlike_ranks().model_copy(update={"optimizer_state": "8bit"})
    found = run_ranks(_by_trainer, 3, tmp_path, optim, plan)
    expected = run_ranks(_by_trainer, 3, tmp_path, "adamw_torch", unlike_ranks())
    assert found[0][0] == "gpumix.engine.optimizers.adamw_8bit"
    assert found[0][1] == pytest.approx(expected[0][1], rel=1e-3)


def _by_loop(folder: Path, kind: str, plan: Any) -> list[float]:
    as_launched(folder)
    accelerator = gpumix.Accelerator(plan=plan)
    network = model()
    if kind == "bitsandbytes":
        import bitsandbytes

        optimizer = bitsandbytes.optim.AdamW8bit(network.parameters(), lr=1e-2)
    else:
        optimizer = AdamW8bit(network.parameters(), lr=1e-2)
    loader = DataLoader(Texts(), batch_size=GLOBAL_BATCH // 3)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    assert type(optimizer.optimizer) is gpumix.AdamW8bit
    return train_in_loop(accelerator, network, optimizer, loader)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["alike", "bitsandbytes"])
def test_a_loop_hands_over_bitsandbytes_own(kind, tmp_path):
    if kind == "bitsandbytes":
        pytest.importorskip("bitsandbytes")
    plan = unlike_ranks().model_copy(update={"optimizer_state": "8bit"})
    losses = run_ranks(_by_loop, 3, tmp_path, kind, plan)
    assert losses[0][-1] < losses[0][0]
