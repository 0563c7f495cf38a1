"""Quantised models whose weights are still in files look as loaded ones do, and refuse what needs
values; nothing computes with what is not there, or writes it."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import gpumix
from gpumix.engine.sharding.initial_weights import make_source
from gpumix.engine.weights.file_parameter import has_source
from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.training import quantised as q

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

BASES = tuple(q.CONFIGS)
SETTINGS: dict[str, Any] = {"device_map": {"": "cpu"}, "dtype": torch.float32}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[tuple[str, bool], Path]:
    """Folders by base, and whether their files are quantised."""
    plain = q.save_base(tmp_path_factory.mktemp("plain"))
    found = {(base, False): plain for base in BASES}
    for base in BASES:
        found[base, True] = tmp_path_factory.mktemp(base)
        q.load_base(plain, base).save_pretrained(found[base, True])
    return found


@pytest.fixture(params=[(base, stored) for base in BASES for stored in (False, True)], ids=str)
def twice(request, folders) -> Any:
    """Loads a model, as transformers does or lazily."""
    from transformers import LlamaForCausalLM

    base, stored = request.param
    more = {} if stored else {"quantization_config": q.make_config(base)}

    def load(*, lazily: bool = True) -> Any:
        given = (folders[request.param],)
        if lazily:
            return gpumix.from_pretrained(*given, LlamaForCausalLM, **SETTINGS, **more)
        return LlamaForCausalLM.from_pretrained(*given, **SETTINGS, **more)

    return load


def layer_of(model: Any) -> Any:
    return model.model.layers[1].self_attn.q_proj


def constants_of(layer: Any) -> torch.Tensor:
    state = layer.weight.quant_state if hasattr(layer.weight, "quant_state") else None
    return layer.weight.SCB if state is None else state.absmax


def dequantise(layer: Any) -> torch.Tensor:
    from peft.utils.integrations import dequantize_module_weight

    return dequantize_module_weight(layer)


NEEDS_VALUES = {
    "call": lambda layer: layer(torch.randn(2, 64)),
    "call in evaluation": lambda layer: layer.eval()(torch.randn(2, 64)),
    "dequantise": dequantise,
    "compute": lambda layer: layer.weight.data + 1,
    "compute with constants": lambda layer: constants_of(layer).sum(),
    "copy": lambda layer: layer.weight.clone(),
    "read": lambda layer: layer.weight[0, 0].item(),
    "compare": lambda layer: torch.equal(layer.weight, layer.weight),
    "change": lambda layer: layer.weight.data.add_(1),
    "replace": lambda layer: setattr(layer.weight, "data", torch.zeros(2)),
    "move": lambda layer: layer.cpu(),
    "move the parameter": lambda layer: layer.weight.to("cpu"),
    "cast packed values": lambda layer: layer.weight.float(),
    "write the layer": lambda layer: torch.save(layer, io.BytesIO()),
    "write its state": lambda layer: torch.save(layer.state_dict(), io.BytesIO()),
    "write its constants": lambda layer: pickle.dumps(constants_of(layer)),
    "write its state as safetensors": lambda layer: save_file(layer.state_dict(), "never"),
}


@pytest.mark.parametrize("need", NEEDS_VALUES)
def test_what_needs_values_is_refused(twice, need):
    model = twice()
    layer = layer_of(model)
    assert has_source(layer.weight)
    with raises(InputError, code="values-still-in-files") as caught:
        NEEDS_VALUES[need](layer)
    assert "layers.1.self_attn.q_proj.weight" in caught.value.where
    assert has_source(layer.weight)


def test_parameters_look_as_they_do_loaded(twice):
    stock, lazy = twice(lazily=False), twice()
    for (name, expected), (other, found) in zip(
        stock.named_parameters(), lazy.named_parameters(), strict=True
    ):
        assert (other, found.shape, found.dtype) == (name, expected.shape, expected.dtype)
        assert expected.requires_grad == found.requires_grad
        assert not found.is_floating_point() or type(expected) is torch.nn.Parameter
        assert type(expected).__name__ in (type(found).__name__, "Parameter")
    assert lazy.state_dict().keys() == stock.state_dict().keys()
    assert lazy.get_memory_footprint() == stock.get_memory_footprint()
    assert lazy.num_parameters() == stock.num_parameters()


def test_casts_leave_packed_values(twice):
    """As those of loaded models, which are no floats."""
    lazy = twice()
    expected = values_of(copy.deepcopy(lazy))
    torch.nn.Module.half(lazy)
    assert values_of(lazy) == expected
    assert lazy.lm_head.weight.dtype == torch.float16


def values_of(model: Any) -> list[bytes]:
    from gpumix.engine.quantised.weight_formats import iterate_quantised_parameters

    source = make_source(model)
    packed = dict(iterate_quantised_parameters(model))
    assert len(packed) == 21
    return [source(n, one, 0, one.numel()).numpy().tobytes() for n, one in packed.items()]


def test_copies_have_the_same_values(twice):
    lazy = twice()
    whole = copy.deepcopy(lazy)
    assert all(has_source(p) for p in whole.parameters())
    assert values_of(whole) == values_of(lazy)
    assert layer_of(whole).weight is not layer_of(lazy).weight


@pytest.mark.parametrize("base", BASES)
def test_a_model_is_saved_as_by_stock(folders, base, tmp_path):
    from transformers import LlamaForCausalLM

    config = q.make_config(base)
    q.load_base(folders[base, False], base).save_pretrained(tmp_path / "stock")
    lazy = gpumix.from_pretrained(
        folders[base, False], LlamaForCausalLM, quantization_config=config, **SETTINGS
    )
    lazy.save_pretrained(tmp_path / "lazy")
    expected, found = (load_file(tmp_path / n / "model.safetensors") for n in ("stock", "lazy"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    assert all(has_source(p) for p in lazy.parameters())


def test_adapters_alone_are_saved(twice, tmp_path):
    from peft import get_peft_model

    get_peft_model(twice(), q.lora()).save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert len(saved) == 42 and all("lora_" in key for key in saved)


def test_another_library_that_would_quantise_is_refused(folders):
    """It was not told, and its weights would have been trained with in full."""
    torchao = pytest.importorskip("torchao.quantization")
    from transformers import LlamaForCausalLM, TorchAoConfig

    config = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    with raises(InputError, code="quantising-while-in-files", what="torchao"):
        gpumix.from_pretrained(
            folders["nf4", False], LlamaForCausalLM, quantization_config=config, **SETTINGS
        )
