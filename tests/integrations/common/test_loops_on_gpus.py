"""Loops of other libraries on a GPU: nothing of gpumix holds up the host in a step. Waits are
counted by the CUDA device for tests."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import cuda_device
import gpumix
from gpumix.integrations.common import run_recorder as records
from gpumix.report.run import read_run
from gpumix.train.run_log import run_files
from gpumix.train.run_log.metrics import StepRecord
from helpers.processes.harness import run_ranks
from helpers.scripts.programs import Texts, arguments, as_launched, model
from helpers.training.reference import Share, plan_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not cuda_device.is_here(), reason="waits are counted by the test device"),
]
OURS = str(Path(gpumix.__file__).parent)
# Who waits for the results of the step before the last one, which was given meanwhile.
OF_THE_STEP_BEFORE = {"async_read.py", "timestamps.py"}
BATCH = 4


def on_the_gpu(folder: Path) -> Any:
    """A plan for this rank, which a launcher seems to have started."""
    as_launched(folder)
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # one process takes one GPU
    del os.environ["ACCELERATE_USE_CPU"]
    cluster = folder / "gpu.yaml"
    cluster.write_text("- {class: card, accelerator: cuda, memory: 1GiB}\n")
    os.environ["GPUMIX_CLUSTER"] = str(cluster)
    records.REPORT_INTERVAL_STEPS = 1000  # ranks then tell each other how they did
    return plan_for(model(), [Share(BATCH, 2, 1)], zero_stage=2)


def recorded(folder: Path) -> list[StepRecord]:
    """The steps that the record has told of so far."""
    path = folder / "out" / run_files.SCRIPT_FOLDER
    return list(read_run(path).history.steps) if (path / run_files.METRICS).exists() else []


def trained(folder: Path) -> tuple[list[Counter[str]], list[int], list[float]]:
    """The waits of a `Trainer`'s steps, how many it had recorded when it began to log each, and the
    losses that it logged."""
    plan = on_the_gpu(folder)
    from transformers import TrainerCallback

    from gpumix.integrations.transformers import Trainer

    found, told = [], []

    class Counting(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            assert args.logging_nan_inf_filter
            found.append(cuda_device.host_waits())
            told.append(len(recorded(folder)))
            cuda_device.reset_host_waits()

    settings = {"use_cpu": False, "eval_strategy": "no", "save_strategy": "no", "logging_steps": 3}
    settings["max_steps"] = 9  # before the next one a rehearsal is held
    trainer = Trainer(
        model=model(),
        args=arguments(folder / "out", BATCH, **settings),
        train_dataset=Texts(),
        callbacks=[Counting()],
        plan=plan,
    )
    trainer.train()
    return found, told, [one["loss"] for one in trainer.state.log_history if "loss" in one]


def spoilt(folder: Path) -> tuple[list[float], bool]:
    """What a `Trainer` logs whose losses are bad from the second step on, and whether its arguments
    are in the end what they were."""
    plan = on_the_gpu(folder)
    from gpumix.integrations.transformers import Trainer

    class Spoilt(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            return loss * (torch.nan if self.state.global_step else 1.0)

    settings = {"use_cpu": False, "eval_strategy": "no", "save_strategy": "no", "max_steps": 3}
    args = arguments(folder / "out", BATCH, **settings)
    trainer = Spoilt(model=model(), args=args, train_dataset=Texts(), plan=plan)
    trainer.train()
    losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    return losses, trainer.args.logging_nan_inf_filter


def looped(folder: Path) -> tuple[list[Counter[str]], list[int], list[float]]:
    """The waits of a loop's steps with an `Accelerator`, how many it had recorded behind each, and
    its losses."""
    plan = on_the_gpu(folder)
    from gpumix import Accelerator

    accelerator = Accelerator(plan=plan, project_dir=str(folder / "out"))
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, fused=True)
    loader = DataLoader(Texts(28), batch_size=BATCH, pin_memory=True)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    losses, found, told = [], [], []
    for batch in loader:
        cuda_device.reset_host_waits()
        loss = network(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(cuda_device.host_waits())
        told.append(len(recorded(folder)))
        losses.append(loss.detach())
    accelerator.end_training()
    return found, told, torch.stack(losses).tolist()


@pytest.mark.parametrize(("loop", "behind"), [(trained, 2), (looped, 1)])
def test_no_step_waits_for_itself(loop, behind, tmp_path):
    """The record is a step behind; a Trainer's begins after the callbacks of the step. Bad losses
    are not looked for on the host, as the Trainer's own loop does by default."""
    waits, told, losses = run_ranks(loop, 1, tmp_path, timeout_s=120)[0]
    places = [place for one in waits[1:] for place in one]
    ours = {Path(place.rpartition(":")[0]).name for place in places if place.startswith(OURS)}
    assert ours <= OF_THE_STEP_BEFORE
    assert told == [max(0, number - behind) for number in range(1, len(waits) + 1)]
    steps = recorded(tmp_path)
    assert [one.step for one in steps] == list(range(1, len(waits) + 1))
    if loop is looped:
        assert [one.loss for one in steps] == pytest.approx(losses)
    else:
        of_the_loop = {line for line in places if "transformers/trainer.py" in line}
        assert len(of_the_loop) == 2  # of what is logged, each third step
        means = [sum(one.loss for one in steps[n : n + 3]) / 3 for n in range(0, len(steps) - 2, 3)]
        assert losses == pytest.approx(means, rel=1e-4)


@pytest.mark.extended
def test_bad_losses_are_left_out_of_what_is_logged(tmp_path):
    """As by the loop's own filter: in their place comes the mean since the last log, here none."""
    losses, filters = run_ranks(spoilt, 1, tmp_path, timeout_s=120)[0]
    assert losses[0] > 0
    assert losses[1:] == [0.0, 0.0]
    assert filters
