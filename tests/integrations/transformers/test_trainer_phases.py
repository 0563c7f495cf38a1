"""Trainers that do not begin by training, and models that more than one trainer has.

Each part of the program is run as with the stock classes in one process, and on two ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.scripts.programs import as_launched
from helpers.training.reference import Share, plan_for

pytestmark = pytest.mark.slow

BATCH, SAMPLES = 8, 24
TOKENS = torch.randint(5, 90, (SAMPLES, 12), generator=torch.Generator().manual_seed(0))


def llama() -> nn.Module:
    import transformers as t

    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return t.LlamaForCausalLM(t.LlamaConfig(vocab_size=100, num_attention_heads=4, **sizes))


def bart() -> nn.Module:
    import transformers as t

    torch.manual_seed(1)
    sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 100}
    layers = {"encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 64}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    return t.BartForConditionalGeneration(t.BartConfig(**sizes, **layers, **heads))


def with_adapters(folder: Path) -> nn.Module:
    """As they are loaded to be evaluated: nothing is trained."""
    from peft import LoraConfig, PeftModel, get_peft_model

    folder = folder / f"adapter-{os.getpid()}"  # of each rank
    base = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    base.save_pretrained(folder)
    return PeftModel.from_pretrained(llama(), folder)


def rows(labels: bool = True) -> list[dict[str, torch.Tensor]]:
    named = ("input_ids", "labels") if labels else ("input_ids",)
    return [dict.fromkeys(named, tokens) for tokens in TOKENS]


def padded(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows of unlike lengths."""
    cut = [row["input_ids"][: 4 + int(row["input_ids"].sum()) % 9] for row in samples]
    ids = nn.utils.rnn.pad_sequence(cut, batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": ids.ne(0).long(),
        "labels": ids.where(ids != 0, -100),
    }


def counted(told: Any) -> dict[str, float]:
    """Of texts that were generated; a batch that is narrow is filled with the token for padding."""
    texts, labels = told.predictions, told.label_ids
    return {"texts": len(texts), "labels": int(labels[labels > 4].sum()), "sum": int(texts.sum())}


def generated(library: Any, folder: Path, **more: Any) -> list[float]:
    """An evaluation that generates, of a number of samples that is no multiple of a batch, as the
    first thing that a trainer does."""
    import transformers

    args = transformers.Seq2SeqTrainingArguments(
        output_dir=str(folder / "generating"),
        per_device_train_batch_size=BATCH // (2 if more else 1),
        per_device_eval_batch_size=4 // (2 if more else 1),
        predict_with_generate=True,
        generation_max_length=6,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = library.Seq2SeqTrainer(
        model=bart(), args=args, eval_dataset=rows()[:7], compute_metrics=counted,
        data_collator=padded, **more,
    )  # fmt: skip
    found = trainer.evaluate()
    return [float(found[f"eval_{name}"]) for name in ("loss", "texts", "labels", "sum")]


def spread(told: Any) -> dict[str, float]:
    return {"spread": float(told.predictions.std()), "size": told.predictions.shape[1]}


class Seen:
    """What callbacks see of the model while it trains."""

    @staticmethod
    def make() -> Any:
        import transformers

        class Looks(transformers.TrainerCallback):
            def __init__(self) -> None:
                self.texts: list[list[int]] = []
                self.counts: set[tuple[int, int]] = set()

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                self.counts.add(
                    (args.per_device_train_batch_size, args.gradient_accumulation_steps)
                )
                generated = kwargs["model"].generate(
                    TOKENS[:1, :4], max_new_tokens=3, do_sample=False, pad_token_id=0
                )
                self.texts.append(generated[0].tolist())

        return Looks()


def library_of(ours: bool) -> Any:
    if ours:
        from gpumix.integrations import transformers as library
    else:
        import transformers as library
    return library


def trainer(
    folder: Path, ours: bool, model: nn.Module, name: str, accumulates: int = 2, **more: Any
) -> Any:
    import transformers

    processes = 2 if ours else 1
    settings = {
        "per_device_train_batch_size": BATCH // accumulates // processes,
        "gradient_accumulation_steps": accumulates,
        "include_num_input_tokens_seen": "all",
        "per_device_eval_batch_size": BATCH // processes,
        "max_steps": 2,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    args = transformers.TrainingArguments(output_dir=str(folder / name), **settings)
    if ours and any(p.requires_grad for p in model.parameters()):
        more["plan"] = plan_for(model, [Share(3, 2, 2), Share(5, 3, 1)], zero_stage=3)
    return library_of(ours).Trainer(model=model, args=args, **more)


def losses(one: Any) -> list[float]:
    return [entry["loss"] for entry in one.state.log_history if "loss" in entry]


def evaluated_first(folder: Path, ours: bool) -> dict[str, Any]:
    as_launched(folder)
    found: dict[str, Any] = {}
    predicting = trainer(folder, ours, llama(), "predicting", train_dataset=rows())
    found["without labels"] = predicting.predict(rows(labels=False)).predictions.sum().item()
    predicting.train()
    found["trained after that"] = losses(predicting)
    return found


def evaluated_otherwise(folder: Path, ours: bool) -> dict[str, Any]:
    as_launched(folder)
    adapted = trainer(folder, ours, with_adapters(folder), "adapted", eval_dataset=rows())
    rest = {"eval_dataset": rows(), "data_collator": padded, "compute_metrics": spread}
    unequal = trainer(folder, ours, with_adapters(folder), "unequal", **rest).evaluate()
    plan = {"plan": plan_for(bart(), [Share(3, 2, 2), Share(5, 3, 1)], zero_stage=3)}
    return {
        "nothing to train": adapted.evaluate()["eval_loss"],
        "of unlike lengths": [unequal[f"eval_{name}"] for name in ("loss", "spread", "size")],
        "generated": generated(library_of(ours), folder, **(plan if ours else {})),
    }


def counted_tokens(folder: Path, ours: bool) -> dict[str, Any]:
    """Tokens of rows of unlike lengths, of a trainer that evaluates before it trains."""
    as_launched(folder)
    data = {"train_dataset": rows(), "eval_dataset": rows(), "data_collator": padded}
    counting = trainer(folder, ours, llama(), "counting", accumulates=1, **data)
    prepared = "eval_model_preparation_time"
    before = counting.evaluate()
    counting.train()
    return {
        "before": before["eval_loss"],
        "prepared": prepared in before and prepared in counting.evaluate(),
        "tokens": counting.state.num_input_tokens_seen,
    }


def in_two_phases(folder: Path, ours: bool) -> dict[str, Any]:
    as_launched(folder)
    found: dict[str, Any] = {}
    looks = Seen.make()
    model = llama()
    model.model.requires_grad_(False)
    data = {"train_dataset": rows()}
    first = trainer(folder, ours, model, "first", callbacks=[looks], **data)
    batch = next(iter(first.get_train_dataloader()))
    found["samples"] = len(batch["input_ids"])
    found["given"] = first.args.gradient_accumulation_steps
    first.train()
    found["in callbacks"] = looks.texts
    found["told callbacks"] = sorted(looks.counts)
    model.requires_grad_(True)
    second = trainer(folder, ours, model, "second", eval_dataset=rows(), **data)
    second.train()
    found["phases"] = [*losses(first), *losses(second)]
    found["evaluated after that"] = second.evaluate()["eval_loss"]
    second.save_model(str(folder / "saved"))
    if second.is_world_process_zero():
        saved = torch.load(folder / "saved" / "training_args.bin", weights_only=False)
        found["saved"] = saved.gradient_accumulation_steps
    if ours:
        import gpumix

        gpumix.unshard(model)
    with torch.no_grad():
        found["as a model"] = model(TOKENS[:2], labels=TOKENS[:2]).loss.item()
    return found


Both = tuple[dict[str, Any], list[dict[str, Any]]]


def run(part: Callable[..., dict[str, Any]], folder: Path) -> Both:
    (stock,) = run_ranks(part, 1, folder / "stock", False, timeout_s=120)
    return stock, run_ranks(part, 2, folder / "ours", True, timeout_s=240)


@pytest.mark.parametrize(
    "part",
    left_out([evaluated_first, evaluated_otherwise, counted_tokens], [evaluated_otherwise]),
)
def test_evaluations_come_first(part, tmp_path):
    """Predictions without labels, with training behind them; of a model that has nothing to train,
    of rows of unlike lengths, and evaluations that generate; with tokens counted after that."""
    stock, ours = run(part, tmp_path)
    for rank in ours:
        assert rank.keys() == stock.keys()
        for name, value in stock.items():
            assert rank[name] == pytest.approx(value, rel=1e-4)


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> Both:
    return run(in_two_phases, tmp_path_factory.mktemp("phases"))


@pytest.mark.extended
def test_a_batch_is_looked_at_before_training(both):
    """Each rank reads its part of the batch of all."""
    stock, ours = both
    assert sum(rank["samples"] for rank in ours) == BATCH == 2 * stock["samples"]


@pytest.mark.extended
def test_one_model_is_trained_in_two_phases(both):
    """And is a model when they are over; callbacks generate while it trains."""
    stock, ours = both
    for rank in ours:
        for name in ("phases", "evaluated after that", "as a model"):
            assert rank[name] == pytest.approx(stock[name], rel=1e-4)
        assert rank["in callbacks"] == stock["in callbacks"]


@pytest.mark.extended
def test_arguments_stay_as_they_were_given(both):
    """In the trainer, for callbacks, and in the file that is saved."""
    _, ours = both
    for rank in ours:
        assert (rank["given"], rank["told callbacks"]) == (2, [(2, 2)])
    assert ours[0]["saved"] == 2
