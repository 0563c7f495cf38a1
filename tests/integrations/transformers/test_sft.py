"""TRL's `SFTTrainer`, with adapters and without, gives what it gave before."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from gpumix.schema.errors import GpumixError, InputError
from helpers.errors import raises
from helpers.extended import chosen, left_out
from helpers.processes.harness import run_ranks
from helpers.scripts.programs import (
    CHAT_TEMPLATE,
    as_launched,
    in_folder,
    in_hub_cache,
    tokenizer,
)
from helpers.training.reference import Share, plan_for

pytestmark = pytest.mark.slow

pytest.importorskip("trl")
pytest.importorskip("peft")

TOLERANCE = 1e-5
WORDS = [f"w{number}" for number in range(60)]
SAMPLES = 30


def texts() -> Any:
    from datasets import Dataset

    draw = random.Random(1)
    lines = [" ".join(draw.choices(WORDS, k=draw.randint(3, 14))) for _ in range(SAMPLES)]
    return Dataset.from_dict({"text": lines})


def model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_attention_heads=4, **sizes))


def adapters() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"])


def plan(adapted: bool) -> Any:
    """Two unlike ranks: the second one stores most of the state."""
    if adapted:
        from peft import get_peft_model

        whole = get_peft_model(model(), adapters())
    else:
        whole = model()
    shares = [Share(7, 3, 1), Share(1, 1, 3)]
    return plan_for(whole, shares, sequence_length=16, zero_stage=3)


ADAPTED = ("adapters", "packs and adapters")
WHOLE = ("whole", "smoothed", "a loss")
KINDS = (*WHOLE, "a stream", "packs", *ADAPTED, "prompts", "messages")


def given(kind: str, folder: Path) -> dict[str, Any]:
    """As programs say what is trained on what: in memory, by a name of the hub, by a folder."""
    if kind == "adapters":
        name = in_hub_cache(model(), folder / "hub")
        return {"model": name, "train_dataset": texts(), "peft_config": adapters()}
    known = tokenizer()
    if kind == "messages":
        known.chat_template = CHAT_TEMPLATE
    in_memory = {
        "whole": texts,
        "smoothed": texts,
        "a loss": texts,
        "packs": texts,
        "packs and adapters": texts,
        "prompts": lambda: texts().map(as_prompt, remove_columns="text"),
        "messages": lambda: texts().map(as_messages, remove_columns="text"),
    }
    if kind in in_memory:
        data = in_memory[kind]()
        more = {"peft_config": adapters()} if kind in ADAPTED else {}
        return {"model": model(), "train_dataset": data, "processing_class": known, **more}
    stream = texts().to_iterable_dataset(num_shards=2).map(same)
    return {"model": in_folder(model(), folder / "model"), "train_dataset": stream}


def as_prompt(row: dict[str, Any]) -> dict[str, Any]:
    """With a prompt of two words: the first one is never predicted anyway."""
    first, second, rest = row["text"].split(" ", 2)
    return {"prompt": f"{first} {second}", "completion": f" {rest}"}


def as_messages(row: dict[str, Any]) -> dict[str, Any]:
    first, _, rest = row["text"].partition(" ")
    said = {"user": first, "assistant": rest}
    return {"messages": [{"role": role, "content": text} for role, text in said.items()]}


def same(row: dict[str, Any]) -> dict[str, Any]:
    return {"text": row["text"]}


def trained_each(folder: Path, world: int, kinds: list[str]) -> dict[str, dict[str, Any]]:
    as_launched(folder)
    return {kind: trained(folder, world, kind) for kind in kinds}


def trained(folder: Path, world: int, kind: str) -> dict[str, Any]:
    streams = kind == "a stream"
    from trl import SFTConfig

    more: dict[str, Any] = {}
    if world == 1:
        from trl import SFTTrainer
    else:
        from gpumix.integrations.trl import SFTTrainer

        more["plan"] = plan(kind in ADAPTED)
    output = folder / f"{world}-{kind}"
    what = given(kind, folder)
    held_out = texts() if streams else what["train_dataset"]
    trainer = SFTTrainer(
        args=SFTConfig(
            output_dir=str(output),
            per_device_train_batch_size=8 // world,
            per_device_eval_batch_size=4 // world,
            num_train_epochs=1,
            max_steps=6 if streams else -1,
            dataloader_num_workers=2 if streams else 0,
            dataloader_multiprocessing_context="fork" if streams else None,  # TRL maps by closures
            packing=streams or kind.startswith("packs"),
            packing_strategy="wrapped" if streams else "bfd",
            assistant_only_loss=kind == "messages",
            label_smoothing_factor=0.1 if kind == "smoothed" else 0.0,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            seed=5,
            max_length=16,
        ),
        eval_dataset=held_out.select(range(9)),
        compute_loss_func=own_loss if kind == "a loss" else None,
        preprocess_logits_for_metrics=best,
        **what,
        **more,
    )
    trainer.train()
    evaluated = trainer.evaluate()
    predicted = trainer.predict(trainer.eval_dataset).predictions
    trainer.save_model(str(output / "final"))
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": [entry["loss"] for entry in logged],
        "norms": [entry["grad_norm"] for entry in logged],
        "tokens": [entry["num_tokens"] for entry in logged],
        "entropy": [entry["entropy"] for entry in logged],
        "accuracy": [entry["mean_token_accuracy"] for entry in logged],
        "evaluated": evaluated["eval_loss"],
        "predicted": predicted[predicted != -100].tolist(),
        "files": sorted(path.name for path in (output / "final").glob("*.safetensors")),
        "final": str(output / "final"),
        "parameters": trainer.get_num_trainable_parameters(),
        "frozen_bytes": frozen_bytes(trainer),
    }


def own_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    import torch

    losses = torch.nn.functional.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
    )
    counted = (labels[:, 1:] != -100).sum()
    return losses * 2 / (counted if num_items_in_batch is None else num_items_in_batch)


def best(logits: Any, labels: Any) -> Any:
    """Where a label follows."""
    guessed = logits.argmax(-1)
    guessed[:, :-1][labels[:, 1:] == -100] = -100
    guessed[:, -1] = -100
    return guessed


def frozen_bytes(trainer: Any) -> int:
    """That this process stores."""
    engine = getattr(trainer, "_engine", None)
    stored = trainer.model.parameters() if engine is None else [p.local for p in engine.pieces()]
    return sum(one.nbytes for one in stored if not one.requires_grad)


@pytest.fixture(scope="module")
def each(request, tmp_path_factory) -> list[dict[str, Any]]:
    """By kind, of the stock script and of each rank."""
    folder, kinds = (
        tmp_path_factory.mktemp("sft"),
        list(chosen(request, dict.fromkeys(KINDS), by="both")),
    )
    return [
        one for n in (1, 2) for one in run_ranks(trained_each, n, folder, n, kinds, timeout_s=240)
    ]


@pytest.fixture(params=left_out(KINDS, [k for k in KINDS if k != "packs and adapters"]))
def both(request, each) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    stock, *ours = (of_kind[request.param] for of_kind in each)
    return stock, ours


def test_losses_and_norms_are_those_of_the_stock_script(both):
    stock, ours = both
    for rank in ours:
        assert rank["losses"] == pytest.approx(stock["losses"], rel=TOLERANCE)
        assert rank["norms"] == pytest.approx(stock["norms"], rel=1e-4)
        # After training: a loss is not scaled by the number of processes.
        assert rank["evaluated"] == pytest.approx(stock["evaluated"], rel=TOLERANCE)


def test_metrics_are_of_all_ranks(both):
    stock, ours = both
    for rank in ours:
        assert rank["tokens"] == stock["tokens"]
        for name in ("entropy", "accuracy"):
            assert rank[name] == pytest.approx(stock[name], rel=1e-4)
            assert rank[name] == ours[0][name]


def test_predictions_are_those_of_the_stock_script(both):
    stock, ours = both
    assert stock["predicted"]
    for rank in ours:
        assert rank["predicted"] == stock["predicted"]


def test_each_rank_stores_its_share_of_what_is_frozen(both):
    stock, ours = both
    first, second = (rank["frozen_bytes"] for rank in ours)
    assert first + second == stock["frozen_bytes"]
    assert first == pytest.approx(stock["frozen_bytes"] / 4, rel=0.04)


def test_what_is_saved_is_what_is_trained(both):
    stock, ours = both
    assert ours[0]["parameters"] == stock["parameters"]
    adapted = ours[0]["parameters"] < 2000
    name = f"{'adapter_' if adapted else ''}model.safetensors"
    assert ours[0]["files"] == [name]
    expected, found = (load_file(Path(one["final"], name)) for one in (stock, ours[0]))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        # Adam moves an element whose gradient is hardly more than rounding by its sign alone.
        assert np.linalg.norm(found[key] - value) <= 2e-3 * np.linalg.norm(value), key


def test_other_trainers_of_trl_are_refused_by_name():
    with raises(InputError, code="trl-trainer-unsupported", what="DPOTrainer"):
        from gpumix.integrations.trl import DPOTrainer  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'NoTrainer'"):
        from gpumix.integrations.trl import NoTrainer  # noqa: F401


def test_packs_whose_documents_would_see_each_other_are_refused(tmp_path):
    fix = "packing_strategy='wrapped' or packing=False"
    with raises(InputError, code="packed-documents-mixed", where="bfd", fix=fix):
        run_ranks(_sees_all, 1, tmp_path, timeout_s=120)


def _sees_all(folder: Path) -> None:
    as_launched(folder)
    from trl import SFTConfig

    from gpumix.integrations.trl import SFTTrainer

    def without_positions(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"position_ids": None}

    network = model()
    network.model.register_forward_pre_hook(without_positions, with_kwargs=True)
    settings = {"packing": True, "max_length": 16, "report_to": [], "use_cpu": True, "bf16": False}
    SFTTrainer(
        network,
        SFTConfig(str(folder / "run"), per_device_train_batch_size=8, **settings),
        train_dataset=texts(),
        processing_class=tokenizer(),
        plan=plan_for(model(), [Share(8, 4, 1)], sequence_length=16),
    ).train()


@pytest.mark.extended
def test_a_term_that_balances_experts_is_computed_of_whole_batches_or_refused(tmp_path):
    stock, whole, cut = run_ranks(_balanced, 1, tmp_path, timeout_s=240)[0]
    assert whole == pytest.approx(stock, rel=TOLERANCE)
    assert "the loss of a batch is not made of the losses of its parts" in cut


def _balanced(folder: Path) -> tuple[list[float], list[float], str]:
    """Losses of the stock trainer, and by a plan that does not cut batches; an error otherwise."""
    as_launched(folder)
    import torch
    import trl
    from transformers import MixtralConfig, MixtralForCausalLM

    from gpumix.integrations.trl import SFTTrainer

    def experts() -> Any:
        torch.manual_seed(3)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
        balance = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
        return MixtralForCausalLM(MixtralConfig(vocab_size=64, **sizes, **heads, **balance))

    def losses(kind: Any, name: str, **more: Any) -> list[float]:
        settings = {"max_length": 16, "report_to": [], "use_cpu": True, "bf16": False}
        training = kind(
            experts(),
            trl.SFTConfig(
                str(folder / name),
                per_device_train_batch_size=8,
                max_steps=2,
                logging_steps=1,
                seed=5,
                **settings,
            ),
            train_dataset=texts(),
            processing_class=tokenizer(),
            **more,
        )
        training.train()
        return [line["loss"] for line in training.state.log_history if "loss" in line]

    stock = losses(trl.SFTTrainer, "stock")
    whole = losses(
        SFTTrainer, "whole", plan=plan_for(experts(), [Share(8, 8, 1)], sequence_length=16)
    )
    with pytest.raises(GpumixError) as refused:
        losses(SFTTrainer, "cut", plan=plan_for(experts(), [Share(8, 4, 1)], sequence_length=16))
    return stock, whole, str(refused.value)
