"""`save_pretrained` as scripts end with it: of a model that is trained by a plan, the whole one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from gpumix.integrations.common import collective_guard
from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.scripts.programs import (
    GLOBAL_BATCH,
    Texts,
    arguments,
    as_launched,
    make_accelerator,
    model,
)
from helpers.training.reference import Share, plan_for

pytestmark = pytest.mark.slow

SHARES = [Share(5, 2, 3), Share(7, 4, 1)]
STEPS = 3


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(4)
    return get_peft_model(model(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def prompted() -> Any:
    from peft import PromptEncoderConfig, get_peft_model

    torch.manual_seed(4)
    return get_peft_model(model(), PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))


MODELS = {"all": model, "adapters": adapted, "prompts": prompted}
FILES = {
    "all": "model.safetensors",
    "adapters": "adapter_model.safetensors",
    "prompts": "adapter_model.safetensors",
}


def looped(folder: Path, world: int, kind: str, stage: int = 0) -> Any:
    """The script: the Accelerator and its model, after some steps."""
    as_launched(folder)
    accelerator = make_accelerator(
        world,
        lambda: plan_for(MODELS[kind](), SHARES, zero_stage=stage),  # type: ignore[arg-type]
    )
    network = MODELS[kind]()
    trained = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    loader = DataLoader(Texts(STEPS * GLOBAL_BATCH), batch_size=GLOBAL_BATCH // world)
    network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
    for batch in loader:
        accelerator.backward(network(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator, network


def saved_by_all(folder: Path, world: int, kind: str, stage: int) -> None:
    accelerator, network = looped(folder, world, kind, stage)
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(network).save_pretrained(
        folder / f"all-{world}-{kind}-{stage}",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("saves")


@pytest.fixture(scope="module")
def stock(request, folder) -> tuple[str, Path]:
    kind = request.param
    if kind != "all":
        pytest.importorskip("peft")
    run_ranks(saved_by_all, 1, folder, 1, kind, 0)
    return kind, folder / f"all-1-{kind}-0"


def same(found: Path, stock: tuple[str, Path]) -> None:
    kind, expected = stock
    ours, theirs = load_file(found / FILES[kind]), load_file(expected / FILES[kind])
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=2e-3, atol=2e-4)
    assert {one.name for one in found.iterdir()} == {one.name for one in expected.iterdir()}


of_each = pytest.mark.parametrize("stock", left_out(MODELS, ["adapters", "prompts"]), indirect=True)


@pytest.mark.extended
@of_each
@pytest.mark.parametrize("stage", [3, 2, 0])
def test_what_all_ranks_save_is_what_the_stock_script_saves(stage, folder, stock):
    kind = stock[0]
    run_ranks(saved_by_all, 2, folder, 2, kind, stage, timeout_s=120)
    same(folder / f"all-2-{kind}-{stage}", stock)


@pytest.mark.extended
@of_each
def test_the_first_rank_saves_alone_where_it_has_the_whole_state(folder, stock):
    run_ranks(_alone, 2, folder, stock[0], timeout_s=120)
    same(folder / f"alone-{stock[0]}", stock)


def _alone(folder: Path, kind: str) -> None:
    accelerator, network = looped(folder, 2, kind, 0)
    if accelerator.is_main_process:
        whole = accelerator.unwrap_model(network)
        whole.save_pretrained(folder / f"alone-{kind}", save_function=accelerator.save)
    accelerator.wait_for_everyone()


def test_a_rank_that_saves_alone_is_told_so_where_the_state_is_divided(tmp_path):
    """The others have gone on to what comes next; it does not hang. All may save afterwards."""
    run_ranks(_waits_in_vain, 2, tmp_path, timeout_s=120)
    assert not (tmp_path / "alone").exists()
    assert (tmp_path / "together" / FILES["all"]).exists()


def _waits_in_vain(folder: Path) -> None:
    collective_guard.FIRST_RANK_TIMEOUT_S = 0.6
    accelerator, network = looped(folder, 2, "all", 2)
    if accelerator.is_main_process:
        whole = accelerator.unwrap_model(network)
        saves = {
            "save_pretrained": partial(whole.save_pretrained, folder / "alone"),
            "get_state_dict": partial(accelerator.get_state_dict, network),
        }
        for save in saves.values():
            with raises(InputError, code="not-on-all-ranks", what=0) as told:
                save()
            assert "get_state_dict(model) on all ranks" in told.value.fix
            assert "rank 1 did not ask for it in 1 s" in told.value.why
    collective_guard.FIRST_RANK_TIMEOUT_S = 30.0
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(network).save_pretrained(folder / "together")


@pytest.mark.parametrize("kind", left_out(MODELS, ["all", "prompts"]))
def test_a_trainer_s_model_is_saved_and_says_what_it_cannot(folder, kind):
    if kind != "all":
        pytest.importorskip("peft")
    run_ranks(_of_trainer, 1, folder, 1, kind)
    run_ranks(_of_trainer, 2, folder, 2, kind, timeout_s=120)
    same(folder / f"trainer-2-{kind}", (kind, folder / f"trainer-1-{kind}"))


def _of_trainer(folder: Path, world: int, kind: str) -> None:
    as_launched(folder)
    more: dict[str, Any] = {}
    if world == 1:
        from transformers import Trainer
    else:
        from gpumix.integrations.transformers import Trainer

        more["plan"] = plan_for(MODELS[kind](), SHARES, zero_stage=3)
    settings = {"max_steps": STEPS, "eval_strategy": "no", "save_strategy": "no"}
    args = arguments(folder / f"out-{world}-{kind}", GLOBAL_BATCH // world, **settings)
    trainer = Trainer(model=MODELS[kind](), args=args, train_dataset=Texts(), **more)
    trainer.train()
    trainer.model.save_pretrained(folder / f"trainer-{world}-{kind}")
    if world == 1:
        return
    trainer.accelerator.wait_for_everyone()
    if kind == "prompts":
        with raises(InputError, code="prompts-not-resumable"):
            trainer._load_from_checkpoint(str(folder / f"trainer-{world}-{kind}"))
    generated = trainer.model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2)
    assert generated.shape == (1, 5)
    merge = getattr(trainer.model, "merge_and_unload", None)
    if merge is not None:
        merged = merge()
        assert all(p.device.type == "cpu" for p in merged.parameters())
        assert not any("lora" in name for name, _ in merged.named_parameters())
