"""Models whose weights stay in files have the values, to the bit, that `from_pretrained` gives."""

from __future__ import annotations

import copy
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

import gpumix
from gpumix.engine.quantised.bitsandbytes_weights import QUANTISED_AT_ONCE
from gpumix.engine.quantised.weight_formats import find_format, iterate_quantised_parameters
from gpumix.engine.sharding.initial_weights import check_has_values, make_source
from gpumix.engine.weights.file_parameter import has_source
from gpumix.engine.weights.whole_values import read_all_values
from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.scripts.programs import in_hub_cache
from helpers.training.models import ARCHITECTURES

transformers = pytest.importorskip("transformers")

SEED = 3
NAMES = ["gpt2", "llama", "phi3", "gemma2", "mixtral", "bert", "vit", "t5", "bart", "whisper"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Saves a model with random weights once."""
    made = {}

    def saved(name):
        if name not in made:
            torch.manual_seed(SEED)
            model = ARCHITECTURES[name].factory()
            made[name] = type(model), tmp_path_factory.mktemp(name)
            model.save_pretrained(made[name][1], max_shard_size="30KB")
        return made[name]

    return saved


def load_twice(folder, kind, **settings):
    """The model as transformers loads it and as it is loaded lazily, from equal random states."""
    loaded = []
    for load in (kind.from_pretrained, lambda *a, **k: gpumix.from_pretrained(*a, kind, **k)):
        torch.manual_seed(SEED)
        loaded.append(load(folder, **settings))
        loaded.append(torch.random.get_rng_state())
    stock, state, lazy, state_after = loaded
    assert torch.equal(state, state_after)
    return stock, lazy


def assert_equal_models(stock, lazy):
    check_has_values(lazy)
    source = make_source(lazy)
    assert str(lazy) == str(stock)
    for (name, expected), (other, found) in zip(
        stock.named_parameters(), lazy.named_parameters(), strict=True
    ):
        assert (other, found.shape, found.dtype) == (name, expected.shape, expected.dtype)
        assert found.requires_grad == expected.requires_grad, name
        with torch.no_grad():
            values = source(name, found, 0, found.numel())
        assert values.dtype == expected.dtype
        assert torch.equal(values, expected.detach().reshape(-1)), name
    ties = [sorted(n for n, p in m.named_parameters(remove_duplicate=False)) for m in (stock, lazy)]
    assert ties[0] == ties[1]
    for (name, expected), (_, found) in zip(
        stock.named_buffers(), lazy.named_buffers(), strict=True
    ):
        assert torch.equal(found, expected) and found.dtype == expected.dtype, name
    assert [m.training for m in lazy.modules()] == [m.training for m in stock.modules()]


@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_stock(folders, name):
    kind, folder = folders(name)
    stock, lazy = load_twice(folder, kind)
    assert all(has_source(p) for p in lazy.parameters())
    assert_equal_models(stock, lazy)


@pytest.mark.parametrize("name", ["llama", "mixtral", "t5"])  # T5 keeps some weights in fp32
def test_values_are_rounded_as_stock_rounds_them(folders, name):
    kind, folder = folders(name)
    assert_equal_models(*load_twice(folder, kind, dtype=torch.bfloat16))
    stock, lazy = load_twice(folder, kind, dtype=torch.bfloat16)
    assert_equal_models(stock.float(), lazy.float())


@pytest.mark.parametrize("dtypes", [("bfloat16", "float"), ("half", "bfloat16")], ids=str)
def test_values_are_rounded_to_each_dtype_on_the_way(folders, dtypes):
    kind, folder = folders("llama")
    stock, lazy = load_twice(folder, kind)
    for model in (stock, lazy):
        for dtype in dtypes:
            getattr(model, dtype)()
    assert_equal_models(stock, copy.deepcopy(lazy))


def test_parts_of_parameters_are_parts_of_their_values(folders):
    kind, folder = folders("mixtral")
    stock, lazy = load_twice(folder, kind)
    source = make_source(lazy)
    expected = dict(stock.named_parameters())
    for name, parameter in lazy.named_parameters():
        start, end = parameter.numel() // 3, parameter.numel() // 2
        assert torch.equal(
            source(name, parameter, start, end), expected[name].detach().reshape(-1)[start:end]
        )


def test_heads_that_files_lack_begin_as_in_stock(folders):
    _, folder = folders("llama")
    kind = transformers.AutoModelForSequenceClassification
    stock, lazy = load_twice(folder, kind, num_labels=5)
    assert not has_source(lazy.score.weight)
    assert_equal_models(stock, lazy)


def make_recurrent(kind):
    """Small models that draw random numbers, or compute, on the devices of their parameters."""
    common = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
    if kind == "mamba":
        return transformers.MambaForCausalLM(transformers.MambaConfig(**common, state_size=4))
    return transformers.RwkvForCausalLM(transformers.RwkvConfig(**common, context_length=16))


@pytest.mark.parametrize(
    ("kind", "lacking"), [("mamba", ""), ("mamba", "out_proj"), ("rwkv", "time_mix_value")]
)
def test_modules_in_part_in_files_are_initialised_as_in_stock(kind, lacking, tmp_path):
    torch.manual_seed(SEED)
    model = make_recurrent(kind)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = {name: v for name, v in load_file(file).items() if not lacking or lacking not in name}
    save_file(state, file, metadata={"format": "pt"})
    assert_equal_models(*load_twice(tmp_path, type(model)))


def test_loaded_values_that_initialisation_changes(tmp_path):
    """Mamba's rescales a matrix, be it loaded or not."""
    torch.manual_seed(SEED)
    model = make_recurrent("mamba")
    model.config.rescale_prenorm_residual = True
    model.save_pretrained(tmp_path)
    stock, lazy = load_twice(tmp_path, type(model))
    changed = [name for name, p in lazy.named_parameters() if not p.is_meta]
    assert changed and all(name.endswith("out_proj.weight") for name in changed)
    assert_equal_models(stock, lazy)


def test_a_base_model_in_files_of_a_whole_one_and_the_other_way_round(folders, tmp_path):
    _, folder = folders("llama")
    assert_equal_models(*load_twice(folder, transformers.LlamaModel))
    transformers.LlamaModel.from_pretrained(folder).save_pretrained(tmp_path)
    assert_equal_models(*load_twice(tmp_path, transformers.LlamaForCausalLM))


def save_with_head(tmp_path, folder, change):
    """Llama's files with a head too, which its configuration ties to the embedding."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    model.config.tie_word_embeddings = True
    model.config.save_pretrained(tmp_path)
    state = dict(model.state_dict())
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone() + change
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("change", [0.0, 1.0], ids=["equal", "unlike"])
def test_tied_parameters_that_files_hold_twice(folders, tmp_path, change):
    save_with_head(tmp_path, folders("llama")[1], change)
    stock, lazy = load_twice(tmp_path, transformers.LlamaForCausalLM)
    assert_equal_models(stock, lazy)
    tied = lazy.lm_head.weight is lazy.model.embed_tokens.weight
    assert tied == (stock.lm_head.weight is stock.model.embed_tokens.weight) == (change == 0.0)


def test_parameters_of_other_sizes_begin_anew_where_that_is_allowed(folders):
    _, folder = folders("llama")
    kind = transformers.LlamaForCausalLM
    settings = {"vocab_size": 50, "ignore_mismatched_sizes": True}
    assert_equal_models(*load_twice(folder, kind, **settings))


def test_stock_calls_inside_the_context_load_lazily_and_outside_do_not(folders):
    _, folder = folders("gpt2")
    kind = transformers.AutoModelForCausalLM
    with gpumix.lazy_weights():
        lazy = kind.from_pretrained(folder)
    stock = kind.from_pretrained(folder)
    assert not any(p.is_meta for p in stock.parameters())
    assert_equal_models(stock, lazy)


def test_names_of_the_hub_and_folders_of_its_cache(folders, tmp_path):
    torch.manual_seed(SEED)
    model = ARCHITECTURES["llama"].factory()
    name = in_hub_cache(model, tmp_path)
    for one in (name, tmp_path / "models--owner--small"):
        lazy = gpumix.from_pretrained(one)
        assert_equal_models(model.eval(), lazy)


def test_copies_are_read_from_the_same_files(folders):
    kind, folder = folders("llama")
    stock, lazy = load_twice(folder, kind)
    assert_equal_models(stock, copy.deepcopy(lazy))


def test_a_model_that_computes_by_itself_reads_all(folders):
    kind, folder = folders("mixtral")
    stock, lazy = load_twice(folder, kind)
    read_all_values(lazy)
    assert not any(p.is_meta for p in lazy.parameters())
    assert_equal_models(stock, lazy)


def test_a_loop_that_only_evaluates_computes_with_all_weights(folders):
    pytest.importorskip("accelerate")
    kind, folder = folders("llama")
    stock, lazy = load_twice(folder, kind)
    tokens = torch.arange(12)[None]
    prepared = gpumix.Accelerator(cpu=True).prepare_model(lazy, evaluation_mode=True)
    with torch.no_grad():
        assert torch.equal(prepared(tokens).logits, stock(tokens).logits)


def test_a_call_before_the_model_is_prepared_for_training(folders):
    pytest.importorskip("accelerate")
    kind, folder = folders("llama")
    prepared = gpumix.Accelerator(cpu=True).prepare(gpumix.from_pretrained(folder, kind))
    with raises(InputError, code="model-called-before-prepare"), torch.no_grad():
        prepared(torch.arange(12)[None])


@pytest.mark.parametrize("settings", [{}, {"mean_resizing": False}], ids=str)
@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
@pytest.mark.parametrize("tokens", [100, 128, 140])
def test_embeddings_are_resized_as_in_stock(folders, name, tokens, settings):
    kind, folder = folders(name)
    models = load_twice(folder, kind)
    for model in models:
        torch.manual_seed(SEED)
        model.resize_token_embeddings(tokens, **settings)
    assert sum(map(has_source, models[1].parameters())) > 5
    assert_equal_models(*models)


@pytest.mark.parametrize("name", ["llama", "mixtral", "bert"])
def test_what_is_saved_is_that_of_stock(folders, name, tmp_path):
    """Names and parts of experts too, as in the files; the model stays in files."""
    kind, folder = folders(name)
    models = load_twice(folder, kind, dtype=torch.bfloat16)
    for number, model in enumerate(models):
        model.save_pretrained(tmp_path / str(number))
    stock, lazy = (load_file(tmp_path / one / "model.safetensors") for one in "01")
    assert stock.keys() == lazy.keys()
    assert all(torch.equal(lazy[key], value) for key, value in stock.items())
    assert all(has_source(p) for p in models[1].parameters())
    assert_equal_models(*models)


# -- adapters --------------------------------------------------------------------------------------

LORA = {"r": 4, "target_modules": "all-linear"}


@pytest.mark.parametrize(
    "settings",
    [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"init_lora_weights": "gaussian"}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adapters_begin_as_in_stock(folders, settings, dtype):
    peft = pytest.importorskip("peft")
    kind, folder = folders("llama")
    adapted = []
    for model in load_twice(folder, kind, dtype=dtype):
        torch.manual_seed(SEED)
        adapted.append(peft.get_peft_model(model, peft.LoraConfig(**LORA, **settings)))
    assert_equal_models(*adapted)


@pytest.mark.parametrize("begin", ["pissa", "olora"])
def test_adapters_that_change_the_weights_leave_their_values(folders, begin):
    peft = pytest.importorskip("peft")
    kind, folder = folders("llama")
    adapted = []
    for model in load_twice(folder, kind):
        torch.manual_seed(SEED)
        adapted.append(peft.get_peft_model(model, peft.LoraConfig(**LORA, init_lora_weights=begin)))
    kept = [name for name, p in adapted[1].named_parameters() if not has_source(p)]
    assert all("lora_" in name or ".base_layer." in name for name in kept)
    assert_equal_models(*adapted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("base", ["nf4", "nf4-double", "int8"])
def test_quantising_in_parts_changes_nothing(base, dtype):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.manual_seed(SEED)
    values = torch.randn(331, 1000).to(dtype)  # of which no part is a multiple
    if base == "int8":
        made = bitsandbytes.nn.Int8Params(values, requires_grad=False, has_fp16_weights=False)
    else:
        double = base == "nf4-double"
        made = bitsandbytes.nn.Params4bit(
            values, requires_grad=False, quant_type="nf4", compress_statistics=double
        )
    form = find_format(made)
    assert values.numel() > 5 * QUANTISED_AT_ONCE
    quantised = form.tensors(made.to("cpu"), None)
    for part, found in form.quantise(values).items():
        assert torch.equal(found, quantised[part]), part


@pytest.mark.parametrize("base", ["nf4", "nf4-double", "int8"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])  # GPT-2 has its matrices the other way round
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_a_base_is_quantised_as_in_stock(folders, base, name, dora):
    pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    from helpers.training.quantised import CONFIGS

    kind, folder = folders(name)
    settings = transformers.BitsAndBytesConfig(**CONFIGS[base])
    models = load_twice(folder, kind, quantization_config=settings, device_map={"": "cpu"})
    adapted = []
    for model in models:
        torch.manual_seed(SEED)
        adapted.append(peft.get_peft_model(model, peft.LoraConfig(**LORA, use_dora=dora)))
    assert_equally_quantised(*adapted)


@pytest.mark.parametrize("base", ["nf4", "nf4-double", "int8"])
def test_a_base_that_files_have_quantised(folders, base, tmp_path):
    pytest.importorskip("bitsandbytes")
    from helpers.training.quantised import CONFIGS

    kind, folder = folders("llama")
    settings = transformers.BitsAndBytesConfig(**CONFIGS[base])
    places = {"device_map": {"": "cpu"}}
    kind.from_pretrained(folder, quantization_config=settings, **places).save_pretrained(tmp_path)
    stock, lazy = load_twice(tmp_path, kind, **places)
    assert all(p.is_meta for p in lazy.parameters())
    for model in (stock, lazy):
        model.requires_grad_(requires_grad=False)
    assert_equally_quantised(stock, lazy)


def assert_equally_quantised(*models):
    check_has_values(models[1])
    found = []
    for model in models:
        source, packed = make_source(model), dict(iterate_quantised_parameters(model))
        own = {id(one.original) for one in packed.values()}
        values = {n: source(n, one, 0, one.numel()) for n, one in packed.items()}
        floats = {n: p for n, p in model.named_parameters() if id(p) not in own}
        found.append(values | {n: source(n, p, 0, p.numel()) for n, p in floats.items()})
    stock, lazy = found
    assert len(dict(iterate_quantised_parameters(models[1]))) > 5
    assert stock.keys() == lazy.keys()
    for key, expected in stock.items():
        assert torch.equal(lazy[key], expected), key
    read_all_values(models[1])
    with torch.no_grad():
        logits = [model.train()(torch.arange(12)[None]).logits for model in models]
    assert torch.equal(*logits)


# -- what is refused -------------------------------------------------------------------------------


@pytest.fixture
def spoilt(folders, tmp_path):
    """A folder of Llama's, whose files a test may spoil."""
    for file in folders("llama")[1].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_a_truncated_file(spoilt):
    file = max(spoilt.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-8])
    with raises(InputError, code="weights-unreadable") as caught:
        gpumix.from_pretrained(spoilt)
    assert caught.value.where == str(file)


def test_a_file_that_has_changed_since(spoilt):
    """As by a program that saves a model where it loaded it from."""
    lazy = gpumix.from_pretrained(spoilt)
    for file in spoilt.glob("*.safetensors"):
        state = {name: 2 * value for name, value in load_file(file).items()}
        save_file(state, file, metadata={"format": "pt"})
    for load in (read_all_values, lambda model: assert_equal_models(model, model)):
        with raises(InputError, code="weights-file-changed") as caught:
            load(lazy)
        assert caught.value.where.endswith(".safetensors")


def test_a_truncated_file_whose_dtype_is_looked_for(spoilt):
    config = json.loads((spoilt / "config.json").read_text())
    (spoilt / "config.json").write_text(json.dumps(config | {"dtype": None}))
    for file in spoilt.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-8])
    with raises(InputError, code="weights-unreadable"):
        gpumix.from_pretrained(spoilt)


def test_a_file_that_the_index_names_and_that_is_not_there(spoilt):
    file = max(spoilt.glob("*.safetensors"))
    file.unlink()
    with raises(InputError, code="weights-file-missing", what=file.name):
        gpumix.from_pretrained(spoilt)


def test_weights_that_are_a_pickle_come_with_the_line_that_converts_them(spoilt):
    files = [*spoilt.glob("*.safetensors")]
    state = {name: value for file in files for name, value in load_file(file).items()}
    torch.save(state, spoilt / "pytorch_model.bin")
    for file in (*files, spoilt / "model.safetensors.index.json"):
        file.unlink()
    with raises(InputError, code="weights-not-safetensors", what="PyTorch") as caught:
        gpumix.from_pretrained(spoilt)
    assert "use_safetensors=False).save_pretrained" in caught.value.fix


def test_shapes_that_differ_from_the_configuration(spoilt):
    with raises(InputError, code="weights-of-another-model") as caught:
        gpumix.from_pretrained(spoilt, intermediate_size=40)
    assert re.search(r"'model\.layers\.0\.mlp\..*' has shape", caught.value.why)


def test_a_model_spread_over_devices(spoilt):
    places = {"model": "cpu", "lm_head": "disk"}
    with raises(InputError, code="model-in-files-dispatched"):
        gpumix.from_pretrained(spoilt, device_map=places, offload_folder=str(spoilt / "off"))


def change(weight, operation):
    with torch.no_grad():
        operation(weight)


TOKENS = torch.arange(12)[None]
OPERATIONS = {
    "call": lambda m, _: m(input_ids=TOKENS, labels=TOKENS),
    "inner call": lambda m, _: m.model(TOKENS),
    "a layer's call": lambda m, _: m.lm_head(torch.zeros(1, m.config.hidden_size)),
    "generate": lambda m, _: m.generate(TOKENS, max_new_tokens=2),
    "call of a copy": lambda m, _: copy.deepcopy(m)(TOKENS),
    "call in bf16": lambda m, _: m.bfloat16()(TOKENS),
    "call compiled": lambda m, _: torch.compile(m, backend="eager")(TOKENS),
    "row": lambda m, _: m.get_input_embeddings().weight[3],
    "mean": lambda m, _: float(m.get_input_embeddings().weight.mean()),
    "norm": lambda m, _: m.lm_head.weight.norm(),
    "clone": lambda m, _: m.lm_head.weight.detach().clone(),
    "numpy": lambda m, _: m.lm_head.weight.detach().numpy(),
    "a value of the state": lambda m, _: m.state_dict()["lm_head.weight"].cpu(),
    "to the host": lambda m, _: m.to("cpu"),
    "torch.save of the state": lambda m, folder: torch.save(m.state_dict(), folder / "a.pt"),
    "torch.save": lambda m, folder: torch.save(m, folder / "a.pt"),
    "safetensors": lambda m, folder: save_file(m.state_dict(), folder / "a.safetensors"),
    "save_pretrained of the state": lambda m, folder: m.save_pretrained(
        folder / "saved", state_dict=m.state_dict()
    ),
    "initialisation": lambda m, _: torch.nn.init.zeros_(m.lm_head.weight),
    "parameter": lambda m, _: change(m.lm_head.weight, lambda w: w.mul_(2)),
    "data": lambda m, _: m.lm_head.weight.data.mul_(2),
    "set row": lambda m, _: m.lm_head.weight.data[3].zero_(),
    "other data": lambda m, _: setattr(m.lm_head.weight, "data", m.lm_head.weight.data * 2),
    "given data": lambda m, _: setattr(m.model.norm.weight, "data", torch.ones(32, device="meta")),
    "fewer rows": lambda m, _: setattr(m.lm_head.weight, "data", m.lm_head.weight.data[32:64]),
    "stock Trainer": lambda m, folder: transformers.Trainer(
        model=m, args=transformers.TrainingArguments(output_dir=str(folder), use_cpu=True)
    ),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_that_need_values_are_refused_at_once(folders, tmp_path, operation):
    lazy = gpumix.from_pretrained(folders("llama")[1])
    with raises(InputError, code="values-still-in-files", what="gpumix.from_pretrained") as caught:
        OPERATIONS[operation](lazy, tmp_path)
    told = caught.value
    assert told.where and told.why and "`from_pretrained` of transformers" in told.fix


@pytest.mark.parametrize("change", ["mul_", "zero_"])
def test_a_change_whose_error_was_caught_is_not_forgotten(spoilt, change):
    lazy = gpumix.from_pretrained(spoilt)
    weight = lazy.lm_head.weight
    with pytest.raises(InputError), torch.no_grad():
        getattr(weight.data, change)(*([2] if change == "mul_" else []))
    for model in (lazy, copy.deepcopy(lazy), copy.deepcopy(lazy).bfloat16()):
        with raises(InputError, code="file-parameter-changed", what="lm_head.weight"):
            make_source(model)("lm_head.weight", model.lm_head.weight, 0, 7)


def test_what_needs_no_values_leaves_them_in_files(folders):
    peft = pytest.importorskip("peft")
    kind, folder = folders("llama")
    stock, lazy = load_twice(folder, kind)
    for model in (stock, lazy):
        model.gradient_checkpointing_enable()
        model.tie_weights()
        model.init_weights()
        model.requires_grad_(requires_grad=True)
        torch.optim.AdamW(model.parameters()).step()  # without gradients
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert lazy.num_parameters() == stock.num_parameters()
    assert lazy.get_memory_footprint() == stock.get_memory_footprint()
    assert lazy.dtype == stock.dtype
    peft.prepare_model_for_kbit_training(lazy)
    peft.prepare_model_for_kbit_training(stock)
    assert all(has_source(p) for p in lazy.parameters())
    assert_equal_models(stock, lazy)


@pytest.mark.parametrize("assign", [False, True])
def test_values_that_are_loaded_replace_those_in_files(folders, assign):
    kind, folder = folders("llama")
    stock, lazy = load_twice(folder, kind)
    with torch.no_grad():
        stock.lm_head.weight.add_(1)
    lazy.load_state_dict(stock.state_dict(), assign=assign)
    assert_equal_models(stock, lazy)


def test_a_model_without_weights():
    with torch.device("meta"):
        model = ARCHITECTURES["llama"].factory()
    with raises(InputError, code="meta-without-values") as caught:
        check_has_values(model)
    assert "gpumix.lazy_weights" in caught.value.fix
