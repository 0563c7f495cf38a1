"""Scripts that ask for bfloat16 are trained in it, on unlike devices that are measured for it, as
their libraries train in autocast on one."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from helpers.extended import chosen, left_out
from helpers.processes.harness import run_ranks
from helpers.scripts.programs import (
    GLOBAL_BATCH,
    Texts,
    arguments,
    as_launched,
    log_of,
    make_accelerator,
    model,
    train_in_loop,
)

pytestmark = pytest.mark.slow

RANKS = 2
STEPS = 5  # one epoch
TOLERANCE = 2e-2
CLUSTER = """
- {class: fast, accelerator: cpu, memory: 300MB, emulate: 2e9}
- {class: slow, accelerator: cpu, memory: 300MB, emulate: 1e9}
"""


def on_unlike_devices(folder: Path) -> None:
    """A short look at them is enough, for shares that go by what their class is known to do."""
    as_launched(folder)
    from gpumix.integrations.common import plan_and_shard

    Path(os.environ["GPUMIX_CLUSTER"]).write_text(CLUSTER)
    plan_and_shard.profile = partial(plan_and_shard.profile, budget_s=2.0)
    plan_and_shard.select_strategy = lambda couples: "proportional"


def by_trainer(folder: Path, world: int) -> tuple[list[float], Any]:
    if world == 1:
        from transformers import Trainer
    else:
        from gpumix.integrations.transformers import Trainer
    settings = {"eval_strategy": "no", "save_strategy": "no", "bf16": True, "num_train_epochs": 1}
    args = arguments(folder / f"{world}", GLOBAL_BATCH // world, **settings)
    trainer = Trainer(model=model(), args=args, train_dataset=Texts())
    trainer.train()
    return log_of(trainer, "loss"), None if world == 1 else trainer.plan


def by_loop(folder: Path, world: int) -> tuple[list[float], Any]:
    accelerator = make_accelerator(world, mixed_precision="bf16")
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    loader = DataLoader(Texts(), batch_size=GLOBAL_BATCH // world)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    losses = train_in_loop(accelerator, network, optimizer, loader)
    return losses, None if world == 1 else accelerator.plan


PROGRAMS: dict[str, Callable[..., Any]] = {"trainer": by_trainer, "loop": by_loop}


def by_each(folder: Path, world: int, names: list[str]) -> dict[str, tuple[list[float], Any]]:
    on_unlike_devices(folder)
    return {name: PROGRAMS[name](folder, world) for name in names}


@pytest.fixture(scope="module")
def both(request, tmp_path_factory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The second program finds what devices were measured to do for the first."""
    folder = tmp_path_factory.mktemp("mixed")
    names = list(chosen(request, PROGRAMS, by="name"))
    (stock,) = run_ranks(by_each, 1, folder, 1, names)
    return stock, run_ranks(by_each, RANKS, folder, RANKS, names, timeout_s=240)


@pytest.mark.parametrize("name", left_out(PROGRAMS, ["trainer"]))
def test_losses_are_those_of_the_stock_script(name, both):
    stock, _ = both[0][name]
    assert len(stock) == STEPS
    for losses, plan in (rank[name] for rank in both[1]):
        assert losses == pytest.approx(stock, rel=TOLERANCE)
        first, second = plan.workers
        assert (first.compute_dtype, second.compute_dtype) == ("bf16", "bf16")
        assert plan.uses_tensor_parallel or first.samples > second.samples > 0
