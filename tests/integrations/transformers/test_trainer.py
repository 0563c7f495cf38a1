"""A script with `Trainer`, changed by its import alone, gives what it gave before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpumix.report.run import read_run
from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.scripts.programs import (
    GLOBAL_BATCH,
    Texts,
    accuracy,
    arguments,
    as_launched,
    best,
    log_of,
    model,
    other_ranks,
    saved,
    told_of_input,
    two_stages,
    unlike_ranks,
)
from helpers.training.reference import Share, plan_for

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
STEPS = 5  # one epoch, whose last batch has 2 samples
EVALUATED = 6  # samples of a batch


def one_rank() -> Any:
    return plan_for(model(), [Share(GLOBAL_BATCH, 6, 1)])


PLANS: dict[str, Callable[[], Any]] = {
    "unlike": unlike_ranks,
    "stages": two_stages,
    "alone": one_rank,
    "other": other_ranks,
}


def trained(folder: Path, import_of: str, plan: str = "", resumes: bool = False) -> dict[str, Any]:
    """The script: train, predict, save."""
    as_launched(folder)
    if import_of == "transformers":
        from transformers import Trainer, TrainerCallback

        more: dict[str, Any] = {}
        world = 1
    else:
        from transformers import TrainerCallback

        from gpumix.integrations.common import run_recorder
        from gpumix.integrations.transformers import Trainer

        run_recorder.REPORT_INTERVAL_STEPS = 3
        made = PLANS[plan]()
        more, world = {"plan": made}, len(made.workers)

    told: list[str] = []

    class Callback(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            told.append(f"step {state.global_step}")

        def on_evaluate(self, args, state, control, metrics, **kwargs):
            told.append(f"evaluated {sorted(metrics)}")

    output = folder / f"{import_of}{plan}{'-again' if resumes else ''}"
    trainer = Trainer(
        model=model(),
        args=arguments(
            output,
            GLOBAL_BATCH // world,
            num_train_epochs=1,
            per_device_eval_batch_size=EVALUATED // world,
        ),
        train_dataset=Texts(),
        eval_dataset=Texts(10, seed=2),
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=best,
        callbacks=[Callback()],
        **more,
    )
    checkpoint = folder / "gpumixother" / "checkpoint-4" if resumes else None
    result = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    trainer.save_model(str(output / "final"))
    predicted = trainer.predict(Texts(7, seed=3))
    return {
        "losses": log_of(trainer, "loss"),
        "norms": log_of(trainer, "grad_norm"),
        "rates": log_of(trainer, "learning_rate"),
        "evaluated": log_of(trainer, "eval_accuracy"),
        "seen": log_of(trainer, "eval_seen"),
        "eval_losses": log_of(trainer, "eval_loss"),
        "told": told,
        "flos": trainer.state.total_flos,
        "steps": result.global_step,
        "predicted": predicted.predictions.tolist(),
        "labels": predicted.label_ids.tolist(),
        "parameters": trainer.get_num_trainable_parameters(),
        "output": str(output),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def stock(folder) -> dict[str, Any]:
    return run_ranks(trained, 1, folder, "transformers")[0]


@pytest.fixture(scope="module")
def other(folder) -> list[dict[str, Any]]:
    return run_ranks(trained, 2, folder, "gpumix", "other", timeout_s=120)


@pytest.fixture(scope="module")
def unlike(folder) -> list[dict[str, Any]]:
    return run_ranks(trained, 3, folder, "gpumix", "unlike", timeout_s=120)


@pytest.fixture(scope="module")
def stages(folder) -> list[dict[str, Any]]:
    return run_ranks(trained, 3, folder, "gpumix", "stages", timeout_s=120)


@pytest.fixture(params=left_out(["other", "unlike", "stages"], ["unlike", "stages"]))
def ours(request) -> list[dict[str, Any]]:
    return request.getfixturevalue(request.param)


def test_losses_norms_and_rates_are_those_of_the_stock_script(stock, ours):
    assert len(stock["losses"]) == STEPS
    for rank in ours:
        for name in ("losses", "norms", "rates"):
            assert rank[name] == pytest.approx(stock[name], rel=TOLERANCE), name


def test_metrics_are_of_all_samples(stock, ours):
    assert min(stock["evaluated"]) > 0
    for rank in ours:
        assert rank["evaluated"] == stock["evaluated"]
        assert rank["seen"] == stock["seen"]
        assert rank["eval_losses"] == pytest.approx(stock["eval_losses"], rel=TOLERANCE)


def test_predictions_come_in_order(stock, ours):
    for rank in ours:
        assert rank["predicted"] == stock["predicted"]
        assert rank["labels"] == stock["labels"]


def test_the_saved_model_is_the_stock_one(stock, ours):
    expected = saved(Path(stock["output"], "final"))
    found = saved(Path(ours[0]["output"], "final"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-3, atol=2e-4, err_msg=name)


def test_callbacks_and_counts_are_those_of_the_stock_script(stock, ours):
    for rank in ours:
        assert rank["told"] == stock["told"]
        assert rank["parameters"] == stock["parameters"]
        assert rank["steps"] == STEPS
    assert ours[0]["flos"] == stock["flos"]


@pytest.mark.parametrize(
    ("plan", "world"), left_out([("alone", 1), ("unlike", 3)], [("unlike", 3)])
)
def test_a_run_goes_on_by_another_plan_on_other_devices(plan, world, stock, other, folder):
    for rank in run_ranks(trained, world, folder, "gpumix", plan, True, timeout_s=120):
        assert rank["losses"] == pytest.approx(stock["losses"], rel=TOLERANCE)
        assert rank["told"] == [
            t for t in stock["told"] if t not in [f"step {n}" for n in range(1, 5)]
        ]


def test_top_and_report_read_what_a_run_leaves(stock, other):
    run = read_run(Path(other[0]["output"]))
    assert run.progress.state == "finished"
    assert (run.progress.step, run.progress.steps) == (STEPS, STEPS)
    steps = run.history.steps
    assert [one.loss for one in steps] == pytest.approx(stock["losses"], rel=TOLERANCE)
    assert [one.loss for one in run.history.evaluations] == pytest.approx(
        other[0]["eval_losses"][:2]
    )


def test_how_devices_did_is_told_while_the_run_goes_on(other):
    run = read_run(Path(other[0]["output"], "gpumix"))
    assert [window.step for window in run.history.windows] == [3, STEPS]
    for window in run.history.windows:
        assert sum(one.samples for one in window.classes) == GLOBAL_BATCH
        assert all(0 < one.busy_share <= 1 for one in window.classes)
    assert [one.device for one in run.history.ranks] == [w.device for w in run.plan.workers]
    assert all(one.sent_bytes > 0 for one in run.history.ranks)
    told_of_input(run)


def test_the_script_is_recorded(other):
    record = read_run(Path(other[0]["output"], "gpumix")).record
    assert record is not None and record.script is not None
    assert record.script.plans == "Trainer"
    assert record.script.processes == len(other)
    assert {"torch", "transformers", "accelerate"} <= record.packages.keys()
