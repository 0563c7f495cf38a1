"""Model, optimizer, loader and scheduler may be prepared in any order, in one call or several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from gpumix.integrations.common.plan_and_shard import check_loaded_weights
from gpumix.schema.errors import GpumixError, InputError
from helpers.errors import raises
from helpers.extended import chosen, left_out
from helpers.processes.harness import run_ranks
from helpers.scripts.programs import (
    GLOBAL_BATCH,
    Texts,
    as_launched,
    model,
    other_ranks,
    train_in_loop,
)

pytestmark = pytest.mark.slow

ORDERS = {
    "together": ["model optimizer loader scheduler"],
    "loader behind": ["model optimizer scheduler", "loader"],
    "loader first": ["loader", "model optimizer", "scheduler"],
    "model first": ["model", "optimizer loader", "scheduler"],
    "optimizer first": ["optimizer", "scheduler", "model", "loader"],
    "optimizer behind": ["model loader", "optimizer scheduler"],
    "each by its method": ["loader", "model", "optimizer", "scheduler"],
}


USUAL = {"loader first", "each by its method"}


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> list[float]:
    return run_ranks(_each, 1, tmp_path_factory.mktemp("stock"), ["together"])[0]["together"]


@pytest.fixture(scope="module")
def ours(request, tmp_path_factory) -> list[dict[str, list[float]]]:
    names = list(chosen(request, ORDERS, by="order"))
    return run_ranks(_each, 2, tmp_path_factory.mktemp("ours"), names, timeout_s=180)


@pytest.mark.parametrize("order", left_out(ORDERS, ORDERS.keys() - USUAL))
def test_every_order_trains_as_the_stock_loop(order, stock, ours):
    assert len(stock) == 3
    for rank in ours:
        assert rank[order] == pytest.approx(stock, rel=1e-5)


def _each(folder: Path, names: list[str]) -> dict[str, list[float]]:
    as_launched(folder)
    alone = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1
    return {name: _trained(name, ORDERS[name], stock=alone) for name in names}


def _trained(name: str, order: list[str], *, stock: bool) -> list[float]:
    more: dict[str, Any] = {}
    if stock:
        from accelerate import Accelerator
    else:
        from gpumix import Accelerator

        more["plan"] = other_ranks()
    accelerator = Accelerator(**more)
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    # Accelerate's schedulers step once for each process.
    rates = torch.optim.lr_scheduler.StepLR(optimizer, accelerator.num_processes, gamma=0.5)
    loader = DataLoader(Texts(26), batch_size=GLOBAL_BATCH // accelerator.num_processes)
    known: dict[str, Any] = {
        "model": network,
        "optimizer": optimizer,
        "loader": loader,
        "scheduler": rates,
    }
    methods = {
        "model": accelerator.prepare_model,
        "optimizer": accelerator.prepare_optimizer,
        "loader": accelerator.prepare_data_loader,
        "scheduler": accelerator.prepare_scheduler,
    }
    for names in map(str.split, order):
        if name == "each by its method":
            known[names[0]] = methods[names[0]](known[names[0]])
            continue
        made = accelerator.prepare(*(known[one] for one in names))
        known |= zip(names, made if len(names) > 1 else [made])
    losses = []
    for batch in known["loader"]:
        loss = known["model"](**batch).loss
        accelerator.backward(loss)
        known["optimizer"].step()
        known["scheduler"].step()
        known["optimizer"].zero_grad()
        losses.append(loss.item())
    accelerator.free_memory()
    return losses


def test_a_model_is_called_as_it_is_before_its_loader_is_known(tmp_path):
    before, expected, kept, refused = run_ranks(_called_before, 1, tmp_path)[0]
    assert before == expected
    assert kept == expected
    assert "before the loader of what it is trained on is prepared" in refused


def _called_before(folder: Path) -> tuple[list[float], list[float], list[float], str]:
    """Outputs of a prepared model, of the model, of what becomes of it once it is trained by a
    plan; the error of a call that would train."""
    as_launched(folder)
    from gpumix import Accelerator
    from gpumix.testing import Share, plan_for

    accelerator = Accelerator(plan=plan_for(model(), [Share(12, 6, 1)]), mixed_precision="no")
    network = model().eval()
    texts = Texts()
    batch = {name: value[None] for name, value in texts[0].items() if name != "labels"}
    with torch.no_grad():
        expected = network(**batch).logits.flatten().tolist()
    prepared = accelerator.prepare(network, torch.optim.SGD(network.parameters()))[0]
    with torch.no_grad():
        before = prepared(**batch).logits.flatten().tolist()
    prepared.train()
    with pytest.raises(InputError) as refused:
        prepared(**batch)
    accelerator.prepare(DataLoader(texts, batch_size=GLOBAL_BATCH))
    prepared.eval()
    with torch.no_grad():
        kept = prepared(**batch).logits.flatten().tolist()
    return before, expected, kept, str(refused.value)


def test_optimizers_of_two_models_are_refused(tmp_path):
    told = run_ranks(_two_models, 1, tmp_path)[0]
    assert set(told.values()) == {"several models cannot be trained by one Accelerator"}


def _two_models(folder: Path) -> dict[str, str]:
    """What is said where two models are prepared, by how that is done."""
    as_launched(folder)
    from gpumix import Accelerator
    from gpumix.testing import Share, plan_for

    def one() -> tuple[nn.Module, torch.optim.Optimizer]:
        network = model()
        return network, torch.optim.SGD(network.parameters())

    def loader() -> DataLoader[Any]:
        return DataLoader(Texts(), batch_size=GLOBAL_BATCH)

    ways = {
        "at once": lambda accelerator: accelerator.prepare(*one(), *one(), loader()),
        "before the loader": lambda accelerator: [accelerator.prepare(*one()) for _ in range(2)],
        "behind": lambda accelerator: [accelerator.prepare(*one(), loader()) for _ in range(2)],
    }
    found = {}
    for name, prepares in ways.items():
        accelerator = Accelerator(plan=plan_for(model(), [Share(12, 6, 1)]))
        with pytest.raises(InputError) as refused:
            prepares(accelerator)
        found[name] = str(refused.value).partition("\n")[0]
        accelerator.free_memory()
    return found


def test_an_optimizer_whose_model_is_not_prepared_does_not_step(tmp_path):
    told = run_ranks(_without_model, 1, tmp_path)[0]
    assert "the optimizer steps before its model and a loader are prepared" in told


def _without_model(folder: Path) -> str:
    as_launched(folder)
    from gpumix import Accelerator

    network = model()
    optimizer = Accelerator().prepare(torch.optim.SGD(network.parameters()))
    optimizer.step()  # there is no gradient, so nothing is updated
    next(network.parameters()).grad = torch.ones_like(next(network.parameters()))
    with pytest.raises(InputError) as refused:
        optimizer.step()
    return str(refused.value)


@pytest.mark.parametrize(
    ("attributes", "told"),
    [
        ({"is_quantized": True}, {"code": "model-already-quantised"}),
        (
            {"is_quantized": True, "quantization_method": "gptq"},
            {"code": "model-already-quantised", "what": "gptq"},
        ),
        ({"hf_device_map": {"one": 0, "other": "cpu"}}, {"code": "model-already-dispatched"}),
    ],
)
def test_models_that_were_loaded_in_another_way_are_refused(attributes, told):
    network = torch.nn.Linear(2, 2)
    vars(network).update({"hf_device_map": {"": "cpu"}, **attributes})
    with raises(InputError, **told):
        check_loaded_weights(network)
    check_loaded_weights(torch.nn.Linear(2, 2))


def test_norms_over_the_batch_and_labels_without_a_name_are_refused(tmp_path):
    cut, alone, unnamed = run_ranks(_refused_in_loops, 1, tmp_path)[0]
    for told in (cut, alone):
        assert "in training, forward changes buffers of module 'blocks.0.norm'" in told
    assert "give the model its labels by that name" in unnamed


def _refused_in_loops(folder: Path) -> list[str]:
    """The errors of loops over a model with batch norm, and over one that is given labels."""
    as_launched(folder)
    from gpumix import Accelerator
    from gpumix.testing import Share, plan_for

    rows = [{"x": torch.randn(4), "labels": torch.tensor(number % 2)} for number in range(12)]
    told = []
    for micro_batch, given in ((6, False), (1, False), (6, True)):
        network = Scoring(normed=not given)
        plan = plan_for(network, [Share(12, micro_batch, 1)])
        accelerator = Accelerator(plan=plan)
        optimizer = torch.optim.SGD(network.parameters())
        loader = DataLoader(rows, batch_size=12)  # type: ignore[arg-type]
        prepared, optimizer, loader = accelerator.prepare(network, optimizer, loader)
        with pytest.raises(GpumixError) as refused:
            for batch in loader:
                scores = prepared(batch["x"], *([batch["labels"]] if given else []))
                loss = scores["loss"] if given else scores["logits"].square().mean()
                accelerator.backward(loss)
        told.append(str(refused.value))
        accelerator.free_memory()
    return told


class Scoring(nn.Module):
    """Scores of two classes, with the loss of them where it is given labels."""

    def __init__(self, *, normed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Normed() if normed else nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, Any]:
        for block in self.blocks:
            x = block(x)
        scores = self.head(x)
        loss = None if labels is None else nn.functional.cross_entropy(scores, labels)
        return {"loss": loss, "logits": scores}


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))


@pytest.mark.extended
def test_a_prepared_loader_serves_the_next_model_too(tmp_path):
    first, second = run_ranks(_one_after_another, 1, tmp_path)[0]
    assert second == first


def _one_after_another(folder: Path) -> list[list[float]]:
    """The losses of two models that are alike, one trained after the other from one loader."""
    as_launched(folder)
    from gpumix import Accelerator
    from gpumix.testing import Share, plan_for

    accelerator = Accelerator(plan=plan_for(model(), [Share(12, 6, 1)]))
    loader: Any = DataLoader(Texts(), batch_size=GLOBAL_BATCH)
    losses = []
    for _ in range(2):
        network = model()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        prepared, optimizer, loader = accelerator.prepare(network, optimizer, loader)
        losses.append(train_in_loop(accelerator, prepared, optimizer, loader))
        accelerator.free_memory()
    return losses
