"""A checkpoint as a folder of transformers: loads there, with the very same weights."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file

import gpumix.train.checkpoint.export
from gpumix.data.core.tokenizer import make_byte_tokenizer_files
from gpumix.schema.errors import InputError, MachineError
from gpumix.train.checkpoint.export import export
from gpumix.train.checkpoint.model_files import dump_model_files
from helpers.errors import raises
from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.training.checkpoints import checkpointer, odd
from helpers.training.models import ARCHITECTURES
from helpers.training.reference import Share, batches, engine_for, own_rows

ALONE = [Share(4, 2, 1)]
UNEVEN = [Share(1, 1, 1), Share(2, 2, 0), Share(1, 1, 3)]
CLASSES = {
    "llama": transformers.AutoModelForCausalLM,
    "gpt2": transformers.AutoModelForCausalLM,
    "t5": transformers.AutoModelForSeq2SeqLM,
}


def _train_and_save(folder, name, shares):
    """A run's checkpoint, and the model that it has."""
    architecture = ARCHITECTURES[name]
    engine = engine_for(architecture.factory, shares)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-2)
    for batch in batches(architecture, sum(s.samples for s in shares), 2):
        engine.step(own_rows(batch, shares, engine.comm.rank))
        optimizer.step()
    extra = dump_model_files(engine.model)
    checkpointer(folder / "checkpoints").save(2, engine, optimizer, cursor={}, extra=extra)
    return {name: tensor.numpy() for name, tensor in engine.state_dict().items()}


def _save_of_job(folder, job):
    architecture = ARCHITECTURES["llama"]
    engine = engine_for(architecture.factory, ALONE)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-2)
    extra = {**dump_model_files(engine.model), "job": job}
    checkpointer(folder / "checkpoints").save(0, engine, optimizer, cursor={}, extra=extra)


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
    """A run's folder, and the weights that it has saved."""
    folder = tmp_path_factory.mktemp("saved")
    values = _train_and_save(folder, "llama", ALONE)
    return folder, {name: torch.from_numpy(value) for name, value in values.items()}


@pytest.fixture
def saved(saved_once, tmp_path):
    """The weights that are saved in the test's own folder."""
    folder, weights = saved_once
    shutil.copytree(folder / "checkpoints", tmp_path / "checkpoints")
    return weights


def loaded(folder, name="llama"):
    model, report = CLASSES[name].from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model


def assert_model_is(model, state, dtype=torch.float32):
    found = model.state_dict()
    assert found.keys() == state.keys()
    for name, value in state.items():
        wanted = value.to(dtype) if value.is_floating_point() else value
        assert found[name].dtype == wanted.dtype and torch.equal(found[name], wanted), name


@pytest.mark.parametrize("name", left_out(CLASSES, ("gpt2", "t5")))
def test_transformers_loads_it(tmp_path, name):
    values = run_ranks(_train_and_save, 3, tmp_path, name, UNEVEN)[0]
    folder = export(tmp_path, tmp_path / "model")
    stock = tmp_path / "stock"
    ARCHITECTURES[name].factory().save_pretrained(stock)
    assert {f.name for f in folder.iterdir()} == {f.name for f in stock.iterdir()} | {"gpumix.json"}
    for kind in (transformers.AutoConfig, transformers.GenerationConfig):
        found, expected = (kind.from_pretrained(one).to_dict() for one in (folder, stock))
        assert found | {"_name_or_path": ""} == expected | {"_name_or_path": ""}
    assert len({f.stat().st_mode for f in folder.iterdir()}) == 1, "who may read one may read all"
    state = {name: torch.from_numpy(value) for name, value in values.items()}
    assert_model_is(loaded(folder, name), state)


def mamba2():
    sizes = {"num_heads": 4, "head_dim": 8, "hidden_size": 16, "state_size": 4, "n_groups": 1}
    config = transformers.Mamba2Config(vocab_size=32, num_hidden_layers=2, chunk_size=8, **sizes)
    return transformers.Mamba2ForCausalLM(config)


def _save_mamba2(folder):
    engine = engine_for(mamba2, ALONE)
    tokens = torch.arange(32).view(4, 8)
    engine.step({"input_ids": tokens, "labels": tokens})
    optimizer = torch.optim.AdamW(engine.parameters())
    optimizer.step()
    extra = dump_model_files(engine.model)
    checkpointer(folder / "checkpoints").save(1, engine, optimizer, cursor={}, extra=extra)


def test_a_configuration_may_have_infinity(tmp_path):
    run_ranks(_save_mamba2, 1, tmp_path)
    folder = export(tmp_path, tmp_path / "model")
    found = transformers.AutoConfig.from_pretrained(folder)
    assert tuple(found.time_step_limit) == (0.0, float("inf"))
    assert transformers.AutoModelForCausalLM.from_pretrained(folder)


def test_bytes_as_tokens_have_a_tokenizer_too(tmp_path):
    """The folder is complete: text can be written by what it holds."""
    job = {"tokenizer": "bytes", "data": {"text": ["a.txt"]}}
    run_ranks(_save_of_job, 1, tmp_path, job)
    folder = export(tmp_path, tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("été,\n 1  2 don't")["input_ids"]
    assert ids == list("été,\n 1  2 don't".encode())
    assert tokenizer.decode(ids) == "été,\n 1  2 don't" and tokenizer.eos_token_id == 256
    for kind in (transformers.AutoConfig, transformers.GenerationConfig):
        assert kind.from_pretrained(folder).eos_token_id == 256
    shutil.rmtree(tmp_path / "checkpoints")
    run_ranks(_save_of_job, 1, tmp_path, job | {"data": {"factory": "own:samples"}})
    told = []
    export(tmp_path, folder, tell=told.append)
    assert not (folder / "tokenizer.json").exists()
    assert told == ["no tokenizer is written: its data may be tokens already, not bytes of texts"]


@pytest.mark.parametrize("beside", [False, True])
def test_only_a_tokenizer_is_copied_whatever_file_a_checkpoint_names(tmp_path, beside):
    """Who hands on an exported folder does not hand on other files of this machine."""
    secret = tmp_path / "own" / ("tokenizer_config.json" if beside else "tokenizer.json")
    secret.parent.mkdir()
    if beside:
        (secret.parent / "tokenizer.json").write_text(json.dumps(make_byte_tokenizer_files()[0]))
    secret.write_text("root:$6$secret:19000::::::\n")
    named = str(secret.parent if beside else secret)
    run_ranks(_save_of_job, 1, tmp_path, {"tokenizer": named, "data": {"text": ["a.txt"]}})
    told = []
    folder = export(tmp_path, tmp_path / "model", tell=told.append)
    assert not [file for file in folder.iterdir() if b"secret" in file.read_bytes()]
    assert not (folder / "tokenizer.json").exists()
    [line] = told
    assert f"its tokenizer at {named} is not copied" in line and str(secret) in line


def test_bf16(tmp_path, saved):
    folder = export(tmp_path, tmp_path / "model", dtype="bf16")
    assert_model_is(loaded(folder), saved, torch.bfloat16)


def test_a_configuration_says_the_dtype_of_the_weights(tmp_path, saved):
    config = ARCHITECTURES["llama"].factory().config.to_dict() | {"torch_dtype": "float16"}
    assert_model_is(loaded(export(tmp_path, tmp_path / "m", model_config=config)), saved)


@pytest.mark.parametrize("file_bytes", [1, 30_000])
def test_large_models_in_several_files(tmp_path, saved, file_bytes):
    folder = export(tmp_path, tmp_path / "model", file_bytes=file_bytes)
    files = sorted(folder.glob("*.safetensors"))
    tensors = [load_file(file) for file in files]
    sizes = [sum(t.nbytes for t in held.values()) for held in tensors]
    assert len(files) > 1
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(size <= file_bytes or len(held) == 1 for size, held in zip(sizes, tensors))
    assert all(one + following > file_bytes for one, following in pairwise(sizes))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes)
    assert index["weight_map"] == {n: f.name for f, held in zip(files, tensors) for n in held}
    assert_model_is(loaded(folder), saved)


def test_a_factorys_model_has_no_configuration(tmp_path):
    engine = engine_for(odd, ALONE)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1)
    checkpointer(tmp_path).save(1, engine, optimizer, cursor={})
    folder = export(tmp_path, tmp_path / "deep" / "model")
    assert {f.name for f in folder.iterdir()} == {"model.safetensors", "gpumix.json"}
    found, state = load_file(folder / "model.safetensors"), engine.state_dict()
    del state["head.weight"]  # tied to the embedding
    assert found.keys() == state.keys()
    assert all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in state.items())
    odd().load_state_dict(found | {"head.weight": found["embedding.weight"]})


def test_a_former_export_is_replaced(tmp_path, saved):
    folder = tmp_path / "model"
    folder.mkdir()  # empty is fine too
    export(tmp_path, folder, file_bytes=30_000)
    export(tmp_path, folder)
    assert not list(folder.glob("model-0*"))
    assert json.loads((folder / "gpumix.json").read_text())["step"] == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints", "model"]


def downloaded(folder):
    """Looks like an export, and is somebody's model."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"precious")


def export_with_notes(folder):
    export(folder.parent, folder)
    (folder / "notes.txt").write_text("precious")


def a_file(folder):
    folder.write_text("precious")


@pytest.mark.parametrize("occupy", [downloaded, export_with_notes, a_file])
def test_nothing_else_is_overwritten(tmp_path, saved, occupy):
    folder = tmp_path / "model"
    occupy(folder)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with raises(InputError, code="export-folder-foreign"):
        export(tmp_path, folder)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_damage_is_found(tmp_path, saved):
    file = next(tmp_path.rglob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    with raises(InputError, code="checkpoint-damaged"):
        export(tmp_path, tmp_path / "model")
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoints"]


def test_a_configuration_that_is_none_is_damage(tmp_path):
    engine = engine_for(odd, ALONE)
    optimizer = torch.optim.AdamW(engine.parameters())
    checkpointer(tmp_path).save(1, engine, optimizer, cursor={}, extra={"model_config": [1]})
    with raises(InputError, code="checkpoint-damaged"):
        export(tmp_path, tmp_path / "model")


def test_no_checkpoint(tmp_path):
    with raises(InputError, code="no-checkpoint"):
        export(tmp_path, tmp_path / "model")


def test_other_dtypes_are_refused(tmp_path, saved):
    with raises(InputError, code="export-dtype-unknown", what="fp16"):
        export(tmp_path, tmp_path / "model", dtype="fp16")


def test_a_full_disk_leaves_the_former_export(tmp_path, saved, monkeypatch):
    folder = export(tmp_path, tmp_path / "model")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def full(tensors, file, metadata):
        Path(file).write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    monkeypatch.setattr(gpumix.train.checkpoint.export, "save_file", full)
    with raises(MachineError, code="export-not-writable", why="No space left"):
        export(tmp_path, folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints", "model"]


def test_several_exports_to_one_folder_at_once_all_succeed(tmp_path, saved):
    """The last one stays, whole, and nothing else."""
    folder = tmp_path / "model"
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(export, tmp_path, folder) for _ in range(8)]:
            done.result()
    assert_model_is(loaded(folder), saved)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "model"]
