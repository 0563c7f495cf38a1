"""Decoders from their configuration alone, against the models that transformers builds from it."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import gpumix
from gpumix.engine.sharding.unit_discovery import split_into_units
from gpumix.engine.tensor_parallel.parallelize import parallelize_model, select_whole_model
from gpumix.engine.tensor_parallel.plans import resolve_tensor_plan
from gpumix.hardware.device import open_device
from gpumix.hardware.estimates.decoder_shapes import (
    GATED_FAMILIES,
    KIND,
    PLAIN_FAMILIES,
    Decoder,
    make_decoder,
    make_llama_like,
)
from gpumix.profiler.class_settings import ClassSettings
from gpumix.profiler.compute.class_measurement import measure_class
from gpumix.profiler.compute.unit_runner import FakeTensorParallelGroup
from gpumix.profiler.subject import Workload
from gpumix.schema.cluster.cluster import DeviceClass
from gpumix.schema.errors import InputError
from gpumix.schema.profile.profile import ROOT
from helpers.errors import raises
from helpers.extended import left_out

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
}
OWN_NAMES = {
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4},
    "bloom": {"hidden_size": 64, "n_layer": 3, "n_head": 4},
    "opt": {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "ffn_dim": 128,
        "word_embed_proj_dim": 64,
    },
    "gpt_neox": {k: v for k, v in SIZES.items() if k != "num_key_value_heads"},
}
TOKENS = 129_000  # some configurations name tokens near 128,000


def given(kind: str) -> dict:
    return OWN_NAMES.get(kind, SIZES) | {"vocab_size": TOKENS, "model_type": kind}


def built(config: dict) -> torch.nn.Module:
    kind = config["model_type"]
    settings = {k: v for k, v in config.items() if k != "model_type"}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))


@pytest.mark.parametrize("kind", [*GATED_FAMILIES, *PLAIN_FAMILIES])
def test_parameters_are_counted_exactly(kind):
    model = built(given(kind))
    elements = sum(p.numel() for p in model.parameters())
    units = split_into_units(model).units
    matrices = [s.parameter for u in units for s in u.slots if s.parameter.dim() == 2]
    in_matrices = sum(p.numel() for p in matrices)
    for config in (given(kind), model.config.to_dict()):
        found = make_decoder(config)
        assert found.layers == 3
        assert found.parameters == elements
        assert 3 * found.block_matrices == in_matrices


def test_biases_and_tied_heads_are_counted():
    config = given("llama") | {
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    }
    elements = sum(p.numel() for p in built(config).parameters())
    found = make_decoder(config)
    assert found.parameters == elements


LENGTH, BATCH = 128, 2
SHORT = 16  # where no time is looked at


def measured(config: dict, batch: int = BATCH, length: int = LENGTH, degrees: tuple[int, ...] = ()):
    """What the profiler measures of the model, alone and in tensor-parallel groups, on this
    machine's CPU."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config["vocab_size"], (batch, length), generator=generator)
    settings = {k: v for k, v in config.items() if k != "model_type"}
    made = AutoConfig.for_model(config["model_type"], **settings)
    subject = Workload(
        build=lambda: gpumix.build(lambda: AutoModelForCausalLM.from_config(made), seed=0),
        make_batch=lambda n: {"input_ids": ids[:n], "labels": ids[:n]},
        optimizer_of=torch.optim.AdamW,
        sequence_length=length,
        global_batch=batch,
        budget_s=20,
        settings=ClassSettings({"cpu": "fp32"}),
        degrees={"cpu": degrees},
        requires_tensor_parallel=True,
    )
    with open_device(DeviceClass(name="cpu", accelerator="cpu", memory_bytes=2**27), 0) as runtime:
        return measure_class(subject, runtime, device_class="cpu", progress=lambda line: None)


@pytest.mark.parametrize("kind", left_out(["llama", "gpt2"], ["gpt2"]))
def test_flops_and_memory_are_near_what_is_measured(kind):
    config = given(kind) | {"vocab_size": 2048}
    if kind == "gpt2":  # without dropout, whose masks are not counted
        config |= {"n_embd": 256, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    else:
        config |= {"hidden_size": 256, "intermediate_size": 704}
    found, expected = measured(config).model, make_decoder(config).model(LENGTH, "fp32", kind)
    block, estimate = found.kinds[0], expected.kinds[0]
    assert estimate.name == KIND
    assert estimate.trainable == block.trainable
    assert estimate.flops == pytest.approx(block.flops, rel=0.02)
    assert expected.root.flops == pytest.approx(found.root.flops, rel=0.02)
    for name in ("kept", "saved", "forward", "backward"):
        ratio = getattr(estimate, name).values[0] / getattr(block, name).values[0]
        assert 0.85 < ratio < 1.7, name
    for name in ("saved_forward", "saved_backward"):
        whole = [of.saved.values[0] + getattr(of, name).values[0] for of in (estimate, block)]
        assert 0.85 < whole[0] / whole[1] < 1.7, name
    assert 0.85 < expected.root.head.values[0] / found.root.head.values[0] < 1.7
    put_off = [of.split.values[0] - of.saved.values[0] for of in (estimate, block)]
    assert put_off[0] == pytest.approx(put_off[1], rel=0.02)
    whole = [of.split.values[0] + of.split_backward.values[0] for of in (estimate, block)]
    assert 0.85 < whole[0] / whole[1] < 1.7


def flow(model):
    """Elements of the root that each call and the loss need, and from which calls they take."""
    sizes = {p.name: p.trainable for p in model.root.parameters}
    return [(sum(sizes[name] for name in needs.root), needs.outputs) for needs in model.needs]


def told(traffic):
    """The collectives of a tensor-parallel group for one sample: how many, of how many bytes."""
    passes = (traffic.forward, traffic.backward, traffic.gradient)
    return traffic.summed, [
        [(one.operation, one.times, one.bytes.values[0]) for one in of_pass] for of_pass in passes
    ]


STAGED = [("qwen3", 0.0), ("gpt2", 0.1), ("gpt_neox", 0.0)]


@pytest.mark.parametrize(
    ("kind", "dropout"),
    left_out(STAGED, [STAGED[0], STAGED[2]]),
)
def test_stages_and_tp_groups_are_as_measured(kind, dropout):
    config = given(kind) | {"vocab_size": 2048}
    if kind == "gpt2":
        config |= {"resid_pdrop": dropout}
    expected = make_decoder(config)
    found = measured(config, 1, SHORT, expected.degrees[:1])
    measured_groups = [
        of_group for of_group in found.tp_measurements if not of_group.sequence
    ]  # the others are not estimated
    assert measured_groups
    parts = expected.parts(SHORT, "fp32", kind)
    both = [(found.model, expected.model(SHORT, "fp32", kind))]
    both += [(of_group.model, parts[of_group.degree].model) for of_group in measured_groups]
    for measured_model, model in both:
        assert flow(model) == flow(measured_model)
        assert model.root.before.trainable == measured_model.root.before.trainable
        assert model.root.after.trainable == measured_model.root.after.trainable
        assert model.root.trainable == measured_model.root.trainable
        (ours,), (theirs,) = model.kinds, measured_model.kinds
        assert (ours.trainable, ours.matrices) == (theirs.trainable, theirs.matrices)
        assert ours.outputs[0].values[0] == theirs.outputs[0].values[0]
        assert ours.flops == pytest.approx(theirs.flops, rel=0.02)
        assert model.root.flops == pytest.approx(measured_model.root.flops, rel=0.02)
    for of_group in measured_groups:
        (block,) = of_group.model.kinds
        ours = parts[of_group.degree].told
        assert told(ours[KIND]) == told(of_group.told[block.name])
        assert told(ours[ROOT]) == told(of_group.told[ROOT])


@pytest.mark.parametrize("kind", [*GATED_FAMILIES, *PLAIN_FAMILIES])
def test_tp_groups_are_for_models_that_the_engine_divides(kind):
    config = given(kind) | ({} if kind in OWN_NAMES else {"num_key_value_heads": 4})
    model, tp_group = built(config), FakeTensorParallelGroup(2, torch.device("cpu"))
    anatomy = split_into_units(model)
    try:
        parallelize_model(
            anatomy, tp_group, resolve_tensor_plan(model), part=select_whole_model(anatomy)
        )
    except InputError:
        assert make_decoder(config).degrees == ()
    else:
        assert make_decoder(config).degrees == (2, 4)


@pytest.mark.parametrize("size", [1e8, 1e9, 7e9, 7e10])
def test_a_size_becomes_a_llama_of_about_that_size(size):
    found = make_llama_like(size)
    assert found.parameters == pytest.approx(size, rel=0.15)


def test_experts_count_in_full_and_compute_in_part():
    config = given("mixtral")
    some, all_of_them = make_decoder(config), make_decoder(config | {"num_experts_per_tok": 8})
    assert isinstance(some, Decoder)
    assert some.block_parameters == all_of_them.block_parameters
    assert some.block_flops(10) < all_of_them.block_flops(10)


def test_other_models_are_refused():
    with raises(InputError, code="model-type-without-estimate", what="bert"):
        make_decoder({"model_type": "bert"})
    with raises(InputError, code="model-config-incomplete", what="hidden_size"):
        make_decoder({"model_type": "llama"})


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("word_embed_proj_dim", 32),
        ("do_layer_norm_before", False),
        ("_remove_final_layer_norm", True),
        ("enable_bias", False),
        ("layer_norm_elementwise_affine", False),
    ],
)
def test_an_opt_that_is_counted_otherwise_is_refused(setting, value):
    config = given("opt") | {setting: value}
    usual = make_decoder(given("opt"))
    elements = sum(p.numel() for p in built(config).parameters())
    assert usual.parameters != elements
    with raises(InputError, code="model-config-without-estimate", what=(setting, value)) as caught:
        make_decoder(config)
    assert "gpumix profile" in caught.value.fix


def test_a_narrow_opt_is_refused_whatever_its_width():
    assert make_decoder(given("opt") | {"word_embed_proj_dim": None}).hidden == 64
    with raises(
        InputError, code="model-config-without-estimate", what=("word_embed_proj_dim", 512)
    ):
        make_decoder({"model_type": "opt", "hidden_size": 1024, "num_hidden_layers": 24,
                 "num_attention_heads": 16, "ffn_dim": 4096, "vocab_size": 50272,
                 "word_embed_proj_dim": 512})  # fmt: skip


@pytest.mark.parametrize("kind", [*GATED_FAMILIES, *PLAIN_FAMILIES])
def test_a_size_that_is_none_is_named(kind):
    optional = ("n_positions", "max_position_embeddings", "n_inner", "head_dim")
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = given(kind) | dict.fromkeys(optional, 64) | experts
    sizes = [name for name, value in config.items() if isinstance(value, int)]
    asked = 0
    for name in sizes:
        for wrong in ("many", 0, -4, 1.5, True, [3]):
            try:
                make_decoder(config | {name: wrong})
            except InputError as error:
                asked += 1
                assert f"'{name}'" in error.what
    assert asked >= 6 * 4


def test_samples_that_no_device_could_hold_or_end_are_told():
    wide = make_decoder(given("llama") | {"vocab_size": 2**31 - 1})
    with raises(InputError, code="sample-too-large"):
        wide.model(2**28, "bf16", "wide")
    with raises(InputError, code="sample-too-much-work"):
        make_llama_like(3e8).model(10**13, "bf16", "300M")
