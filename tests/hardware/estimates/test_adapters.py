"""Estimates of LoRA on a frozen base, against PEFT's own count and against full training."""

from __future__ import annotations

import pytest
import torch

from gpumix.cost.memory_layout.curves import interpolate_seconds
from gpumix.hardware.estimates.adapters import FineTuning, compute_quantised_bytes, freeze_base
from gpumix.hardware.estimates.decoder_shapes import make_decoder
from gpumix.hardware.estimates.estimate import estimate_class
from gpumix.hardware.estimates.gpu_catalogue import find_card

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
}
GPT_NEOX = {
    "model_type": "gpt_neox",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 128,
}
TOKENS = 32


def frozen(config, tuning, dtype="bf16"):
    shape = make_decoder(config)
    return freeze_base(shape.model(TOKENS, dtype, "toy"), shape.block_sizes, tuning, tokens=TOKENS)


@pytest.mark.parametrize("rank", [1, 8])
def test_trained_elements_are_those_of_peft(rank):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**LLAMA)
    lora = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_config(config), lora)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    held = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    found = frozen(LLAMA, FineTuning(rank))
    assert found.parameters == trained
    blocks = len(found.calls) * found.kinds[0].frozen_bytes
    assert blocks + found.root.frozen_bytes == 2 * held


@pytest.mark.parametrize("config", [LLAMA, GPT_NEOX], ids=["llama", "gpt_neox"])
def test_a_packed_base_is_smaller_by_its_format(config):
    block = make_decoder(config).block_sizes
    others = 2 * (block.parameters - block.matrices)
    sizes = {
        base: frozen(config, FineTuning(4, base)).kinds[0].frozen_bytes - others
        for base in ("16bit", "int8", "nf4", "nf4-double")
    }
    rows = sum(one.outputs * one.count for one in block.linears)
    assert sizes["16bit"] == 2 * block.matrices
    assert sizes["int8"] == block.matrices + 4 * rows  # a byte a weight, an fp32 constant a row
    # 4 bits a weight and an fp32 constant for 64 of them
    assert sizes["nf4"] == block.matrices // 2 + 4 * block.matrices // 64
    # or one of 8 bits, and for 256 of these an fp32 one: small matrices round up
    many = sum(one.count for one in block.linears)
    double = block.matrices // 2 + block.matrices // 64
    assert double + 8 * many <= sizes["nf4-double"] <= double + many * 128


@pytest.mark.parametrize("base", ["int8", "nf4", "nf4-double"])
def test_a_packed_matrix_takes_what_the_engine_stores(base):
    pytest.importorskip("bitsandbytes")
    from gpumix.engine.quantised.linear_layers import make_quantised_linear
    from gpumix.engine.quantised.weight_formats import find_format

    for rows, columns in [(64, 64), (96, 200), (7, 33), (1024, 256)]:
        layer = make_quantised_linear(torch.nn.Linear(columns, rows), base)
        assert find_format(layer.weight).nbytes == compute_quantised_bytes(base, rows, columns)


def test_full_fine_tuning_is_the_model_itself():
    shape = make_decoder(LLAMA)
    model = shape.model(TOKENS, "bf16", "toy")
    assert freeze_base(model, shape.block_sizes, FineTuning(), tokens=TOKENS) is model


@pytest.mark.parametrize("size", [1, 64])
def test_a_frozen_base_needs_no_gradients_of_weights(size):
    card = find_card("rtx4090")
    config = LLAMA | {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16}

    def seconds(tuning):
        of = estimate_class(card, frozen(config, tuning), "rtx4090")
        times = of.units["block"]
        return [float(interpolate_seconds(c, size)) for c in (times.forward, times.backward)]

    full, lora, packed = (
        seconds(FineTuning()), seconds(FineTuning(8)), seconds(FineTuning(8, "nf4"))
    )  # fmt: skip
    assert lora[1] < full[1]  # products for gradients of weights are spared
    assert lora[0] >= full[0] * 0.99  # forward has the adapters' products besides
    assert packed[0] > lora[0] and packed[1] > lora[1]  # a packed base is unpacked each time


def test_experts_in_stacks_get_no_adapters_and_stay_wide():
    config = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    block = make_decoder(config).block_sizes
    assert block.matrices < block.parameters / 2
    nf4 = frozen(config, FineTuning(4, "nf4")).kinds[0].frozen_bytes
    assert nf4 > 2 * (block.parameters - block.matrices)
