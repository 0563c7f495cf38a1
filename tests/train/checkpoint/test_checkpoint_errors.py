"""A checkpoint that is not there, damaged, hostile or of another run: said before it is loaded."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from gpumix.schema.errors import InputError, MachineError
from gpumix.train.checkpoint import manifest as checkpoint_file
from gpumix.train.checkpoint.manifest import (
    Damaged,
    SavedFile,
    describe_file,
    get_job_steps,
    read_manifest,
)
from helpers.errors import raises
from helpers.processes.harness import run_ranks
from helpers.training.checkpoints import (
    ALONE,
    UNEVEN,
    assert_same,
    blank,
    checkpointer,
    model_values,
    odd,
    train,
    trained,
)
from helpers.training.models import ARCHITECTURES
from helpers.training.reference import engine_for
from helpers.training.whole_optimizers import make


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    engine, optimizer = trained(ALONE)
    folder = tmp_path_factory.mktemp("run")
    return checkpointer(folder).save(2, engine, optimizer, cursor={})


@pytest.fixture
def copy(saved, tmp_path):
    """A checkpoint to be harmed."""
    return Path(shutil.copytree(saved, tmp_path / saved.name))


def load_error(path, shares=ALONE):
    """The error of loading; asserts that it changed nothing."""
    engine, optimizer = blank(shares)
    before = model_values(engine)
    with pytest.raises(InputError) as caught:
        checkpointer(path.parent).load(engine, optimizer)
    assert_same(model_values(engine), before)
    assert not optimizer.state and engine.steps == 0
    return caught.value


# -- nothing there ---------------------------------------------------------------------------------


def test_no_checkpoint(tmp_path):
    error = load_error(tmp_path / "x")
    assert "no checkpoint" in error.what and str(tmp_path) in error.where


def test_only_one_that_was_never_finished(tmp_path):
    (tmp_path / "step-00000010.part").mkdir()
    assert "step-00000010.part was never finished" in load_error(tmp_path / "x").why


def test_nothing_can_be_kept_of_nothing(tmp_path):
    with raises(InputError, code="checkpoint-count-invalid", what=0):
        checkpointer(tmp_path, keep=0)


# -- damage ----------------------------------------------------------------------------------------


def cut_short(file):
    file.write_bytes(file.read_bytes()[:-7])


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["__0_0.distcp", "index.json", ".metadata"])
@pytest.mark.parametrize(
    ("harm", "why"),
    [(cut_short, "bytes"), (flip_a_bit, "not what was saved"), (Path.unlink, "No such file")],
)
def test_a_damaged_file_is_named(copy, name, harm, why):
    harm(copy / name)
    error = load_error(copy)
    assert error.what == "this checkpoint is damaged"
    assert error.where.endswith(name) and why in error.why


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", '{"kind": "checkpoint"}', "\0\0\0\0", '"step"', "{}", DEEP, "9" * 10_000],
)
def test_unreadable_description(copy, text):
    (copy / "checkpoint.json").write_text(text)
    assert load_error(copy).what == "this checkpoint is damaged"


def test_altered_description(copy):
    file = copy / "checkpoint.json"
    file.write_text(file.read_text().replace('"step": 2', '"step": 9'))
    assert "not what was saved" in load_error(copy).why


def test_no_text_at_all(copy):
    (copy / "checkpoint.json").write_bytes(b"\xff\xfe\xff")
    assert load_error(copy).what == "this checkpoint is damaged"


def rename_as_newer(path):
    path.rename(path.with_name("step-00000009"))


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: (path / "checkpoint.json").write_text("{"),
        lambda path: flip_a_bit(path / "__0_0.distcp"),
        lambda path: (path / "index.json").unlink(),
        lambda path: lie_of_states(path, said(step="elements")),
        rename_as_newer,
    ],
)
def test_the_newest_that_is_whole_is_taken(copy, harm):
    engine, optimizer = blank(ALONE)
    saver = checkpointer(copy.parent)
    saver.load(engine, optimizer)
    harm(saver.save(3, engine, optimizer, cursor={}))
    state = saver.load(*blank(ALONE))
    assert state.path == copy
    (damage,) = state.passed_over
    assert damage.what == "this checkpoint is damaged"


def test_where_none_is_whole_all_are_named(copy):
    engine, optimizer = blank(ALONE)
    saver = checkpointer(copy.parent)
    saver.load(engine, optimizer)
    for path in (copy, saver.save(3, engine, optimizer, cursor={})):
        (path / "checkpoint.json").write_text("{")
    error = load_error(copy)
    assert error.what == "all 2 checkpoints here are damaged"
    assert "step-00000002" in error.why and "step-00000003" in error.why


def test_a_disk_that_fails_damages_nothing(copy, monkeypatch):
    def fail(file):
        raise OSError(errno.EIO, "Input/output error", str(file))

    monkeypatch.setattr(checkpoint_file, "open_for_reading", fail)
    with raises(MachineError, code="checkpoint-io-failed") as caught:
        checkpointer(copy.parent).load(*blank(ALONE))
    assert "Input/output error" in caught.value.why


def test_a_damaged_one_is_not_removed_to_keep_few(copy):
    (copy / "checkpoint.json").write_text("{")
    engine, optimizer = trained(ALONE)
    for step in (3, 4):
        checkpointer(copy.parent, keep=1).save(step, engine, optimizer, cursor={})
    assert sorted(p.name for p in copy.parent.iterdir()) == ["step-00000002", "step-00000004"]


def test_newer_schema(copy):
    file = copy / "checkpoint.json"
    content = json.loads(file.read_text())
    content["schema_version"] = 2
    content["checkpoint"] = {"gpumix": "9.0", "what": "nobody knows yet"}
    file.write_text(json.dumps(content))
    error = load_error(copy)
    assert "schema 2" in error.what and "gpumix==9.0" in error.fix


def test_a_schema_that_this_version_never_wrote_is_damage(copy):
    file = copy / "checkpoint.json"
    file.write_text(file.read_text().replace('"schema_version": 1', '"schema_version": 3'))
    assert load_error(copy).what == "this checkpoint is damaged"


def _load_with_damage(folder):
    engine, optimizer = blank(UNEVEN)
    try:
        checkpointer(folder).load(engine, optimizer)
    except InputError as error:
        return str(error)


def test_damage_that_one_rank_finds_is_one_error_on_all(copy):
    flip_a_bit(copy / "__0_0.distcp")  # rank 1 checks it
    texts = run_ranks(_load_with_damage, 4, copy.parent)
    assert len(set(texts)) == 1 and "__0_0.distcp" in texts[0]


# -- malice ----------------------------------------------------------------------------------------


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def reseal(path, **files):
    """Describe the checkpoint's files anew, as an attacker would."""
    names = [file.name for file in path.iterdir() if file.name != "checkpoint.json"]
    entries = {name: describe_file(path / name) for name in names} | files
    manifest = read_manifest(path).model_copy(update={"files": entries})
    (path / "checkpoint.json").write_text(manifest.sealed())


def test_hostile_metadata_is_never_unpickled(copy, tmp_path):
    (copy / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "boom")))
    assert load_error(copy).where.endswith(".metadata")
    reseal(copy)
    engine, optimizer = blank(ALONE)
    checkpointer(copy.parent).load(engine, optimizer)
    assert not (tmp_path / "boom").exists()


def test_hostile_tensors_are_refused(copy, tmp_path):
    torch.save(Bomb(tmp_path / "boom"), copy / "__0_0.distcp")
    size = (copy / "__0_0.distcp").stat().st_size
    index = json.loads((copy / "index.json").read_text())
    for tensor in index["tensors"].values():
        for box in tensor["boxes"]:
            box["start"], box["length"] = 0, size
    (copy / "index.json").write_text(json.dumps(index))
    reseal(copy)
    engine, optimizer = blank(ALONE)
    with raises(InputError, code="checkpoint-damaged"):
        checkpointer(copy.parent).load(engine, optimizer)
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", ""])
def test_files_outside_the_checkpoint_are_refused(copy, name):
    index = json.loads((copy / "index.json").read_text())
    index["tensors"]["model.embedding.weight"]["boxes"][0]["file"] = name
    (copy / "index.json").write_text(json.dumps(index))
    reseal(copy)
    assert load_error(copy).where.endswith("index.json")
    reseal(copy, **{name: SavedFile(bytes=1, sha256="0")})
    assert load_error(copy).where.endswith("checkpoint.json")


def as_pipe(file):
    file.unlink()
    os.mkfifo(file)


def as_endless(file):
    file.unlink()
    file.symlink_to("/dev/zero")


@pytest.mark.parametrize("name", ["checkpoint.json", "index.json", "__0_0.distcp"])
@pytest.mark.parametrize("replace", [as_pipe, as_endless])
def test_what_reading_would_never_end_of_is_damage(copy, name, replace):
    replace(copy / name)
    error = load_error(copy)
    assert error.where.endswith(name) and "not a file" in error.why


def emptied(tensor):
    tensor["boxes"] = []


def doubled(tensor):
    tensor["boxes"] *= 2


def moved(tensor):
    tensor["boxes"][0]["offset"][0] = -5


def overlapping(tensor):
    (whole,) = tensor["boxes"]
    half = {**whole, "size": [32, 16]}
    tensor["boxes"] = [half, {**half, "offset": [1, 0]}]


def enlarged(tensor):
    tensor["shape"][0] = tensor["boxes"][0]["size"][0] = 10**12


def turned(tensor):
    tensor["boxes"][0]["size"] = [-n for n in tensor["boxes"][0]["size"]]


def flattened(tensor):
    tensor["boxes"][0].update(offset=[0], size=[64 * 16])


def beyond(tensor):
    tensor["boxes"][0]["start"] = 10**12


def elsewhere(tensor):
    tensor["boxes"][0]["file"] = "other"


@pytest.mark.parametrize(
    "lie", [emptied, doubled, moved, overlapping, enlarged, turned, flattened, beyond, elsewhere]
)
def test_boxes_that_are_not_the_tensor_are_refused(copy, lie):
    index = json.loads((copy / "index.json").read_text())
    lie(index["tensors"]["model.embedding.weight"])
    (copy / "index.json").write_text(json.dumps(index))
    reseal(copy)
    error = load_error(copy)
    assert error.what == "this checkpoint is damaged"
    assert error.where.endswith("index.json") and "'model.embedding.weight'" in error.why


AVERAGE = "optimizer.embedding.weight.exp_avg"


def said(**kinds):
    return lambda states, tensors: states.update(kinds)


def of_shape(name, shape):
    def lie(states, tensors):
        tensors[name].update(shape=shape, boxes=[{**tensors[name]["boxes"][0], **at(shape)}])

    return lie


def without(state):
    """Neither description knows of it."""

    def lie(states, tensors):
        del states[state]
        for name in [name for name in tensors if name.endswith(f".{state}")]:
            del tensors[name]

    return lie


def at(shape):
    return {"offset": [0] * len(shape), "size": shape}


LIES = {
    "no states": (lambda states, tensors: states.clear(), "nothing is said of"),
    "one less": (lambda states, tensors: states.pop("exp_avg"), "nothing is said of"),
    "one more": (said(more="elements"), "no parameter has the optimizer's state 'more'"),
    "a number cut": (said(step="elements"), "is no 'elements': float32 of shape ()"),
    "a number of Python's": (said(step="int"), "is no 'int': float32 of shape ()"),
    "elements as a number": (said(exp_avg="tensor"), "is no 'tensor': float32 of shape"),
    "elements as a whole": (said(exp_avg="whole"), "state 'exp_avg' is no 'whole'"),
    "none for one": (
        lambda states, tensors: tensors.pop(AVERAGE),
        "'embedding.weight' lacks the optimizer's state 'exp_avg'",
    ),
    "none for all": (without("exp_avg"), "lacks the optimizer's state 'exp_avg'"),
    "of fewer elements": (of_shape(AVERAGE, [63, 16]), "is no 'elements': float32 of shape"),
    "of no parameter": (
        lambda states, tensors: tensors.update({"optimizer.x.exp_avg": tensors[AVERAGE]}),
        "nothing is said of 'optimizer.x.exp_avg'",
    ),
}


def lie_of_states(path, lie):
    """In both descriptions, as an attacker would."""
    index, manifest = json.loads((path / "index.json").read_text()), read_manifest(path)
    states = dict(manifest.optimizer.states)
    lie(states, index["tensors"])
    (path / "index.json").write_text(json.dumps(index))
    optimizer = manifest.optimizer.model_copy(update={"states": states})
    sealed = manifest.model_copy(update={"optimizer": optimizer}).sealed()
    (path / "checkpoint.json").write_text(sealed)
    reseal(path)


@pytest.mark.parametrize("lie", LIES)
def test_states_that_are_not_the_optimizers_are_damage(copy, lie):
    harm, why = LIES[lie]
    lie_of_states(copy, harm)
    error = load_error(copy)
    assert error.what == "this checkpoint is damaged"
    assert why in error.why
    checkpointer(copy.parent).load(blank(ALONE)[0], None)  # the model is whole


FACTORED = "optimizer.blocks.0.filters.row_var"


@pytest.mark.parametrize(
    ("kind", "harm", "why"),
    [
        ("adafactor", said(row_var="elements"), "state 'row_var' is no 'elements'"),
        ("adafactor", of_shape(FACTORED, [12]), "of shape (12,), not (3, 4, 1)"),
        ("adafactor", without("col_var"), "lacks the optimizer's state 'col_var'"),
        ("muon", without("exp_avg_sq"), "lacks the optimizer's state 'exp_avg_sq'"),
    ],
)
def test_states_that_are_not_those_of_whole_parameters_are_damage(tmp_path, kind, harm, why):
    engine = engine_for(odd, ALONE)
    optimizer = make(kind, engine)
    train(engine, optimizer, ALONE, range(2))
    saver = checkpointer(tmp_path)
    path = saver.save(2, engine, optimizer, cursor={})
    saver.load(engine, optimizer)
    lie_of_states(path, harm)
    with pytest.raises(Damaged) as caught:
        saver.load(engine, optimizer)
    assert why in caught.value.why


def test_files_that_nobody_vouches_for_are_not_read(copy):
    manifest = read_manifest(copy).model_copy(update={"files": {}})
    (copy / "checkpoint.json").write_text(manifest.sealed())
    assert load_error(copy).where.endswith("index.json")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("load", "there is no dtype 'load'"),
        ("quint8", "tensors of dtype 'quint8' cannot be copied"),
        ("int4", "tensors of dtype 'int4' cannot be copied"),
    ],
)
def test_dtypes_that_no_tensor_has_are_refused(copy, name, why):
    text = (copy / "index.json").read_text()
    (copy / "index.json").write_text(text.replace('"float32"', f'"{name}"'))
    reseal(copy)
    assert why in load_error(copy).why


@pytest.mark.parametrize("job", [None, "x", {}, {"max_steps": "many"}])
def test_what_no_job_saved_is_of_no_number_of_steps(job):
    assert get_job_steps({"job": job}) is None and get_job_steps({}) is None
    assert get_job_steps({"job": {"max_steps": 7}}) == 7


# -- another run -----------------------------------------------------------------------------------


def test_another_model(saved):
    engine = engine_for(ARCHITECTURES["gpt2"].factory, ALONE)
    with raises(InputError, code="checkpoint-of-another-model") as caught:
        checkpointer(saved.parent).load(engine, None)
    assert "missing: transformer.wte.weight" in caught.value.why
    assert "unexpected: embedding.weight" in caught.value.why


def wider():
    model = odd()
    model.blocks[1].filters = torch.nn.Parameter(torch.zeros(3, 4, 6))
    return model


def test_another_shape(saved):
    engine = engine_for(wider, ALONE)
    with raises(InputError, code="checkpoint-of-another-model", why=("blocks.1.filters", 3, 4, 5)):
        checkpointer(saved.parent).load(engine, None)


def frozen():
    model = odd()
    model.embedding.requires_grad_(False)
    return model


def test_other_parameters_are_trained(saved):
    engine = engine_for(frozen, ALONE)
    with raises(InputError, code="checkpoint-of-another-model"):
        checkpointer(saved.parent).load(engine, None)


def test_another_optimizer(saved):
    engine, optimizer = blank(ALONE, make=lambda p: torch.optim.SGD(p, lr=0.1))
    with raises(InputError, code="checkpoint-of-another-optimizer", what="AdamW"):
        checkpointer(saved.parent).load(engine, optimizer)


def test_what_json_cannot_hold(tmp_path):
    engine, optimizer = trained(ALONE)
    with raises(InputError, code="not-storable-in-checkpoint", what="extra"):
        checkpointer(tmp_path).save(1, engine, optimizer, cursor={}, extra={"a": object()})
    assert not list(tmp_path.iterdir())
