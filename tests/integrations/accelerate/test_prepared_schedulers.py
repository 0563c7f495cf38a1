"""A loop that prepares its scheduler, saves with its model's own method and goes on from a state,
changed by its import alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.scripts.programs import GLOBAL_BATCH, Texts, as_launched, model, saved, unlike_ranks
from helpers.training.reference import Share, plan_for

pytestmark = pytest.mark.slow

BATCHES = 5  # of an epoch
EPOCHS = 2
RATE = 1e-2


def one_rank() -> Any:
    return plan_for(model(), [Share(GLOBAL_BATCH, 6, 1)])


PLANS: dict[int, Callable[[], Any]] = {1: one_rank, 3: unlike_ranks}


def looped(folder: Path, world: int, stock: bool, resumes: bool) -> dict[str, Any]:
    """The script. A step of training is a step of the scheduler for each process, so its factor
    counts them."""
    as_launched(folder)
    more: dict[str, Any] = {}
    if stock:
        from accelerate import Accelerator
    else:
        from gpumix import Accelerator

        more["plan"] = PLANS[world]()
    accelerator = Accelerator(**more)
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1.0 - step / world / (2 * BATCHES * EPOCHS)
    )
    loader = DataLoader(Texts(), batch_size=GLOBAL_BATCH // world)
    network, optimizer, loader, scheduler = accelerator.prepare(
        network, optimizer, loader, scheduler
    )
    state = folder / f"state-{world}-{stock}"
    if resumes:
        accelerator.load_state(str(state))
    losses, rates = [], [scheduler.get_last_lr()[0]]
    for epoch in range(1 if resumes else 0, EPOCHS):
        for batch in loader:
            loss = network(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            rates.append(scheduler.get_last_lr()[0])
            assert rates[-1] == optimizer.param_groups[0]["lr"]
        if epoch == 0:
            accelerator.save_state(str(state))
    accelerator.wait_for_everyone()
    final = folder / f"final-{world}-{stock}"
    whole = accelerator.get_state_dict(network)
    if accelerator.is_main_process:
        accelerator.unwrap_model(network).save_pretrained(final, state_dict=whole)
    accelerator.save_model(network, str(folder / f"model-{world}-{stock}"))
    return {"losses": losses, "rates": rates, "steps": scheduler.scheduler.last_epoch}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("scheduled")


@pytest.fixture(scope="module")
def stock(folder) -> dict[str, Any]:
    return run_ranks(looped, 1, folder, 1, True, False)[0]


@pytest.mark.parametrize("world", left_out(PLANS, [3]))
def test_rates_losses_and_what_is_saved_are_those_of_the_stock_script(world, folder, stock):
    for rank in run_ranks(looped, world, folder, world, False, False, timeout_s=120):
        assert rank["losses"] == pytest.approx(stock["losses"], rel=1e-5)
        assert rank["rates"] == pytest.approx(stock["rates"])
        assert rank["steps"] == world * BATCHES * EPOCHS
    expected = saved(folder / "final-1-True")
    for name in ("final", "model"):
        found = reloaded(folder / f"{name}-{world}-False")
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, abs=2e-4), key
    for rank in run_ranks(looped, world, folder, world, False, True, timeout_s=120):
        assert rank["losses"] == pytest.approx(stock["losses"][BATCHES:], rel=1e-5)
        assert rank["rates"] == pytest.approx(stock["rates"][BATCHES:])


def reloaded(folder: Path) -> dict[str, Any]:
    if (folder / "config.json").exists():
        return saved(folder)
    from safetensors.torch import load_file

    network = model()
    network.load_state_dict(load_file(folder / "model.safetensors"))
    return {name: value.numpy() for name, value in network.state_dict().items()}
