"""Files of weights: what an index or the hub's cache says is read, what is wrong is told."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from gpumix.engine.weights.safetensors_files import SafetensorsFiles, find_files
from gpumix.schema.errors import InputError
from helpers.errors import raises

VALUES = torch.arange(24.0).view(4, 6)


def test_parts_of_a_tensor_are_read_in_the_dtype_asked_for(tmp_path):
    save_file({"a": VALUES, "b": torch.tensor(3.0)}, tmp_path / "one.safetensors")
    tensors = SafetensorsFiles(tmp_path).tensors
    assert torch.equal(tensors["a"].read(5, 14), VALUES.reshape(-1)[5:14])
    assert torch.equal(tensors["a"].cast(torch.bfloat16).read_all(), VALUES.bfloat16())
    assert tensors["b"].read_all().item() == 3.0
    assert tensors["a"].read(7, 7).numel() == 0


def test_files_that_the_index_does_not_name_are_left_out(tmp_path):
    save_file({"a": VALUES}, tmp_path / "model-00001-of-00001.safetensors")
    save_file({"other.a": VALUES}, tmp_path / "consolidated.safetensors")
    _write_index(tmp_path, {"a": "model-00001-of-00001.safetensors"})
    assert list(SafetensorsFiles(tmp_path).tensors) == ["a"]


def _write_index(folder, weight_map):
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


def test_a_models_folder_in_the_hubs_cache_is_its_snapshot(tmp_path):
    for name in ("old", "new"):
        (tmp_path / "snapshots" / name).mkdir(parents=True)
        save_file({name: VALUES}, tmp_path / "snapshots" / name / "model.safetensors")
    (tmp_path / "refs").mkdir()
    (tmp_path / "refs" / "main").write_text("old")
    assert list(SafetensorsFiles(tmp_path).tensors) == ["old"]


def test_an_index_that_names_a_missing_file(tmp_path):
    index = _write_index(tmp_path, {"a": "model-00001-of-00002.safetensors"})
    with raises(
        InputError, code="weights-file-missing", what="model-00001-of-00002.safetensors"
    ) as caught:
        find_files(tmp_path)
    assert caught.value.where == str(index)
    assert caught.value.why == "1 of 1 files are missing"


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}'])
def test_an_index_that_is_none(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with raises(InputError, code="weights-index-unreadable"):
        find_files(tmp_path)


def test_a_truncated_file(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a": VALUES}, file)
    file.write_bytes(file.read_bytes()[:-8])
    with raises(InputError, code="weights-unreadable") as caught:
        SafetensorsFiles(tmp_path)
    assert caught.value.where == str(file)


def test_weights_that_are_a_pickle_come_with_the_line_that_converts_them(tmp_path):
    torch.save({"a": VALUES}, tmp_path / "pytorch_model.bin")
    with raises(InputError, code="weights-not-safetensors", what="PyTorch") as caught:
        find_files(tmp_path)
    assert f"from_pretrained('{tmp_path}', use_safetensors=False)" in caught.value.fix
