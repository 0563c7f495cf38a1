"""Models by the names that people use."""

from __future__ import annotations

import json

import pytest

from gpumix.hardware.estimates.known_models import find_decoder, load_known_models
from gpumix.schema.errors import InputError

MODELS = load_known_models()


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.id)
def test_sizes_come_to_the_published_number_of_parameters(model):
    assert find_decoder(model.id).shape.parameters == model.parameters


def test_there_are_the_best_known_ones_each_by_its_own_names():
    names = [name.lower() for m in MODELS for name in {m.id, *m.aliases}]
    assert len(MODELS) >= 40
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("llama-3-8b", "meta-llama/Meta-Llama-3-8B"),
        ("Llama 3 8B", "meta-llama/Meta-Llama-3-8B"),
        ("meta-llama/Llama-3.1-8B", "meta-llama/Meta-Llama-3-8B"),
        ("Qwen2.5-7B", "Qwen/Qwen2.5-7B"),
        ("qwen2.5_7b", "Qwen/Qwen2.5-7B"),
        ("gpt2", "openai-community/gpt2"),
    ],
)
def test_names_in_any_spelling(text, found):
    assert find_decoder(text).name == found


def test_a_size_is_a_llama_shaped_model():
    found = find_decoder(" 7b ")
    assert found.name == "Llama-shaped 7B"
    assert found.shape.parameters == pytest.approx(7e9, rel=0.1)


def test_files_come_before_known_names(tmp_path, monkeypatch):
    config = MODELS[0].config | {"num_hidden_layers": 1}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(config))
    assert find_decoder("gpt2").shape.layers == 1
    assert find_decoder("gpt2/config.json").shape.layers == 1


def test_the_cache_of_the_hub_is_read(tmp_path, monkeypatch):
    config = MODELS[0].config | {"num_hidden_layers": 2}
    folder = tmp_path / "hub" / "models--someone--their-model" / "snapshots" / "0123"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert find_decoder("someone/their-model").shape.layers == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("llama-3-8", "did you mean 'llama-3-8b'?"),
        ("someone/unheard-of", "hf download someone/unheard-of config.json"),
        ("7", "give a size such as 7B"),
        ("", "give a size such as 7B"),
        ("a" * 5000, "give a size such as 7B"),
        ("a\0b", "give a size such as 7B"),
    ],
)
def test_an_unknown_name_says_what_to_do(text, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        find_decoder(text)
    assert said in caught.value.fix
