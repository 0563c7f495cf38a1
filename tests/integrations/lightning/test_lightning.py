"""A script with Lightning's `Trainer`, changed by its strategy alone, gives what it gave before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from gpumix.report.run import read_run
from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.scripts.lightning_module import (
    module,
    one_rank,
    other_ranks,
    two_stages,
    unlike_ranks,
)
from helpers.scripts.programs import GLOBAL_BATCH, Texts, as_launched, told_of_input

pytest.importorskip("lightning")
pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
EPOCHS, STEPS = 2, 10  # the last batch of an epoch has 2 samples
LOGGED = ("val_loss", "first_words", "most of means", "sum of means", "mean of sums", "least")
WEIGHED = ("weighed", "weighed by tokens")
AT_END = ("words", "counted", "kept")
CHECKPOINT = "epoch=1-step=7.ckpt"


PLANS: dict[str, Callable[[], Any]] = {
    "unlike": unlike_ranks,
    "stages": two_stages,
    "other": other_ranks,
    "alone": one_rank,
}


def trained(folder: Path, plan: str = "", resumes: str = "") -> dict[str, Any]:
    """The script: fit, predict, save."""
    as_launched(folder)
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    told: dict[str, Any] = {"losses": [], "rates": [], "ends": [], "logged": [], "kept": []}
    told["of_epochs"] = []

    class Listener(Callback):
        def on_train_epoch_start(self, trainer, module):
            told["kept"].append(module.apart.total.item())

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            told["losses"].append(trainer.callback_metrics["loss"].item())
            told["logged"] += [
                trainer.callback_metrics[name].item()
                for name in ("rows", "highest", "apart", "mean_loss_step", "given_size")
            ]
            told["rates"].append(trainer.optimizers[0].param_groups[0]["lr"])
            told["ends"].append((trainer.global_step, batch_idx, outputs["loss"].item()))

        def on_train_epoch_end(self, trainer, module):
            told["of_epochs"].append(module.mean_loss.compute().item())
            told["of_epochs"].append(module.counted_rows.compute().item())

        def on_validation_end(self, trainer, module):
            told["validated"] = {k: v.item() for k, v in trainer.callback_metrics.items()}

    more: dict[str, Any] = {}
    world = 1
    if plan:
        from gpumix.integrations.lightning import GpumixStrategy

        made = PLANS[plan]()
        world = len(made.workers)
        more["strategy"] = GpumixStrategy(plan=made)
    output = folder / f"{plan or 'stock'}{resumes}"
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=EPOCHS,
        gradient_clip_val=0.5,
        callbacks=[
            Listener(),
            ModelCheckpoint(output, every_n_train_steps=7, save_top_k=-1),
        ],
        logger=CSVLogger(output),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(output),
        **more,
    )
    language = module()
    torch.manual_seed(21)
    loader = DataLoader(Texts(), batch_size=GLOBAL_BATCH // world, shuffle=True)
    evaluated = DataLoader(Texts(11, seed=2), batch_size=6 // world)
    begin = folder / resumes / CHECKPOINT if resumes else None
    trainer.fit(language, loader, evaluated, ckpt_path=begin)
    trainer.save_checkpoint(output / "final.ckpt")
    predicted = trainer.predict(language, DataLoader(Texts(7, seed=3), batch_size=6 // world))
    again = trainer.validate(language, evaluated, verbose=False)
    return told | {
        "predicted": torch.cat(predicted).tolist(),
        "again": again[0],
        "steps": trainer.global_step,
        "output": str(output),
        "log": trainer.log_dir,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("lightning")


@pytest.fixture(scope="module")
def stock(folder) -> dict[str, Any]:
    return run_ranks(trained, 1, folder)[0]


@pytest.fixture(scope="module")
def unlike(folder) -> list[dict[str, Any]]:
    return run_ranks(trained, 3, folder, "unlike", timeout_s=120)


@pytest.fixture(scope="module")
def stages(folder) -> list[dict[str, Any]]:
    return run_ranks(trained, 3, folder, "stages", timeout_s=120)


@pytest.fixture(params=left_out(["unlike", "stages"], ["stages"]))
def ours(request) -> list[dict[str, Any]]:
    return request.getfixturevalue(request.param)


def test_losses_and_rates_are_those_of_the_stock_script(stock, ours):
    assert len(stock["losses"]) == STEPS
    for rank in ours:
        assert rank["losses"] == pytest.approx(stock["losses"], rel=TOLERANCE)
        assert rank["rates"] == pytest.approx(stock["rates"], rel=TOLERANCE)
        assert [end[:2] for end in rank["ends"]] == [end[:2] for end in stock["ends"]]
        returned = [loss for *_, loss in stock["ends"]]
        assert [loss for *_, loss in rank["ends"]] == pytest.approx(returned, rel=TOLERANCE)


def test_what_a_validation_logs_is_of_all_samples(stock, ours):
    for rank in ours:
        for name in (*LOGGED, *WEIGHED, *AT_END):
            expected = stock["validated"][name]
            assert rank["validated"][name] == pytest.approx(expected, rel=TOLERANCE), name
            assert rank["again"][name] == pytest.approx(stock["again"][name], rel=TOLERANCE), name
        assert rank["logged"] == pytest.approx(stock["logged"], rel=TOLERANCE)  # by training


def test_a_metric_of_steps_begins_each_epoch_at_nothing(stock, ours):
    for rank in (stock, *ours):
        assert rank["kept"] == [0] * EPOCHS


def test_a_metric_of_single_numbers_has_one_for_each_batch(stock, ours):
    for rank in ours:
        assert rank["of_epochs"] == pytest.approx(stock["of_epochs"], rel=TOLERANCE)


def test_predictions_come_in_order(stock, ours):
    for rank in ours:
        assert rank["predicted"] == stock["predicted"]


def test_a_fit_leaves_what_reports_read(ours):
    folder = Path(ours[0]["log"], "gpumix")
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [event for event in events if "gradient_norm" in event]
    losses = [event["loss"] for event in steps]
    assert losses == pytest.approx([end[2] for end in ours[0]["ends"]], rel=1e-6)
    assert min(event["gradient_norm"] for event in steps) > 0
    assert json.loads((folder / "progress.json").read_text())["state"] == "finished"
    told_of_input(read_run(folder))


def test_a_checkpoint_is_one_of_lightnings(stock, ours):
    expected, found = (
        torch.load(Path(run["output"], "final.ckpt"), weights_only=True) for run in (stock, ours[0])
    )
    assert found["state_dict"].keys() == expected["state_dict"].keys()
    for name, value in expected["state_dict"].items():
        torch.testing.assert_close(found["state_dict"][name], value, rtol=2e-3, atol=2e-4)
    assert found["global_step"] == STEPS
    again = type(module()).load_from_checkpoint(Path(ours[0]["output"], "final.ckpt"))
    for name, value in again.state_dict().items():
        assert torch.equal(value, found["state_dict"][name]), name


@pytest.mark.parametrize(("plan", "world"), left_out([("alone", 1), ("other", 2)], [("other", 2)]))
def test_a_run_goes_on_by_another_plan_in_the_middle_of_an_epoch(
    plan, world, stock, unlike, folder
):
    for rank in run_ranks(trained, world, folder, plan, "unlike", timeout_s=120):
        assert rank["losses"] == pytest.approx(stock["losses"][7:], rel=TOLERANCE)
        assert rank["rates"] == pytest.approx(stock["rates"][7:], rel=TOLERANCE)
        assert rank["steps"] == STEPS


@pytest.mark.extended
def test_the_stock_script_goes_on_from_a_checkpoint_too(unlike, folder):
    (found,) = run_ranks(trained, 1, folder, "", "unlike", timeout_s=120)
    assert found["steps"] == STEPS


@pytest.mark.extended
def test_a_run_goes_on_from_a_checkpoint_of_the_stock_script(stock, folder):
    """With its weights and schedulers; the optimizer's state is empty, and the epoch starts again:
    the stock script keeps no place in it."""
    for rank in run_ranks(trained, 2, folder, "other", "stock", timeout_s=120):
        assert max(rank["losses"]) < min(stock["losses"][:4])
        assert rank["rates"] == pytest.approx(stock["rates"][7:], rel=TOLERANCE)
        assert rank["steps"] == STEPS


def quiet_trainer(**more: Any) -> Any:
    """Of one epoch, which leaves nothing."""
    from lightning.pytorch import Trainer

    return Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        max_epochs=1,
        **more,
    )


def validated_first(folder: Path, ours: bool) -> list[float]:
    """Losses of validations before and after training."""
    as_launched(folder)

    class Validated(type(module())):  # type: ignore[misc]
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.model(**batch).loss)

        def on_validation_epoch_end(self):
            pass

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    more: dict[str, Any] = {}
    if ours:
        from gpumix.integrations.lightning import GpumixStrategy

        more["strategy"] = GpumixStrategy(plan=other_ranks())
    trainer = quiet_trainer(num_sanity_val_steps=0, **more)
    processes, validated = (2 if ours else 1), Validated()
    evaluated = DataLoader(Texts(11, seed=2), batch_size=6 // processes)
    (before,) = trainer.validate(validated, evaluated, verbose=False)
    texts = DataLoader(Texts(), batch_size=GLOBAL_BATCH // processes)
    if ours:
        with raises(InputError, code="strategy-reused"):
            trainer.fit(Validated(), texts, evaluated)
    trainer.fit(validated, texts, evaluated)
    (after,) = trainer.validate(validated, evaluated, verbose=False)
    return [before["val_loss"], after["val_loss"]]


@pytest.mark.extended
def test_a_validation_comes_first(folder):
    (stock,) = run_ranks(validated_first, 1, folder, False, timeout_s=60)
    assert stock[0] > stock[1]
    for found in run_ranks(validated_first, 2, folder, True, timeout_s=120):
        assert found == pytest.approx(stock, rel=TOLERANCE)


def mean_over_ranks(folder: Path) -> str:
    """What is said of a mean of the ranks' own means, behind the steps of a validation."""
    as_launched(folder)
    from gpumix.integrations.lightning import GpumixStrategy

    class Averages(type(module())):  # type: ignore[misc]
        def on_validation_epoch_end(self):
            self.log("mean", torch.cat(self.words).mean(), sync_dist=True)

    trainer = quiet_trainer(strategy=GpumixStrategy(plan=other_ranks()))
    loaders = DataLoader(Texts(), batch_size=6), DataLoader(Texts(11, seed=2), batch_size=3)
    try:
        trainer.fit(Averages(), *loaders)
    except InputError as error:
        return f"{trainer.global_step} {error}"
    return "trained"


def test_a_mean_of_ranks_is_refused_before_the_first_step(folder):
    for said in run_ranks(mean_over_ranks, 2, folder, timeout_s=120):
        assert said.startswith("0 a hook behind the steps: a mean over ranks is asked for, and")
