"""A loop with `Accelerator`, changed by its import alone, gives what it gave before."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from gpumix.report.page import render_page
from gpumix.report.run import Run, read_run
from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.extended import every_second, left_out
from helpers.processes.harness import run_ranks
from helpers.scripts.programs import (
    GLOBAL_BATCH,
    Texts,
    as_launched,
    make_accelerator,
    model,
    other_ranks,
    told_of_input,
    unlike_ranks,
)
from helpers.training.reference import Share, plan_for

pytestmark = pytest.mark.slow

EPOCHS = 2


def one_rank() -> Any:
    return plan_for(model(), [Share(GLOBAL_BATCH, 6, 1)])


PLANS = {1: one_rank, 2: other_ranks, 3: unlike_ranks}


class Batches:
    """What a program counts and keeps by itself."""

    seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


class Outside(nn.Module):
    """Returns logits; the loop computes the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = model()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids).logits


def outside_ranks() -> Any:
    return plan_for(Outside(), [Share(5, 2, 3), Share(7, 4, 1)], zero_stage=2)


def project(folder: Path, world: int, *, inside: bool = True, accumulates: int = 1) -> str:
    return str(folder / f"project-{world}-{'inside' if inside else 'outside'}-{accumulates}")


def looped(folder: Path, world: int, *, inside: bool, accumulates: int = 1) -> dict[str, Any]:
    """The script."""
    as_launched(folder)
    from accelerate.utils import DataLoaderConfiguration

    more: dict[str, Any] = {}
    if not inside:
        more["dataloader_config"] = DataLoaderConfiguration(
            use_seedable_sampler=True, data_seed=3, even_batches=False
        )
    if world == 1:
        from accelerate import Accelerator
    else:
        from gpumix import Accelerator

        more["plan"] = PLANS[world]() if inside else outside_ranks()
        more["project_dir"] = project(folder, world, inside=inside, accumulates=accumulates)
    accelerator = Accelerator(gradient_accumulation_steps=accumulates, **more)
    torch.manual_seed(11)
    network = model() if inside else Outside()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=0.1)
    torch.manual_seed(12)
    columns = None if inside else ["input_ids"]
    loader = DataLoader(Texts(), batch_size=GLOBAL_BATCH // world, shuffle=True)
    evaluated = DataLoader(Texts(10, seed=2), batch_size=6 // world)
    network, optimizer, loader, evaluated = accelerator.prepare(
        network, optimizer, loader, evaluated
    )
    losses, norms = [], []
    batches = Batches()
    accelerator.register_for_checkpointing(batches)
    for _ in range(EPOCHS):
        network.train()
        for batch in loader:
            with accelerator.accumulate(network):
                if columns is None:
                    loss = network(**batch).loss
                else:
                    logits = network(*(batch[name] for name in columns))
                    loss = nn.functional.cross_entropy(
                        logits.flatten(0, 1), batch["input_ids"].flatten()
                    )
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(network.parameters(), 1.0)))
                    accelerator.clip_grad_value_(network.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
            rows = len(batch["input_ids"]) if world == 1 or not inside else None
            losses.append((loss.item(), rows))
            batches.seen += 1
        if len(losses) == len(loader):
            accelerator.save_state(str(folder / f"state-{world}"))
    network.eval()
    predictions, total, texts = [], [], []
    for batch in evaluated:
        with torch.no_grad():
            outputs = network(**batch) if columns is None else network(batch["input_ids"])
        logits = outputs.logits if columns is None else outputs
        found = accelerator.gather_for_metrics((logits.argmax(-1), batch["labels"]))
        predictions += torch.stack(found).transpose(0, 1).tolist()
        own = batch["labels"].tolist()
        texts += accelerator.gather_for_metrics([f"labels {row}" for row in own])
        texts += accelerator.gather_for_metrics(own, use_gather_object=True)
        if columns is None:
            total.append(outputs.loss.item())
    state = accelerator.get_state_dict(network)
    if world == 3:
        accelerator.end_training()  # others just end
    return {
        "losses": losses,
        "norms": norms,
        "predictions": predictions,
        "evaluated": total,
        "texts": texts,
        "steps": len(loader),
        "names": sorted(state),
        "weights": {name: value.flatten()[:4].tolist() for name, value in state.items()},
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("loop")


@pytest.fixture(scope="module")
def stock(folder) -> dict[str, Any]:
    return run_ranks(_inside, 1, folder, 1)[0]


def _inside(folder: Path, world: int) -> dict[str, Any]:
    return looped(folder, world, inside=True)


@pytest.fixture(scope="module", params=every_second([3, 2]))
def ours(request, folder) -> list[dict[str, Any]]:
    return run_ranks(_inside, request.param, folder, request.param, timeout_s=120)


def test_losses_and_norms_are_those_of_the_stock_script(stock, ours):
    assert stock["steps"] == 5
    for rank in ours:
        assert rank["steps"] == stock["steps"]
        assert [loss for loss, _ in rank["losses"]] == pytest.approx(
            [loss for loss, _ in stock["losses"]], rel=1e-5
        )
        assert rank["norms"] == pytest.approx(stock["norms"], rel=1e-4)


def test_metrics_are_of_all_samples_in_order(stock, ours):
    for rank in ours:
        assert rank["predictions"] == stock["predictions"]
        assert rank["texts"] == stock["texts"]
        assert rank["evaluated"] == pytest.approx(stock["evaluated"], rel=1e-5)


def test_the_whole_model_comes_out(stock, ours):
    assert ours[0]["names"] == stock["names"]
    for name, values in stock["weights"].items():
        assert ours[0]["weights"][name] == pytest.approx(values, abs=2e-4), name
    assert all(rank["names"] == [] for rank in ours[1:])


def record_of(*args: Any, **kwargs: Any) -> Run:
    return read_run(Path(project(*args, **kwargs), "gpumix"))


def test_top_and_report_read_what_a_loop_leaves(stock, ours, folder):
    run = record_of(folder, len(ours))
    expected = [loss for loss, _ in stock["losses"]]
    assert [one.step for one in run.history.steps] == list(range(1, len(expected) + 1))
    assert [one.loss for one in run.history.steps] == pytest.approx(expected, rel=1e-5)
    norms = [one.gradient_norm for one in run.history.steps]
    assert norms == pytest.approx(stock["norms"], rel=1e-4)
    assert [one.learning_rate for one in run.history.steps] == [1e-2] * len(expected)
    assert [one.step for one in run.history.windows] == [10]
    events = [(one.step, one.event) for one in run.history.events]
    assert events == [(1, "losses"), (5, "checkpoint")]
    assert run.record is not None and run.record.script is not None
    assert run.record.script.plans == "Accelerator"
    assert run.progress.steps is None and run.progress.step == len(expected)
    assert "step 10" in render_page(run)
    told_of_input(run)


def test_a_record_is_finished_by_the_program_s_word(ours, folder):
    """Ranks of the harness end without what an interpreter does at its end."""
    expected = "finished" if len(ours) == 3 else "training"
    assert record_of(folder, len(ours)).progress.state == expected


@pytest.mark.extended
def test_a_loss_of_the_loops_own_is_the_same(folder):
    """Means over samples of one length: the ranks' losses, weighted, are the stock one."""
    (stock,) = run_ranks(_outside, 1, folder, 1)
    ranks = run_ranks(_outside, 2, folder, 2, timeout_s=120)
    for step, (loss, samples) in enumerate(stock["losses"]):
        parts = [rank["losses"][step] for rank in ranks]
        assert sum(rows for _, rows in parts) == samples
        mean = sum(part * rows for part, rows in parts if rows) / samples
        assert mean == pytest.approx(loss, rel=1e-5)
    for rank in ranks:
        assert rank["norms"] == pytest.approx(stock["norms"], rel=1e-4)
        assert rank["predictions"] == stock["predictions"]
    recorded = [one.loss for one in record_of(folder, 2, inside=False).history.steps]
    assert recorded == pytest.approx([loss for loss, _ in stock["losses"]], rel=1e-5)


def _outside(folder: Path, world: int) -> dict[str, Any]:
    return looped(folder, world, inside=False)


@pytest.mark.extended
def test_a_rank_without_samples_computes_a_loss_of_its_own_that_counts_nothing(folder):
    """In the first batch, when it has seen no outputs yet, and in the last one of an epoch."""
    (stock,) = run_ranks(_short, 1, folder, 1)
    assert [rows for _, rows in stock["losses"]] == [1, GLOBAL_BATCH, 1]
    for rank in run_ranks(_short, 2, folder, 2, timeout_s=120):
        assert rank["norms"] == pytest.approx(stock["norms"], rel=1e-4)
        for (own, rows), (loss, samples) in zip(rank["losses"], stock["losses"], strict=True):
            assert samples > 1 or (own, rows) == (pytest.approx(loss, rel=1e-5), 1)  # or stands in


def _short(folder: Path, world: int) -> dict[str, Any]:
    as_launched(folder)
    accelerator = make_accelerator(world, outside_ranks)
    torch.manual_seed(11)
    network = Outside()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    loaders = [
        DataLoader(Texts(samples, seed=seed), batch_size=GLOBAL_BATCH // world)
        for seed, samples in enumerate([GLOBAL_BATCH, 1, GLOBAL_BATCH + 1])
    ]
    network, optimizer, *loaders = accelerator.prepare(network, optimizer, *loaders)
    network.train()
    losses, norms = [], []
    for batch in chain(*loaders[1:]):
        ids = batch["input_ids"]
        loss = nn.functional.cross_entropy(network(ids).flatten(0, 1), ids.flatten())
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(network.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss.item(), len(ids)))
    return {"losses": losses, "norms": norms}


@pytest.mark.extended
@pytest.mark.parametrize("form", ["tuple", "own names"])
def test_batches_of_any_form_are_measured_and_trained_on(form, tmp_path):
    """As a loop over `TensorDataset`s has them; what the model takes of them is its own affair."""
    (stock,) = run_ranks(_formed, 1, tmp_path, 1, form)
    for rank in run_ranks(_formed, 2, tmp_path, 2, form, timeout_s=120):
        assert rank["norms"] == pytest.approx(stock["norms"], rel=1e-4)
        assert rank["found"] == stock["found"]


def _formed(folder: Path, world: int, form: str) -> dict[str, Any]:
    as_launched(folder)
    accelerator = make_accelerator(world)
    torch.manual_seed(11)
    network = Outside()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    ids = Texts().rows["input_ids"]
    samples: Any = TensorDataset(ids, ids.roll(1, 1))
    if form == "own names":
        samples = [{"text": text, "wanted": wanted} for text, wanted in samples]
    loader = DataLoader(samples, batch_size=GLOBAL_BATCH // world)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    norms, found = [], []
    for batch in loader:
        text, wanted = batch.values() if isinstance(batch, dict) else batch
        logits = network(text)
        accelerator.backward(nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()))
        norms.append(float(accelerator.clip_grad_norm_(network.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        found += accelerator.gather_for_metrics(wanted).tolist()
    return {"norms": norms, "found": found}


@pytest.mark.extended
def test_gradients_accumulate(folder):
    (stock,) = run_ranks(_accumulated, 1, folder, 1)
    for rank in run_ranks(_accumulated, 2, folder, 2, timeout_s=120):
        assert rank["norms"] == pytest.approx(stock["norms"], rel=1e-4)
        assert len(rank["norms"]) == 2 * 3  # the last batch of an epoch steps too
    steps = record_of(folder, 2, accumulates=2).history.steps
    losses = [loss for loss, _ in stock["losses"]]
    parts = [losses[:2], losses[2:4], losses[4:5], losses[5:7], losses[7:9], losses[9:]]
    assert [one.loss for one in steps] == pytest.approx([sum(p) / len(p) for p in parts], rel=1e-5)
    assert steps[-1].tokens == EPOCHS * int((Texts().rows["labels"][:, 1:] != -100).sum())


def _accumulated(folder: Path, world: int) -> dict[str, Any]:
    return looped(folder, world, inside=True, accumulates=2)


@pytest.mark.parametrize("world", left_out([1, 2], [2]))
def test_a_run_goes_on_by_another_plan(world, folder, stock, ours):
    """From the state after the first epoch."""
    shutil.copytree(project(folder, len(ours)), folder / f"again-{world}-{len(ours)}")
    for rank in run_ranks(_resumed, world, folder, len(ours), world, timeout_s=120):
        assert rank == pytest.approx([loss for loss, _ in stock["losses"][5:]], rel=1e-4)
    steps = read_run(folder / f"again-{world}-{len(ours)}" / "gpumix").history.steps
    assert [one.loss for one in steps] == pytest.approx([n for n, _ in stock["losses"]], rel=1e-4)


def _resumed(folder: Path, saved: int, world: int) -> list[float]:
    from gpumix import Accelerator

    as_launched(folder)
    accelerator = Accelerator(
        plan=PLANS[world](), project_dir=str(folder / f"again-{world}-{saved}")
    )
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=0.1)
    torch.manual_seed(12)
    loader = DataLoader(Texts(), batch_size=GLOBAL_BATCH // world, shuffle=True)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    batches = Batches()
    accelerator.register_for_checkpointing(batches)
    accelerator.load_state(str(folder / f"state-{saved}"))
    assert batches.seen == 5
    network.train()
    losses = []
    for batch in loader:
        loss = network(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(network.parameters(), 1.0)
        accelerator.clip_grad_value_(network.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.extended
def test_another_model_is_trained_once_memory_is_freed(tmp_path):
    for first, second, steps in run_ranks(_twice, 2, tmp_path):
        assert first == second and steps == len(first) == 5


def _twice(folder: Path) -> tuple[list[float], list[float], int]:
    from gpumix import Accelerator

    as_launched(folder)
    accelerator = Accelerator(plan=PLANS[2](), project_dir=str(folder))
    found = []
    for _ in range(2):
        network = model()
        model_itself = weakref.ref(network)
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
        loader = DataLoader(Texts(), batch_size=GLOBAL_BATCH // 2)
        network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
        losses = []
        for batch in loader:
            losses.append(loss := network(**batch).loss)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        found.append([loss.item() for loss in losses])
        network, optimizer, loader = accelerator.free_memory(network, optimizer, loader)
        assert accelerator.plan is None and model_itself() is None
    return *found, len(read_run(folder / "gpumix").history.steps)


@pytest.mark.parametrize("stream", every_second([False, True]))
def test_an_epoch_goes_on_after_batches_that_are_skipped(stream, tmp_path):
    (found,) = run_ranks(_skipped, 1, tmp_path, stream)
    assert found["batches"] == found["all"][2:]
    assert len(found["all"]) == 5
    assert found["length"] == (None if stream else 3)
    assert found["losses"] == 3
    assert found["again"] == found["all"]  # the loader itself skips nothing


def test_the_newest_state_brings_the_settings_of_the_optimizer(tmp_path):
    """As torch's do: also a rate that no prepared scheduler keeps."""
    assert run_ranks(_settings, 1, tmp_path)[0] == [(0.5, (0.8, 0.9)), (0.25, (0.8, 0.9))]


def _settings(folder: Path) -> list[tuple[float, Any]]:
    from accelerate.utils import ProjectConfiguration

    from gpumix import Accelerator

    as_launched(folder)
    named = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
    accelerator = Accelerator(plan=plan_for(model(), [Share(12, 6, 1)]), project_config=named)
    with raises(InputError, code="load-without-folder", why="checkpoints"):
        accelerator.load_state()
    network = model()
    first, *others = network.parameters()
    groups = [{"params": [first], "lr": np.float64(4.0)}, {"params": others}]
    optimizer = torch.optim.AdamW(groups, lr=4.0, betas=(0.8, 0.9))
    loader = DataLoader(Texts(), batch_size=GLOBAL_BATCH)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    for save in range(11):  # the tenth is not named after the ninth
        for group, rate in zip(optimizer.param_groups, (0.5, 0.25)):
            group["lr"] = rate if save == 10 else 3.0
        if save in (0, 9, 10):
            accelerator.save_state()
        else:
            accelerator.project_configuration.iteration += 1
    for group in optimizer.param_groups:
        group["lr"], group["betas"] = 0.125, (0.1, 0.2)
    accelerator.load_state()
    return [(group["lr"], group["betas"]) for group in optimizer.param_groups]


class Count:
    """What a script registers: a state of its own."""

    def __init__(self) -> None:
        self.seen: Any = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Runs:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def test_what_is_registered_comes_back_and_runs_no_code(tmp_path):
    assert run_ranks(_registered, 1, tmp_path) == [3]
    assert not (tmp_path / "ran").exists()


def _registered(folder: Path) -> Any:
    from gpumix import Accelerator

    as_launched(folder)
    accelerator = Accelerator(plan=plan_for(model(), [Share(12, 6, 1)]))
    network = model()
    optimizer = torch.optim.AdamW(network.parameters())
    accelerator.prepare(network, optimizer, DataLoader(Texts(), batch_size=GLOBAL_BATCH))
    count = Count()
    accelerator.register_for_checkpointing(count)
    count.seen = Runs(folder / "ran")
    accelerator.save_state(str(folder / "hostile"))
    count.seen = 3
    accelerator.save_state(str(folder / "state"))
    count.seen = 0
    refused = {"code": "registered-state-unsafe", "where": "hostile/custom_checkpoint_0.pkl"}
    with raises(InputError, **refused):
        accelerator.load_state(str(folder / "hostile"))
    accelerator.load_state(str(folder / "state"))
    return count.seen


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        texts = Texts()
        return (texts[place] for place in range(len(texts)))


def _skipped(folder: Path, stream: bool) -> dict[str, Any]:
    from gpumix import Accelerator

    as_launched(folder)
    accelerator = Accelerator(plan=one_rank())
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    loader = DataLoader(Stream() if stream else Texts(), batch_size=GLOBAL_BATCH)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)

    def tokens(batches: Any) -> list[Any]:
        return [batch["input_ids"].tolist() for batch in batches]

    whole = tokens(loader)
    skipping = accelerator.skip_first_batches(loader, 2)
    batches, losses = tokens(skipping), 0
    for batch in skipping:
        accelerator.backward(network(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        losses += 1
    return {
        "all": whole,
        "batches": batches,
        "length": None if stream else len(skipping),
        "losses": losses,
        "again": tokens(loader),
    }


WRONG = {
    "no loader": {"code": "model-called-before-loader"},
    "no backward": {"code": "step-before-backward"},
    "other loss": {"code": "loss-not-of-last-call"},
    "twice": {"code": "model-called-before-backward"},
    "plugin": {"code": "argument-without-meaning", "what": "fsdp_plugin"},
    "precision": {"code": "mixed-precision-unknown", "what": "fp61"},
    "objects": {"code": "gathered-type-unsupported", "what": "list of set"},
    "unnamed": {"code": "load-without-folder"},
    "other call": {"code": "model-not-measurable"},
}


@pytest.mark.parametrize("what", left_out(WRONG, ["unnamed", "twice", "objects", "plugin"]))
def test_what_goes_wrong_is_told(what, tmp_path):
    with raises(InputError, **WRONG[what]):
        run_ranks(_wrong, 1, tmp_path, what)


@pytest.mark.extended
def test_logits_are_not_kept_while_training(tmp_path):
    with pytest.raises(AttributeError, match="'logits'"):
        run_ranks(_wrong, 1, tmp_path, "logits")


def _wrong(folder: Path, what: str) -> None:
    from gpumix import Accelerator

    as_launched(folder)
    if what == "plugin":
        Accelerator(fsdp_plugin=object())
    if what == "precision":
        Accelerator(True, False, "fp61")
    network = model()
    if what == "other call":
        loader = DataLoader(TensorDataset(torch.zeros(GLOBAL_BATCH, 2, 2, 2)), GLOBAL_BATCH)
        Accelerator().prepare(network, loader)
    accelerator = Accelerator(plan=plan_for(model(), [Share(12, 6, 1)]))
    optimizer = torch.optim.AdamW(network.parameters())
    if what == "objects":
        accelerator.gather_for_metrics([{1, 2}])
    if what == "unnamed":
        accelerator.load_state()
    if what == "no loader":
        accelerator.prepare(network, optimizer)[0].train()(**Texts()[0])
    loader = DataLoader(Texts(), batch_size=GLOBAL_BATCH)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    network.train()
    for batch in loader:
        outputs = network(**batch)
        if what == "twice":
            network(**batch)
        if what == "logits":
            print(outputs.logits)
        if what == "other loss":
            accelerator.backward(torch.zeros((), requires_grad=True) * 2)
        optimizer.step()
