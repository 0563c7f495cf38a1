"""Programs whose model's weights stay in files train as those that load it: losses are equal to the
bit, and no process has the model in memory."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

import gpumix
from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.processes.harness import run_ranks
from helpers.scripts.programs import (
    GLOBAL_BATCH,
    Texts,
    arguments,
    as_launched,
    log_of,
    model,
    other_ranks,
    tokenizer,
    train_in_loop,
    unlike_ranks,
)

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
    return train_in_loop(accelerator, *accelerator.prepare(network, optimizer, loader))


def with_sft(folder: Path, lazily: bool, base: str = "") -> list[float]:
    """Of a model that TRL loads by its folder, and adapts; on a quantised base too."""
    from contextlib import nullcontext

    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    from trl import SFTConfig

    from gpumix.integrations.trl import SFTTrainer
    from gpumix.testing import Share, plan_for
    from helpers.training.quantised import CONFIGS

    as_launched(folder)
    lora = LoraConfig(**LORA)
    settings: dict[str, Any] = {"dtype": "float32", "device_map": {"": "cpu"}}
    if base:
        settings["quantization_config"] = BitsAndBytesConfig(**CONFIGS[base])
    like = AutoModelForCausalLM.from_pretrained(folder / "weights", **settings)
    shares = [Share(7, 3, 1), Share(1, 1, 3)]
    adapted = get_peft_model(like, lora)
    for parameter in adapted.parameters():
        if base and parameter.requires_grad:  # so does TRL
            parameter.data = parameter.data.bfloat16()
    plan = plan_for(adapted, shares, sequence_length=16, zero_stage=3)
    data = Dataset.from_dict({"text": [f"w{n} w{n + 3} w{n + 7} w{n + 1}" for n in range(32)]})
    with gpumix.lazy_weights() if lazily else nullcontext():
        trainer = SFTTrainer(
            model=str(folder / "weights"),
            args=SFTConfig(
                output_dir=str(folder / f"sft-{lazily}{base}"),
                per_device_train_batch_size=4,
                max_steps=STEPS,
                logging_steps=1,
                report_to=[],
                use_cpu=True,
                seed=5,
                model_init_kwargs=settings,
                save_strategy="no",
            ),
            train_dataset=data,
            processing_class=tokenizer(),
            peft_config=lora,
            plan=plan,
        )
    trainer.train()
    return log_of(trainer, "loss")


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


@pytest.mark.parametrize("base", ["", "nf4-double", "int8"])
def test_so_are_those_of_adapters_that_trl_makes(folder, base):
    pytest.importorskip("trl")
    if base:
        pytest.importorskip("bitsandbytes")
    whole, lazy = (
        run_ranks(with_sft, 2, folder, lazily, base, timeout_s=300) for lazily in (False, True)
    )
    assert len(lazy[0]) == STEPS
    assert lazy == whole


def resume(folder: Path, lazily: bool, stateless: bool) -> list[float]:
    """As a second run of a script does, with the weights of the first one's checkpoint alone too;
    the losses from there on."""
    from gpumix.integrations.transformers import Trainer

    as_launched(folder)
    output = folder / f"resumed-{lazily}-{stateless}"
    losses = []
    for steps in (2, 4):
        trainer = Trainer(
            model=load(folder, lazily),
            args=arguments(
                output, GLOBAL_BATCH // 2, max_steps=steps, save_steps=2, eval_strategy="no"
            ),
            train_dataset=Texts(),
            plan=other_ranks(),
        )
        trainer.train(resume_from_checkpoint=steps > 2)
        losses = log_of(trainer, "loss")
        torch.distributed.barrier()
        if stateless and torch.distributed.get_rank() == 0:
            for path in (output / "checkpoint-2").iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
        torch.distributed.barrier()
    return losses


@pytest.mark.parametrize("stateless", [False, True], ids=["", "of stock"])
def test_a_run_is_resumed_as_by_the_program_that_loads_all(folder, stateless):
    whole, lazy = (
        run_ranks(resume, 2, folder, lazily, stateless, timeout_s=300) for lazily in (False, True)
    )
    assert len(lazy[0]) == 4
    assert lazy == whole


def evaluate_without_training(folder: Path, lazily: bool) -> list[float]:
    """Of a model with nothing to train; it is saved before."""
    from gpumix.integrations.transformers import Trainer

    as_launched(folder)
    trainer = Trainer(
        model=load(folder, lazily).requires_grad_(requires_grad=False),
        args=arguments(folder / "frozen", GLOBAL_BATCH // 2),
        eval_dataset=Texts(12),
    )
    trainer.save_model(str(folder / f"untrained-{lazily}"))
    return [trainer.evaluate()["eval_loss"]]


def test_a_model_with_nothing_to_train_is_saved_and_evaluated(folder):
    whole, lazy = (
        run_ranks(evaluate_without_training, 2, folder, lazily, timeout_s=300)
        for lazily in (False, True)
    )
    assert lazy == whole
    saved = [load_file(folder / f"untrained-{one}" / "model.safetensors") for one in (False, True)]
    assert saved[0].keys() == saved[1].keys()
    assert all(torch.equal(saved[1][name], value) for name, value in saved[0].items())


def train_on_spoilt_files(folder: Path) -> list[float]:
    """As the other programs, after one file has lost its end; the error of each rank."""
    spoilt = folder / "spoilt"
    if torch.distributed.get_rank() == 0:
        shutil.copytree(folder / "weights", spoilt / "weights")
        file = max((spoilt / "weights").glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-8])
    torch.distributed.barrier()
    with raises(InputError, code="weights-unreadable"):
        with_trainer(spoilt, True)
    return []


def test_files_that_are_cut_short_are_told_on_each_rank(folder):
    assert run_ranks(train_on_spoilt_files, 2, folder, timeout_s=120) == [[], []]


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
    with raises(InputError, code="meta-without-values"):
        run_ranks(train_without_weights, 2, folder, timeout_s=120)
