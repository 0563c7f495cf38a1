"""Trackers, sums and saved models, which are left to Accelerate, of an `Accelerator` by a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from helpers.processes.harness import run_ranks
from helpers.scripts.programs import (
    GLOBAL_BATCH,
    Texts,
    as_launched,
    make_accelerator,
    model,
    other_ranks,
)

pytestmark = pytest.mark.slow


def looped(folder: Path, world: int) -> dict[str, Any]:
    """The script."""
    as_launched(folder)
    project = folder / f"project-{world}"
    accelerator = make_accelerator(
        world, other_ranks, log_with="tensorboard", project_dir=str(project)
    )
    accelerator.init_trackers("tracked", config={"learning_rate": 1e-2})
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    loader = DataLoader(Texts(), batch_size=GLOBAL_BATCH // world)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    asked = []
    for step, batch in enumerate(loader):
        loss = network(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss.item()}, step=step)
        if step == accelerator.num_processes:  # on all ranks at the same step
            accelerator.set_trigger()
        asked.append(accelerator.check_trigger())
    accelerator.save_model(network, str(folder / f"model-{world}"), max_shard_size="50KB")
    own = torch.tensor([1.0, 10.0]) * (1 + accelerator.process_index)
    sums = accelerator.reduce(own), accelerator.reduce(own, reduction="mean")
    accelerator.end_training()
    return {"sums": [one.tolist() for one in sums], "asked": asked.count(True)}


def logged(folder: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tracked")).Reload()
    return [(one.step, one.value) for one in found.Scalars("loss")]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 1
    return {name: value for file in files for name, value in load_file(file).items()}


@pytest.mark.extended
def test_trackers_sums_and_saved_models_are_as_ever(tmp_path):
    pytest.importorskip("tensorboard")
    (stock,) = run_ranks(looped, 1, tmp_path, 1)
    ours = run_ranks(looped, 2, tmp_path, 2, timeout_s=120)
    assert stock["sums"] == [[1.0, 10.0]] * 2
    for rank in ours:
        assert rank == {"sums": [[3.0, 30.0], [1.5, 15.0]], "asked": stock["asked"]}
    expected, found = logged(tmp_path / "project-1"), logged(tmp_path / "project-2")
    assert [step for step, _ in found] == [step for step, _ in expected] == [0, 1, 2, 3, 4]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], rel=1e-5)
    stocks, wholes = weights(tmp_path / "model-1"), weights(tmp_path / "model-2")
    assert wholes.keys() == stocks.keys()
    for name, value in stocks.items():
        torch.testing.assert_close(wholes[name], value, rtol=2e-3, atol=2e-4)
