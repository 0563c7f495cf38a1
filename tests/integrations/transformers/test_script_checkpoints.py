"""Checkpoints in the output folder of a script: found, described and exported by gpumix's verbs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from gpumix.schema.errors import InputError
from gpumix.train.checkpoint.export import export
from gpumix.train.checkpoint.inspect import inspect
from helpers.errors import raises
from helpers.processes.harness import run_ranks
from helpers.scripts.programs import Texts, arguments, model
from helpers.training.reference import Share, plan_for

pytestmark = pytest.mark.slow

ALONE = [Share(4, 2, 1)]


def tokenizer() -> Any:
    """Without a token that ends a text, as scripts may have one."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "a": 1, "b": 2}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", pad_token="<unk>")


def train(folder: Path) -> None:
    from gpumix.integrations.transformers import Trainer

    network = model()
    args = arguments(folder, 4, max_steps=10, save_steps=1, save_total_limit=2, eval_strategy="no")
    Trainer(
        model=network,
        args=args,
        train_dataset=Texts(40),
        processing_class=tokenizer(),
        plan=plan_for(network, ALONE),
    ).train()


def loop(folder: Path) -> None:
    from accelerate.utils import ProjectConfiguration

    from gpumix import Accelerator

    naming = ProjectConfiguration(str(folder / "project"), automatic_checkpoint_naming=True)
    accelerator = Accelerator(plan=plan_for(model(), ALONE), project_config=naming)
    network = model()
    optimizer = torch.optim.AdamW(network.parameters())
    loader = DataLoader(Texts(8), batch_size=4)
    for batch in (prepared := accelerator.prepare(network, optimizer, loader))[2]:
        accelerator.backward(prepared[0](**batch).loss)
        prepared[1].step()
        accelerator.save_state()


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> Path:
    """Of a Trainer: checkpoints 9 and 10, whose names are not in their order."""
    folder = tmp_path_factory.mktemp("script") / "out"
    run_ranks(train, 1, folder, timeout_s=120)
    return folder


def test_the_checkpoints_of_a_trainer_are_found_the_newest_first(output):
    assert [(one.step, one.damage) for one in inspect(output)] == [(10, None), (9, None)]
    assert [one.step for one in inspect(output / "checkpoint-9")] == [9]
    with raises(InputError, code="no-checkpoint"):
        inspect(output.parent)


def test_states_of_an_accelerator_are_found(tmp_path):
    run_ranks(loop, 1, tmp_path, timeout_s=120)
    project = tmp_path / "project"
    found = [project / "checkpoints" / f"checkpoint_{n}" for n in (1, 0)]
    assert [Path(one.path).parent.parent for one in inspect(project)] == found
    assert [one.damage for one in inspect(found[1])] == [None]


def test_a_trainer_s_newest_checkpoint_is_exported_with_what_lies_next_to_it(output, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = export(output, tmp_path / "model")
    written, saved = (load_file(f / "model.safetensors") for f in (made, output / "checkpoint-10"))
    assert written.keys() == saved.keys()
    assert all(torch.equal(written[name], value) for name, value in saved.items())
    assert AutoTokenizer.from_pretrained(made)("b").input_ids == [2]
    config = json.loads((output / "checkpoint-10" / "config.json").read_text())
    assert AutoModelForCausalLM.from_pretrained(made).config.vocab_size == config["vocab_size"]


def test_a_file_that_is_no_tokenizer_is_not_copied(output, tmp_path):
    saved = output / "checkpoint-9"
    secret = saved / "tokenizer.json"
    before = secret.read_text()
    secret.write_text("my secret")
    told: list[str] = []
    made = export(saved, tmp_path / "model", tell=told.append)
    secret.write_text(before)
    assert not (made / "tokenizer.json").exists()
    assert "is not copied" in told[0]
