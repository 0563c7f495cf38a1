"""Trainer with models and data of many kinds: no labels, one output, pictures, a decoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from helpers.extended import chosen, left_out
from helpers.processes.harness import run_ranks
from helpers.scripts.programs import as_launched
from helpers.training.reference import Share, plan_for

pytestmark = pytest.mark.slow

SAMPLES, BATCH, STEPS = 26, 8, 3
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


class Rows(Dataset):
    def __init__(self, **rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: values[index] for name, values in self.rows.items()}


PICTURE, BEGIN, END = 90, 91, 92


def of_texts_and_pictures() -> list[dict[str, Any]]:
    """Samples with none, one or two pictures, each of four patches."""
    generator = torch.Generator().manual_seed(2)
    samples = []
    for number in range(SAMPLES):
        tokens, pictures = torch.randint(1, 89, (10,), generator=generator), number % 3
        for place in range(pictures):
            tokens[3 * place + 1 : 3 * place + 4] = torch.tensor([BEGIN, PICTURE, END])
        patches = torch.randn(4 * pictures, 3 * 2 * 16, generator=generator)
        samples.append({"tokens": tokens, "patches": patches})
    return samples


def with_patches(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """As the processor of Qwen2-VL lays them: the patches of all pictures behind one another."""
    tokens = torch.stack([sample["tokens"] for sample in samples])
    patches = torch.cat([sample["patches"] for sample in samples])
    batch = {"input_ids": tokens, "labels": tokens.clone(), "mm_token_type_ids": tokens == PICTURE}
    batch |= {"attention_mask": torch.ones_like(tokens)}
    batch["mm_token_type_ids"] = batch["mm_token_type_ids"].int()
    if len(patches):
        batch["pixel_values"] = patches
        batch["image_grid_thw"] = torch.tensor([[1, 2, 2]] * (len(patches) // 4))
    return batch


COLLATORS: dict[str, Any] = {"patches of pictures": with_patches}


def kinds() -> dict[str, tuple[Callable[[], nn.Module], Any]]:
    import transformers as t

    tokens = torch.randint(5, 90, (SAMPLES, 12), generator=torch.Generator().manual_seed(0))
    pictures = torch.randn(SAMPLES, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    one, two = (t.BertConfig(vocab_size=100, num_labels=n, **SIZES) for n in (1, 2))
    vit = t.ViTConfig(image_size=16, patch_size=8, num_labels=3, **SIZES)
    t5 = t.T5Config(
        vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    pixels = t.ImageGPTConfig(
        vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=16, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    rotary = {"type": "mrope", "mrope_section": [1, 1, 2]}
    qwen = t.Qwen2VLConfig(
        text_config={
            "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "rope_scaling": rotary,
            "pad_token_id": 0,
        },
        vision_config={
            "depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "mlp_ratio": 2,
        },
        image_token_id=PICTURE, vision_start_token_id=BEGIN, vision_end_token_id=END,
        video_token_id=93,
    )  # fmt: skip
    places = {"start_positions": tokens[:, 0] % 12, "end_positions": tokens[:, 1] % 12}
    return {
        "a number": (
            lambda: t.BertForSequenceClassification(one),
            Rows(input_ids=tokens, labels=tokens[:, 0] / 100.0),
        ),
        "places": (lambda: t.BertForQuestionAnswering(two), Rows(input_ids=tokens, **places)),
        "pictures": (
            lambda: t.ViTForImageClassification(vit),
            Rows(pixel_values=pictures, labels=tokens[:, 0] % 3),
        ),
        "a loss of its own": (
            lambda: t.ImageGPTForCausalImageModeling(pixels),
            Rows(input_ids=tokens, labels=tokens),
        ),
        "patches of pictures": (
            lambda: t.Qwen2VLForConditionalGeneration(qwen),
            of_texts_and_pictures(),
        ),
        "a decoder": (
            lambda: t.T5ForConditionalGeneration(t5),
            Rows(input_ids=tokens, labels=tokens[:, :6].contiguous()),
        ),
    }


def trained(folder: Path, ours: bool, names: list[str]) -> dict[str, dict[str, Any]]:
    as_launched(folder)
    import transformers

    found = {}
    for name in names:
        make, data = kinds()[name]
        more: dict[str, Any] = {}
        if ours:
            from gpumix.integrations import transformers as changed

            more["plan"] = plan_for(make(), [Share(3, 2, 2), Share(5, 3, 1)], zero_stage=3)
        library = changed if ours else transformers
        decodes = name == "a decoder"
        arguments = "Seq2SeqTrainingArguments" if decodes else "TrainingArguments"
        torch.manual_seed(1)
        trainer = getattr(library, "Seq2SeqTrainer" if decodes else "Trainer")(
            model=make(),
            args=getattr(transformers, arguments)(
                output_dir=str(folder / "out"),
                per_device_train_batch_size=BATCH // (2 if ours else 1),
                per_device_eval_batch_size=14 // (2 if ours else 1),
                max_steps=STEPS,
                learning_rate=5e-3,
                logging_steps=1,
                save_strategy="no",
                remove_unused_columns=name not in COLLATORS,
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
            ),
            train_dataset=data,
            data_collator=COLLATORS.get(name),
            **more,
        )
        trainer.train()
        predicted = trainer.predict(data)
        first = predicted.predictions
        first = first[0] if isinstance(first, tuple) else first
        found[name] = {
            "losses": [e["loss"] for e in trainer.state.log_history if "loss" in e],
            "loss": predicted.metrics["test_loss"],
            "best": first.argmax(-1).tolist(),
        }
    return found


@pytest.fixture(scope="module")
def both(request, tmp_path_factory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("kinds")
    names = list(chosen(request, dict.fromkeys(kinds()), by="kind"))
    (stock,) = run_ranks(trained, 1, folder, False, names, timeout_s=120)
    return stock, run_ranks(trained, 2, folder, True, names, timeout_s=120)


# Of what others do as well.
FURTHER = ("a number", "places", "pictures", "a loss of its own", "patches of pictures")


@pytest.mark.parametrize("kind", left_out(kinds(), FURTHER))
def test_it_is_as_with_the_stock_trainer(kind, both):
    stock, ours = both
    assert len(stock[kind]["losses"]) == STEPS
    for rank in ours:
        assert rank[kind]["losses"] == pytest.approx(stock[kind]["losses"], rel=1e-4)
        assert rank[kind]["loss"] == pytest.approx(stock[kind]["loss"], rel=1e-4)
        assert rank[kind]["best"] == stock[kind]["best"]
