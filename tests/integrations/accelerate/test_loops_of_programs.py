"""Loops with `Accelerator` as programs write them, changed by their import alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from gpumix.integrations.accelerate.outputs import LoopOutputs
from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.scripts.programs import GLOBAL_BATCH, Texts, as_launched, make_accelerator, model
from helpers.training.reference import Share, plan_for

pytestmark = pytest.mark.slow


def by_hand(accelerator: Any, network: Any, optimizer: Any, loader: Any) -> list[float]:
    """Two batches to a step, of which nobody is told."""
    found = []
    for number, batch in enumerate(loader):
        loss = network(**batch).loss / 2
        accelerator.backward(loss)
        found.append(loss.item())
        if number % 2:
            found.append(float(accelerator.clip_grad_norm_(network.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
    return found


def by_hand_of_the_model(
    accelerator: Any, network: Any, optimizer: Any, loader: Any
) -> list[float]:
    """The same, with gradients that the model forgets, and a loss of the loop's own."""
    found = []
    for number, batch in enumerate(loader):
        logits = network(input_ids=batch["input_ids"]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"].flatten())
        accelerator.backward(loss)
        found.append(accelerator.reduce(loss.detach(), "mean").item())
        found.append(accelerator.gather(loss.detach()).mean().item())
        if number % 2:
            found.append(float(accelerator.clip_grad_norm_(network.parameters(), 1.0)))
            optimizer.step()
            network.zero_grad()
    return found


def forgets_in_between(accelerator: Any, network: Any, optimizer: Any, loader: Any) -> list[float]:
    """Old gradients go between forward and backward."""
    found = []
    for batch in loader:
        loss = network(**batch).loss
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        found.append(loss.item())
    return found


def by_place(accelerator: Any, network: Any, optimizer: Any, loader: Any) -> list[float]:
    """The first of what the model returns is the loss, of a tuple and of a dictionary."""
    found = []
    for number, batch in enumerate(loader):
        loss = network(**batch, return_dict=bool(number % 2))[0]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def prepared_again(accelerator: Any, network: Any, optimizer: Any, loader: Any) -> list[float]:
    """By a library that cannot know that it was."""
    return forgets_in_between(accelerator, *accelerator.prepare(network, optimizer, loader))


def infers(accelerator: Any, network: Any, optimizer: Any, loader: Any) -> list[float]:
    """Evaluates in inference mode, and goes on."""
    found = forgets_in_between(accelerator, network, optimizer, loader)
    with torch.inference_mode():
        for batch in loader:
            batch = {name: value.clone() for name, value in batch.items()}  # as on its way to a GPU
            outputs = network.eval()(**batch)
            found.append(outputs.loss.item())
            found += accelerator.gather_for_metrics(outputs.logits[:, 0, 0]).tolist()
    network.train()
    return found + forgets_in_between(accelerator, network, optimizer, loader)


def sums(accelerator: Any, network: Any, optimizer: Any, loader: Any) -> list[float]:
    """Nothing divides the loss: that of a batch is the sum over all ranks."""
    found = []
    for batch in loader:
        logits = network(input_ids=batch["input_ids"]).logits
        loss = logits.square().sum()
        accelerator.backward(loss)
        found.append(accelerator.reduce({"loss": loss.detach()}, "mean")["loss"].item())
        found.append(float(accelerator.clip_grad_norm_(network.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return found


def reads_two(accelerator: Any, network: Any, optimizer: Any, loader: Any) -> list[float]:
    """Trains with the batches of one loader, and reads those of another at the same time."""
    size = GLOBAL_BATCH // accelerator.num_processes
    others = accelerator.prepare(DataLoader(Texts(30, seed=2), batch_size=size))
    found = []
    for batch, _ in zip(loader, others):
        loss = network(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def weighs_classes(accelerator: Any, network: Any, optimizer: Any, loader: Any) -> list[float]:
    """The weights of a rank's samples often sum to 1."""
    found = []
    weights = torch.tensor([1.0, 0.0, 0.0, 0.5])
    for batch in loader:
        logits = network(input_ids=batch["input_ids"]).logits[:, 0, :4]
        classes = batch["input_ids"].sum(1) % 4
        loss = torch.nn.functional.cross_entropy(logits, classes, weight=weights)
        accelerator.backward(loss)
        found.append(accelerator.reduce(loss.detach(), "mean").item())
        optimizer.step()
        optimizer.zero_grad()
    return found


LOOPS: dict[str, Callable[..., list[float]]] = {
    "by hand": by_hand,
    "by hand, of the model": by_hand_of_the_model,
    "in between": forgets_in_between,
    "by place": by_place,
    "prepared again": prepared_again,
    "inference mode": infers,
    "sums": sums,
    "reads two": reads_two,
    "weighs classes": weighs_classes,
}
USUAL = {"by hand, of the model", "weighs classes"}  # what others do as well is extended


def started(
    folder: Path, world: int, made: Callable[[], Any], samples: int, *, zero_stage: int
) -> tuple[Any, ...]:
    """Accelerate's own accelerator on one rank, gpumix's on two; and what it prepared."""
    as_launched(folder)
    accelerator = make_accelerator(
        world, lambda: plan_for(made(), [Share(5, 2, 3), Share(7, 4, 1)], zero_stage=zero_stage)
    )
    network = made()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    loader = DataLoader(Texts(samples), batch_size=GLOBAL_BATCH // world)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    network.train()
    return accelerator, network, optimizer, loader


def looped(folder: Path, world: int, name: str) -> list[float]:
    return LOOPS[name](*started(folder, world, model, 48, zero_stage=2))


@pytest.mark.parametrize("name", left_out(LOOPS, LOOPS.keys() - USUAL))
def test_it_is_as_with_the_stock_accelerator(name, tmp_path):
    (stock,) = run_ranks(looped, 1, tmp_path, 1, name)
    assert len(stock) >= 2
    for rank in run_ranks(looped, 2, tmp_path, 2, name, timeout_s=120):
        assert rank == pytest.approx(stock, rel=1e-4)


def _refused(folder: Path) -> list[str]:
    """What is said of a loop whose losses change as it goes on."""
    made = started(folder, 2, model, 48, zero_stage=2)
    accelerator, network, optimizer, loader = made
    found = []

    def tried(inputs: Any, loss_of: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        try:
            logits = network(inputs_embeds=inputs).logits
            accelerator.backward(loss_of(logits, len(inputs)))
            optimizer.step()
            optimizer.zero_grad()
        except InputError as error:
            found.append(error.what)
            network._begun = None

    batches = iter(loader)
    inputs = torch.nn.functional.one_hot(next(batches)["input_ids"] % 32, 32).float()
    tried(inputs, lambda logits, rows: logits.square().mean())
    tried(inputs, lambda logits, rows: logits.square().mean() + logits.std())
    tried(inputs.clone().requires_grad_(), lambda logits, rows: logits.square().mean())
    for _ in range(2):  # one rank counts 1, the other one 2
        tried(inputs, lambda logits, rows: logits.square().sum() / torch.tensor(1 + (rows > 5)))
    tried(torch.cat([inputs, inputs]), lambda logits, rows: logits.square().mean())
    return found


def test_losses_that_are_not_sums_over_ranks_are_refused(tmp_path):
    expected = [
        "the loss of the loop couples samples of a batch",
        "an input of the model requires a gradient, and gets none",
        "the loss of a rank was divided by 1, others by other numbers",
    ]
    for rank, said in enumerate(run_ranks(_refused, 2, tmp_path, timeout_s=120)):
        own = (5, 7)[rank]
        twice = (
            f"the model is given {2 * own} samples, and the loop has {own} of the batch it is at"
        )
        assert said == [*expected, twice]


@pytest.mark.parametrize("key", ["logits", 1, slice(2)])
def test_what_is_not_kept_of_training_says_so(key):
    outputs = LoopOutputs(torch.ones(()))
    with pytest.raises(KeyError, match="is not kept while training"):
        outputs[key]


def test_a_state_of_several_optimizers_is_refused(tmp_path):
    """None of them begins anew without a word."""
    run_ranks(_of_two, 1, tmp_path)
    assert not (tmp_path / "state").exists()


def _of_two(folder: Path) -> None:
    from gpumix import Accelerator

    as_launched(folder)
    accelerator = Accelerator(plan=plan_for(model(), [Share(12, 6, 1)]))
    network = model()
    first, *others = network.parameters()
    optimizers = [torch.optim.AdamW(some) for some in ([first], others)]
    accelerator.prepare(network, *optimizers, DataLoader(Texts(), batch_size=GLOBAL_BATCH))
    for method in (accelerator.save_state, accelerator.load_state):
        with raises(InputError, code="several-optimizers", what=2):
            method(str(folder / "state"))
    unprepared = Accelerator()
    for method in (unprepared.save_state, unprepared.load_state):
        with raises(InputError, code="method-before-plan"):
            method(str(folder / "state"))


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(4)
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    return get_peft_model(model(), config)


@pytest.mark.extended
def test_adapters_and_modules_that_are_trained_whole_are_saved(tmp_path):
    pytest.importorskip("peft")
    run_ranks(_adapted, 1, tmp_path, 1)
    run_ranks(_adapted, 2, tmp_path, 2, timeout_s=120)
    stock, ours = (load_file(tmp_path / str(n) / "adapter_model.safetensors") for n in (1, 2))
    assert ours.keys() == stock.keys()
    assert any("lm_head" in name for name in stock)
    for name, value in stock.items():
        torch.testing.assert_close(ours[name], value, rtol=2e-3, atol=2e-4)


def _adapted(folder: Path, world: int) -> None:
    prepared = accelerator, network, *_ = started(folder, world, adapted, 24, zero_stage=3)
    forgets_in_between(*prepared)
    accelerator.unwrap_model(network).save_pretrained(
        str(folder / str(world)),
        is_main_process=accelerator.is_main_process,
        state_dict=accelerator.get_state_dict(network),
    )
