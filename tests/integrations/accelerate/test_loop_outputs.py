"""What models return to loops: rows of samples, and what is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from gpumix.engine.model.forward_coroutine import ModelError
from gpumix.integrations.accelerate.outputs import (
    VaryingNumber,
    detach_to_leaves,
    join_outputs,
    take_zero_rows,
)
from gpumix.integrations.accelerate.row_independence import is_row_wise
from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.scripts.programs import as_launched, make_accelerator
from helpers.training.reference import Share, plan_for

WIDTH, CLASSES, SAMPLES = 8, 3, 12
DATA = [
    {"x": torch.randn(WIDTH, generator=torch.Generator().manual_seed(i)), "labels": i % CLASSES}
    for i in range(SAMPLES)
]


class Model(nn.Module):
    """What it returns goes by `kind`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.kind = kind
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH, track_running_stats=False) if kind == "norm" else None
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        for block in self.blocks:
            x = torch.tanh(block(x))
        if self.norm is not None:
            x = self.norm(x)
        if self.kind == "centred" and self.training:
            x = x - x.mean(0)
        z = self.head(x)
        if self.kind == "tuple" and labels is not None:
            return F.cross_entropy(z, labels), z
        if self.kind == "parts" and labels is not None:
            loss = F.cross_entropy(z, labels)
            return {"loss": loss, "part": loss * 2, "right": (z.argmax(1) == labels).sum()}
        if self.kind == "likeness" or (self.kind == "likeness at the end" and not self.training):
            return {"logits": z, "likeness": x @ x.T}
        return {"logits": z, "size": z.square().mean(), "scale": z.new_tensor(2.0)}


REFUSED = {
    "centred": "outputs-depend-on-others",
    "norm": "batch-not-divisible-by-model",
    "likeness": "outputs-depend-on-others",
    "likeness at the end": "outputs-depend-on-others",
    "number": "loss-of-returned-number",
    "unlike numbers": "output-number-unknown",
}


def trained(folder: Path, world: int, kind: str) -> list[float]:
    as_launched(folder)
    accelerator = make_accelerator(
        world, lambda: plan_for(Model(kind), [Share(5, 2, 3), Share(7, 4, 1)], zero_stage=3)
    )
    network = Model(kind)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    loader = DataLoader(DATA, batch_size=SAMPLES // world)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    found = []
    for _ in range(2):
        network.train()
        for batch in loader:
            outputs = network(batch["x"])
            loss = F.cross_entropy(outputs["logits"], batch["labels"])
            if kind == "number":
                loss = loss + outputs["scale"]
            if kind == "unlike numbers":
                loss = loss + outputs["size"]
            accelerator.backward(loss)
            found.append(accelerator.reduce(loss.detach(), "mean").item())
            optimizer.step()
            optimizer.zero_grad()
        network.eval()
        for batch in loader:
            with torch.no_grad():
                outputs = network(x=batch["x"], labels=batch["labels"])
            if kind == "tuple":
                found += [outputs[0].item()]
            elif kind == "parts":
                found += [outputs["loss"].item()]
            else:
                found += accelerator.gather_for_metrics(outputs["logits"]).flatten().tolist()
    return found


@pytest.mark.parametrize("kind", left_out(["plain", "tuple", "parts"], ["tuple", "parts"]))
def test_a_loop_is_as_with_the_stock_accelerator(kind, tmp_path):
    (stock,) = run_ranks(trained, 1, tmp_path, 1, kind)
    for rank in run_ranks(trained, 2, tmp_path, 2, kind, timeout_s=120):
        assert rank == pytest.approx(stock, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    "kind", left_out(REFUSED, ["norm", "likeness", "likeness at the end", "unlike numbers"])
)
def test_what_is_no_row_of_a_sample_is_refused(kind, tmp_path):
    with raises((InputError, ModelError), code=REFUSED[kind]):
        run_ranks(trained, 2, tmp_path, 2, kind, timeout_s=120)


def test_micro_batches_are_joined():
    one = {"rows": torch.ones(2, 3), "same": 1.5, "other": torch.tensor(1), "text": "a"}
    other = {"rows": torch.zeros(1, 3), "same": 1.5, "other": torch.tensor(2), "text": "a"}
    found = join_outputs([one, other])
    assert found["rows"].tolist() == [[1.0] * 3] * 2 + [[0.0] * 3]
    assert (found["same"], found["text"]) == (1.5, "a")
    assert isinstance(found["other"], VaryingNumber)
    assert len(take_zero_rows(found)["rows"]) == 0
    outputs, leaves, numbers = detach_to_leaves(found | {"scale": torch.tensor(2.0)})
    assert leaves[0] is outputs["rows"] and numbers[0] is outputs["scale"]
    for use in (float, repr, lambda number: number + 1, lambda number: number.item()):
        with raises(InputError, code="output-number-unknown"):
            use(found["other"])


def test_rows_that_differ_in_width_are_no_rows():
    square = [torch.ones(2, 2), torch.ones(1, 1)]
    with raises(InputError, code="output-not-per-sample"):
        join_outputs(square)
    assert not is_row_wise(torch.ones(3, 3), square, 1e-4)
    assert is_row_wise(torch.ones(3, 2), [torch.ones(1, 2), torch.ones(2, 2)], 1e-4)
    assert not is_row_wise(torch.ones(3, 2), [torch.ones(1, 2), 1.1 * torch.ones(2, 2)], 1e-4)
