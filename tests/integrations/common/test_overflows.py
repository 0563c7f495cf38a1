"""Where fp16 gradients overflow, schedules wait and logs say so, as with the stock libraries."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.scripts.programs import (
    GLOBAL_BATCH,
    Texts,
    arguments,
    as_launched,
    log_of,
    make_accelerator,
)
from helpers.training.models import ARCHITECTURES
from helpers.training.reference import SEED, Share, plan_for

pytestmark = pytest.mark.slow

RANKS = 2
SOUND, TOO_MUCH = 2.0**8, math.inf
OVERFLOW = (1, 4)  # which steps do


def model() -> nn.Module:
    """Whose gradients are finite in fp16 on a CPU."""
    torch.manual_seed(SEED)
    return ARCHITECTURES["gpt2"].factory()


def plan() -> Any:
    shares = [Share(5, 2, 3), Share(7, 4, 1)]
    return plan_for(model(), shares, zero_stage=2, compute_dtype="fp16")


def with_scaler(accelerator: Any) -> None:
    """What Accelerate does for fp16, which it refuses on a CPU: before anything is prepared."""
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=SOUND)


def as_in_fp16(accelerator: Any) -> None:
    """And afterwards, so that the model itself computes in fp32."""
    accelerator.state._mixed_precision, accelerator.native_amp = "fp16", True


def scale(accelerator: Any, engine: Any, by: float) -> None:
    """What the next losses are multiplied with before their backward."""
    if engine is not None:
        engine.scaler.scale = by
    else:
        accelerator.scaler.load_state_dict({**accelerator.scaler.state_dict(), "scale": by})


def as_told(norm: float) -> float:
    """Of gradients that overflowed, inf or nan."""
    return norm if math.isfinite(norm) else -1.0


def by_trainer(folder: Path, world: int, fused: bool) -> dict[str, Any]:
    as_launched(folder)
    from transformers import TrainerCallback

    class Scales(TrainerCallback):
        def on_train_begin(self, *args: Any, **more: Any) -> None:
            if world == 1:
                as_in_fp16(trainer.accelerator)

        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            by = TOO_MUCH if state.global_step in OVERFLOW else SOUND
            scale(trainer.accelerator, getattr(trainer, "_engine", None), by)

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            skipped.append(trainer.accelerator.optimizer_step_was_skipped)

    more: dict[str, Any] = {}
    if world == 1:
        from transformers import Trainer
    else:
        from gpumix.integrations.transformers import Trainer

        more["plan"] = plan()
    settings = {"eval_strategy": "no", "save_strategy": "no"}
    settings["optim"] = "adamw_torch_fused" if fused else "adamw_torch"
    args = arguments(folder / f"{world}", GLOBAL_BATCH // world, **settings)
    skipped: list[bool] = []
    callbacks = [Scales()]
    trainer = Trainer(model=model(), args=args, train_dataset=Texts(), callbacks=callbacks, **more)
    if world == 1:
        with_scaler(trainer.accelerator)
    trainer.train()
    norms = log_of(trainer, "grad_norm")
    return {
        "skipped": skipped,
        "losses": log_of(trainer, "loss"),
        "rates": log_of(trainer, "learning_rate"),
        "norms": [as_told(norm) for norm in norms],
    }


def by_loop(folder: Path, world: int, fused: bool) -> dict[str, Any]:
    """The first of two batches overflows, in a step that makes use of both."""
    as_launched(folder)
    accelerator = make_accelerator(world, plan, gradient_accumulation_steps=2)
    if world == 1:
        with_scaler(accelerator)
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, fused=fused)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9 ** (step / world))
    loader = DataLoader(Texts(), batch_size=GLOBAL_BATCH // world)
    network, optimizer, loader, scheduler = accelerator.prepare(
        network, optimizer, loader, scheduler
    )
    if world == 1:
        as_in_fp16(accelerator)
    told: dict[str, Any] = {"skipped": [], "losses": [], "rates": [], "norms": []}
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(network):
                step = len(told["skipped"])
                first = world == 1 or not accelerator.sync_gradients
                too_much = step in OVERFLOW and first
                scale(accelerator, getattr(accelerator, "_engine", None), SOUND)
                if too_much:
                    scale(accelerator, getattr(accelerator, "_engine", None), TOO_MUCH)
                loss = network(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = float(accelerator.clip_grad_norm_(network.parameters(), 1.0))
                    told["norms"].append(as_told(norm))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                told["losses"].append(loss.item())
                if accelerator.sync_gradients:
                    told["skipped"].append(
                        (optimizer.step_was_skipped, accelerator.optimizer_step_was_skipped)
                    )
                    told["rates"].append(scheduler.get_last_lr()[0])
    return told


PROGRAMS = [(by_loop, True), (by_loop, False), (by_trainer, True), (by_trainer, False)]


@pytest.mark.parametrize(("program", "fused"), left_out(PROGRAMS, PROGRAMS[1:]))
def test_rates_and_norms_are_those_of_the_stock_script(program, fused, tmp_path):
    """A fused optimizer leaves steps out by itself, and Accelerate does not hear of it."""
    (stock,) = run_ranks(program, 1, tmp_path, 1, fused)
    assert [step for step, norm in enumerate(stock["norms"]) if norm < 0] == list(OVERFLOW)
    for rank in run_ranks(program, RANKS, tmp_path, RANKS, fused, timeout_s=120):
        assert rank["skipped"] == stock["skipped"]
        assert rank["rates"] == pytest.approx(stock["rates"])
        assert rank["norms"] == pytest.approx(stock["norms"], rel=5e-2)
        assert rank["losses"] == pytest.approx(stock["losses"], rel=2e-2)
