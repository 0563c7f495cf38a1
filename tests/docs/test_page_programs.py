"""The pages' lines for trainers of other libraries train, on unlike devices, to the losses of the
stock classes. Those for Ray: `test_ray_page.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from gpumix.schema.plan.plan import Plan
from helpers.pages import replaced, shown, with_change, without_change
from helpers.processes.harness import run_ranks
from helpers.scripts.programs import (
    GLOBAL_BATCH,
    Texts,
    arguments,
    as_launched,
    log_of,
    model,
    other_ranks,
)

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5


# -- Trainer of transformers -----------------------------------------------------------------------

SHORT = {"num_train_epochs": 1, "eval_strategy": "no", "save_strategy": "no"}


def trained(lines: str, folder: Path, world: int) -> list[float]:
    """The losses of lines that make a trainer, of what they do not say themselves."""
    as_launched(folder)
    names: dict[str, Any] = {
        "model": model(),
        "args": arguments(folder / f"of-{world}", GLOBAL_BATCH // world, **SHORT),
        "dataset": Texts(),
    }
    exec(compile(lines, "lines", "exec"), names)
    trainer = names["trainer"]
    trainer.train()
    if world > 1:
        assert trainer.plan == Plan.load(folder / "plan.json")
    return log_of(trainer, "loss")


def test_a_trainer_by_a_plan_trains_as_the_stock_one(tmp_path):
    ours = shown("guides/hugging-face.md", "python", "plan=")
    other_ranks().save(tmp_path / "plan.json")
    plan = {'"plan.json"': repr(str(tmp_path / "plan.json"))}
    stock = replaced(ours, {"gpumix.integrations.": "", ', plan="plan.json"': ""})
    (expected,) = run_ranks(trained, 1, stock, tmp_path, 1)
    assert len(expected) == 5
    losses, _ = run_ranks(trained, 2, replaced(ours, plan), tmp_path, 2)
    assert losses == pytest.approx(expected, rel=1e-4)


# -- Trainer of Lightning --------------------------------------------------------------------------

ONE_EPOCH = "max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False"


def fitted(lines: str, world: int, folder: Path) -> dict[str, float]:
    """The losses of the last step and evaluation of lines with a trainer, of what they do not say
    themselves."""
    as_launched(folder)
    from helpers.scripts.lightning_module import module, other_ranks

    names: dict[str, Any] = {
        "module": module(),
        "loader": DataLoader(Texts(), batch_size=GLOBAL_BATCH // world),
        "evaluated": DataLoader(Texts(11, seed=2), batch_size=6 // world),
        "plan": other_ranks(),
    }
    exec(compile(lines, "lines", "exec"), names)
    assert names["trainer"].global_step > 3
    logged = names["trainer"].callback_metrics
    return {name: logged[name].item() for name in ("loss", "val_loss")}


@pytest.mark.extended
def test_the_change_for_lightning_trains_as_before(tmp_path):
    pytest.importorskip("lightning")
    change = replaced(
        shown("lightning.md", "diff", "GpumixStrategy"),
        {
            'accelerator="gpu", devices=4, strategy="ddp"': 'accelerator="cpu", devices=1',
            "GpumixStrategy()": "GpumixStrategy(plan=plan)",
            'precision="bf16-mixed"': f'precision="32-true", {ONE_EPOCH}',
        },
    )
    before, after = without_change(change), with_change(change)
    assert "gpumix" not in before and "gpumix" in after
    (expected,) = run_ranks(fitted, 1, before, 1, tmp_path)
    for found in run_ranks(fitted, 2, after, 2, tmp_path):
        assert found == pytest.approx(expected, rel=TOLERANCE)
