"""What loops gather of evaluations whose last batch is short, and loaders in another order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.scripts.programs import (
    GLOBAL_BATCH,
    Texts,
    as_launched,
    make_accelerator,
    model,
    other_ranks,
    unlike_ranks,
)
from helpers.training.reference import Share, plan_for

pytestmark = pytest.mark.slow

EVALUATED, BATCH = 10, 6  # the last batch has 4 samples
PLANS = {2: other_ranks, 3: unlike_ranks}


def prepared(folder: Path, world: int, batch: int = BATCH) -> Any:
    as_launched(folder)
    accelerator, network = make_accelerator(world, lambda: PLANS[world]()), model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    loaders = [
        DataLoader(Texts(), batch_size=GLOBAL_BATCH // world),
        DataLoader(Texts(EVALUATED, seed=2), batch_size=batch // world),
    ]
    return accelerator, *accelerator.prepare(network, optimizer, *loaders)


def gathered(folder: Path, world: int, batch: int = BATCH) -> dict[str, list[Any]]:
    """As scripts do: for each sample of a process's batch the loss of the batch."""
    accelerator, network, _, _, loader = prepared(folder, world, batch)
    network.eval()
    found: dict[str, list[Any]] = {"losses": [], "said": [], "labels": [], "fixed": []}
    for inputs in loader:
        with torch.no_grad():
            loss = network(**inputs).loss
        found["losses"] += accelerator.gather_for_metrics(loss.repeat(batch // world)).tolist()
        said = [loss.item()] * (batch // world)
        found["said"] += accelerator.gather_for_metrics(said)
        found["labels"] += accelerator.gather_for_metrics(inputs["labels"]).tolist()
        sums = torch.ones(7 * GLOBAL_BATCH // world)  # of no samples
        found["fixed"].append(len(accelerator.gather_for_metrics(sums)))
    return found


SIZES = [(2, BATCH), (2, 12), (3, 12), (3, BATCH)]


@pytest.mark.parametrize(("world", "batch"), left_out(SIZES, SIZES[1:]))
def test_losses_count_for_each_sample_as_with_the_stock_script(tmp_path, world, batch):
    (stock,) = run_ranks(gathered, 1, tmp_path, 1, batch)
    assert len(stock["losses"]) == EVALUATED
    for rank in run_ranks(gathered, world, tmp_path, world, batch, timeout_s=120):
        for name in ("losses", "said"):
            assert rank[name] == pytest.approx(stock[name], rel=1e-5)
        assert rank["labels"] == stock["labels"]
        assert rank["fixed"] == [7 * GLOBAL_BATCH] * len(rank["fixed"])


@pytest.mark.extended
def test_one_sample_to_a_process(tmp_path):
    """One rank has a row that stands in, and one of three a sample at last."""
    (stock,) = run_ranks(gathered, 1, tmp_path, 1, 3)
    for rank in run_ranks(gathered, 3, tmp_path, 3, 3, timeout_s=120):
        for name in ("losses", "said"):
            assert rank[name] == pytest.approx(stock[name], rel=1e-5)
        assert rank["labels"] == stock["labels"]


def test_larger_batches_than_the_first_loader_s_are_told_of(tmp_path):
    with raises(InputError, code="global-batch-mismatch", what=12) as told:
        run_ranks(_evaluation_first, 1, tmp_path)
    assert "by a plan for 6" in told.value.what
    assert "accelerator.prepare was given first" in told.value.why
    assert "first the one with the largest batches" in told.value.fix


def _evaluation_first(folder: Path) -> None:
    from gpumix import Accelerator

    as_launched(folder)
    accelerator, network = Accelerator(plan=plan_for(model(), [Share(6, 3, 1)])), model()
    optimizer = torch.optim.AdamW(network.parameters())
    evaluated = DataLoader(Texts(EVALUATED), batch_size=6)
    trained = DataLoader(Texts(), batch_size=GLOBAL_BATCH)
    *_, trained = accelerator.prepare(network, optimizer, evaluated, trained)
    next(iter(trained))
