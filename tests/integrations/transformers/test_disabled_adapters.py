"""Evaluation with disabled adapters, also before anything else, is that of stock transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpumix.engine.model.forward_coroutine import ModelError
from gpumix.hardware.host.replaced_attributes import replace_attributes
from gpumix.schema.job.search_space import EVERYTHING
from helpers.errors import raises
from helpers.processes.harness import run_ranks
from helpers.scripts.programs import Texts, arguments, as_launched, log_of, model
from helpers.training.reference import Share, plan_for

pytestmark = pytest.mark.slow

pytest.importorskip("peft")
pytest.importorskip("transformers")

TOLERANCE = 1e-5
ORDERS = {
    "evaluated alone": ("off", "on", "off"),
    "trained after": ("off", "train", "off", "on"),
    "trained between": ("on", "off", "train", "off"),
}


def adapted(*, saved: bool) -> Any:
    """The model with adapters; its head is trained in full too, if `saved`."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    config = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"] if saved else None
    )
    made: Any = get_peft_model(model(), config)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
    return made


def run(folder: Path, world: int, planned: bool, saved: bool) -> dict[str, list[float]]:
    """Return the losses of each order."""
    as_launched(folder)
    return {
        name: _run_order(folder / name, world, order, planned, saved)
        for name, order in ORDERS.items()
    }


def _run_order(
    folder: Path, world: int, order: Sequence[str], planned: bool, saved: bool
) -> list[float]:
    more: dict[str, Any] = {}
    if world == 1:
        from transformers import Trainer
    else:
        from gpumix.integrations.transformers import Trainer
    if planned:
        shares = [Share(8, 3, 1), Share(4, 4, 5)]
        more["plan"] = plan_for(adapted(saved=saved), shares, zero_stage=3)
    network = adapted(saved=saved)
    settings = {
        "max_steps": 3,
        "per_device_eval_batch_size": 4 // world,
        "eval_strategy": "no",
        "save_strategy": "no",
    }
    trainer = Trainer(
        model=network,
        args=arguments(folder, 12 // world, **settings),
        train_dataset=Texts(),
        eval_dataset=Texts(8, 2),
        **more,
    )
    losses = []
    for what in order:
        if what == "train":
            trainer.train()
            losses += log_of(trainer, "loss")
        elif what == "on":
            losses.append(trainer.evaluate()["eval_loss"])
        else:
            with network.disable_adapter():
                losses.append(trainer.evaluate()["eval_loss"])
    if world > 1 and planned:
        assert trainer.plan.digest() == more["plan"].digest()
    return losses


def run_in_stages(folder: Path, saved: bool) -> dict[str, list[float]]:
    from gpumix.integrations.transformers import trainer_mixin

    in_stages = EVERYTHING.model_copy(update={"min_pipeline_stages": 2})
    with replace_attributes(trainer_mixin, space_of=lambda arguments: in_stages):
        return run(folder, 2, False, saved)


def test_losses_of_two_stages_are_those_of_stock(tmp_path):
    """Each rank has stand-ins for the other's blocks, which are never trained."""
    expected, *_ = run_ranks(run, 1, tmp_path / "1", 1, False, False)
    for losses in run_ranks(run_in_stages, 2, tmp_path / "2", False, timeout_s=300):
        for order, values in expected.items():
            assert losses[order] == pytest.approx(values, rel=TOLERANCE), order


def test_an_original_head_on_another_stage_is_refused(tmp_path):
    """The last stage computes with the trained copy alone, as the samples of the profile did."""
    with raises(ModelError, code="remote-value-not-taken"):
        run_ranks(run_in_stages, 2, tmp_path, True, timeout_s=300)


@pytest.mark.parametrize(
    ("planned", "saved"),
    [(True, False), (True, True), (False, False)],
    ids=["", "head trained", "no plan given"],
)
def test_losses_are_those_of_stock(tmp_path, planned, saved):
    expected, *_ = run_ranks(run, 1, tmp_path / "1", 1, False, saved)
    off, on, again = expected["evaluated alone"]
    assert off == again != pytest.approx(on, rel=10 * TOLERANCE)
    for losses in run_ranks(run, 2, tmp_path / "2", 2, planned, saved, timeout_s=300):
        for order, values in expected.items():
            assert losses[order] == pytest.approx(values, rel=TOLERANCE), order
