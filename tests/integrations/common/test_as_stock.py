"""What programs ask of stock loaders, trainers and accelerators beside training."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from gpumix.integrations.dataloader.example_batch import find_example
from gpumix.testing import Share, plan_for
from helpers.errors import raises
from helpers.processes.harness import run_ranks
from helpers.scripts.programs import Texts, arguments, as_launched, model

pytestmark = pytest.mark.slow
ALONE = [Share(4, 2, 1)]


class Numbers(Dataset[Any]):
    """Of which an epoch has its own."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 8

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([float(place + 100 * self.epoch)])}


def _epochs(folder: Path) -> dict[str, list[Any]]:
    as_launched(folder)
    from accelerate import DataLoaderConfiguration

    from gpumix import Accelerator

    torch.manual_seed(3)
    config = DataLoaderConfiguration(use_seedable_sampler=True)
    loader = DataLoader(Numbers(), batch_size=4, shuffle=True)
    loader = Accelerator(dataloader_config=config).prepare(loader)

    def read() -> list[float]:
        return [x for batch in loader for x in batch["x"].flatten().tolist()]

    found = {"first": read(), "second": read()}
    loader.set_epoch(0)
    return found | {"again": read(), "then": read(), "more": read()}


def test_a_loop_says_which_epoch_comes_next(tmp_path):
    (found,) = run_ranks(_epochs, 1, tmp_path)
    assert found["again"] == found["first"] and found["then"] == found["second"]
    assert len({tuple(sorted(one)) for one in (found["first"], found["second"])}) == 2
    assert sorted(found["more"]) == [float(200 + place) for place in range(8)]


def _backwards(folder: Path) -> dict[str, Any]:
    as_launched(folder)
    import accelerate

    import gpumix
    from gpumix.schema.errors import InputError

    accelerate.Accelerator = gpumix.Accelerator  # type: ignore[misc]
    network, other = model(), nn.Linear(3, 1)
    accelerator = accelerate.Accelerator(
        plan=plan_for(model(), ALONE),
        gradient_accumulation_steps=2,  # type: ignore[call-arg]
    )
    optimizer = torch.optim.AdamW(network.parameters())
    loader = DataLoader(Texts(), batch_size=4)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    accelerator.backward(other(torch.ones(2, 3)).sum())
    gradient = other.weight.grad.tolist()
    batch = next(iter(loader))
    told = []
    loss = network(**batch).loss
    accelerator.backward(loss)
    for again in (lambda: loss, lambda: loss + other(torch.ones(2, 3)).sum()):
        try:
            accelerator.backward(again())
        except (InputError, RuntimeError) as error:
            told.append(str(error))
    network(**batch)
    try:
        accelerator.backward(other(torch.ones(2, 3)).sum())
    except InputError as error:
        told.append(str(error))
    return {"gradient": gradient, "told": told}


def test_backward_of_another_model_is_its_own_affair(tmp_path):
    """Between calls of the model; with Accelerate's class replaced by gpumix's."""
    (found,) = run_ranks(_backwards, 1, tmp_path)
    assert found["gradient"] == [[1.0] * 3]  # 2 samples, by 2 steps of accumulation
    assert len(found["told"]) == 3
    assert all("the loss does not come from the last call" in one for one in found["told"])


def _trained(folder: Path) -> dict[str, Any]:
    as_launched(folder)
    from transformers import trainer_utils

    from gpumix.integrations.transformers import Trainer

    told: list[str] = []
    trainer_utils.logger.warning_once = told.append
    network = model()
    before = inspect.signature(network.model.layers[0].forward)
    plan = plan_for(model(), [Share(8, 4, 1)])
    for resumes, each in ((False, 4), (True, 2)):
        args = arguments(
            folder / "out",
            each,
            gradient_accumulation_steps=8 // each,
            save_strategy="steps",
            save_steps=1,
            max_steps=1 + resumes,
            dataloader_persistent_workers=True,
            dataloader_num_workers=1,
        )
        trainer = Trainer(
            model=network, args=args, plan=plan, train_dataset=Texts(24), eval_dataset=Texts(8)
        )
        trainer.train(resume_from_checkpoint=resumes)
    loaders = [trainer.get_eval_dataloader() for _ in range(2)]
    return {
        "told": told,
        "alike": before == inspect.signature(network.model.layers[0].forward),
        "same": loaders[0] is loaders[1],
        "texts": len(loaders[0].dataset),
        "steps": trainer.state.global_step,
    }


def test_a_trainer_compares_keeps_and_shows_as_the_stock_one(tmp_path):
    (found,) = run_ranks(_trained, 1, tmp_path)
    (told,) = (one for one in found["told"] if "do not match" in one)
    assert "per_device_train_batch_size: 2 (from args) != 4 (from trainer_state.json)" in told
    assert found["alike"] and found["same"]
    assert (found["texts"], found["steps"]) == (8, 2)


def test_a_collator_that_pads_nothing_is_not_asked_to():
    def stacked(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.stack([one["input_ids"] for one in samples])}

    unlike = [{"input_ids": torch.ones(length, dtype=torch.long)} for length in (3, 5)]
    specimen = find_example(unlike, stacked)
    assert specimen.sequence_length == 5
    assert specimen.padded() is None


def _fitted(folder: Path) -> dict[str, Any]:
    as_launched(folder)
    from lightning.pytorch import LightningModule, Trainer

    from gpumix.integrations.lightning import GpumixStrategy
    from gpumix.schema.errors import InputError

    class Module(LightningModule):
        """Whose first unit gets the batch itself, of which a hook takes a part."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch["x"], batch["y"]

        def step(self, batch: Any, name: str) -> Any:
            x, y = batch
            loss = nn.functional.mse_loss(self.layer(x), y)
            self.log(name, loss, reduce_fx="AVG")
            return loss

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.step(batch, "loss")

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return self.step(batch, "val_loss")

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else self.layer(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(2)
    rows = [{"x": torch.randn(3), "y": torch.ones(1), "name": torch.ones(1)} for _ in range(12)]
    loader = DataLoader(rows, batch_size=4)  # type: ignore[arg-type]
    found = {}
    for kind in ("stock", "ours"):
        torch.manual_seed(3)
        module, more = Module(), {} if kind == "stock" else {"strategy": GpumixStrategy()}
        settings = {"logger": False, "enable_progress_bar": False, "max_epochs": 1}
        trainer = Trainer(default_root_dir=folder / kind, accelerator="cpu", **settings, **more)
        (before,) = trainer.validate(module, loader, verbose=False)
        trainer.fit(module, loader, loader)
        trainer.save_checkpoint(folder / f"{kind}.ckpt")
        saved = torch.load(folder / f"{kind}.ckpt", weights_only=True)["state_dict"]
        more = more and {"strategy": GpumixStrategy()}
        another = Trainer(default_root_dir=folder / kind, accelerator="cpu", **settings, **more)
        another.fit(module, loader)
        (after,) = another.validate(module, loader, verbose=False)
        losses = before["val_loss"], after["val_loss"], trainer.callback_metrics["loss"].item()
        found[kind] = losses, saved, another.predict(module, loader)
    for made, told in (
        (torch.zeros(()), "tensor"),
        (["a"] * 4, "str"),
        (4, "int"),
    ):
        module.predict_step = lambda batch, batch_idx, made=made: made  # type: ignore[method-assign]
        with raises(InputError, code="predictions-not-per-sample", what=("predict_step", told)):
            another.predict(module, loader)
    strategy = GpumixStrategy()
    strategy.connect(Module())
    found["before"] = sorted(strategy.lightning_module_state_dict())
    return found


def test_a_module_whose_first_unit_gets_the_batch_goes_from_trainer_to_trainer(tmp_path):
    (found,) = run_ranks(_fitted, 1, tmp_path)
    assert found["ours"][0] == pytest.approx(found["stock"][0], rel=1e-5)
    for name, value in found["stock"][1].items():
        torch.testing.assert_close(found["ours"][1][name], value)
    stock, ours = found["stock"][2], found["ours"][2]
    assert [one is None for one in ours] == [one is None for one in stock] == [False, True, False]
    torch.testing.assert_close(ours[::2], stock[::2])
    assert found["before"] == ["layer.bias", "layer.weight"]
