"""Programs whose model's weights stay in files train as those that load it: losses are equal to the
bit, and no process has the model in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import gpumix
from gpumix.schema.errors import InputError
from harness import run_ranks
from programs import GLOBAL_BATCH, Texts, arguments, as_launched, log_of, model, unlike_ranks

pytestmark = pytest.mark.slow

pytest.importorskip("accelerate")

STEPS = 4
LORA = {"r": 4, "target_modules": "all-linear"}


def load(folder: Path, lazily: bool) -> Any:
    from transformers import AutoModelForCausalLM

    if lazily:
        return gpumix.from_pretrained(folder / "weights")
    return AutoModelForCausalLM.from_pretrained(folder / "weights")


def with_trainer(folder: Path, lazily: bool) -> list[float]:
    from gpumix.integrations.transformers import Trainer

    as_launched(folder)
    trainer = Trainer(
        model=load(folder, lazily),
        args=arguments(
            folder / f"trainer-{lazily}", GLOBAL_BATCH // 3, max_steps=STEPS, eval_strategy="no"
        ),
        train_dataset=Texts(),
        plan=unlike_ranks(),
    )
    trainer.train()
    trainer.save_model(str(folder / f"saved-{lazily}"))
    return log_of(trainer, "loss")


def with_accelerator(folder: Path, lazily: bool) -> list[float]:
    from torch.utils.data import DataLoader

    as_launched(folder)
    accelerator = gpumix.Accelerator(cpu=True, plan=unlike_ranks())
    network = load(folder, lazily)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    loader = DataLoader(Texts(), batch_size=GLOBAL_BATCH // 3)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    losses = []
    for batch in loader:
        loss = network(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach())))
    return losses


PROGRAMS = {"trainer": with_trainer, "accelerator": with_accelerator}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("lazy")
    model().save_pretrained(made / "weights", max_shard_size="30KB")
    return made


@pytest.mark.parametrize("program", PROGRAMS)
def test_losses_are_those_of_the_program_that_loads_all(folder, program):
    run = PROGRAMS[program]
    whole, lazy = (run_ranks(run, 3, folder, lazily, timeout_s=300) for lazily in (False, True))
    assert len(lazy[0]) >= STEPS
    assert lazy == whole
    if program == "trainer":
        saved = [load_file(folder / f"saved-{one}" / "model.safetensors") for one in (False, True)]
        assert saved[0].keys() == saved[1].keys()
        assert all(torch.equal(saved[1][name], value) for name, value in saved[0].items())


def train_without_weights(folder: Path) -> None:
    from gpumix.integrations.transformers import Trainer

    as_launched(folder)
    with torch.device("meta"):
        network = model()
    Trainer(
        model=network,
        args=arguments(folder / "none", GLOBAL_BATCH // 2, max_steps=1, eval_strategy="no"),
        train_dataset=Texts(),
    ).train()


def test_a_model_without_weights_is_refused_before_anything_is_measured(folder):
    with pytest.raises(InputError, match="nothing says what its values are"):
        run_ranks(train_without_weights, 2, folder, timeout_s=120)
