"""Initial values from safetensors: a file, a folder of parts, and what is wrong with them."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from gpumix.engine.model.deferred_init import build
from gpumix.engine.prepare import prepare
from gpumix.engine.sharding.initial_weights import find_unused_tensors
from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import Plan
from helpers.errors import raises
from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.training.models import ARCHITECTURES, Regression, own_blocks
from helpers.training.reference import SEED, Share, engine_alone, engine_for, joined, pieces_of
from helpers.training.staging import rows, run_in_turn, staged_plan


def pretrained(name="gpt2"):
    torch.manual_seed(11)
    return ARCHITECTURES[name].factory()


def assert_values(engine_pieces, model):
    found = joined(engine_pieces)
    for name, parameter in model.named_parameters():
        assert np.array_equal(found[name], parameter.detach().numpy()), name


@pytest.mark.parametrize(
    "name",
    left_out(
        ["gpt2", "llama", "mixtral", "bert", "t5", "bart", "whisper"], ["t5", "bart", "whisper"]
    ),
)
def test_what_transformers_saved_is_found(name, tmp_path):
    model = pretrained(name)
    model.save_pretrained(tmp_path)
    engine = engine_alone(ARCHITECTURES[name].factory, 1, 1, weights=tmp_path)
    assert_values([pieces_of(engine)], model)


def test_a_single_file_will_do(tmp_path):
    model = own_blocks()
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    engine = engine_alone(own_blocks, 1, 1, weights=tmp_path / "weights.safetensors")
    assert_values([pieces_of(engine)], model)


def _pieces(weights, shares):
    return pieces_of(engine_for(ARCHITECTURES["gpt2"].factory, shares, weights=weights))


def test_ranks_read_their_parts_of_many_files(tmp_path):
    model = pretrained()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    shares = [Share(1, 1, 2), Share(1, 1, 0), Share(0, 0, 3)]
    assert_values(run_ranks(_pieces, 3, tmp_path, shares), model)


LAYOUTS = {
    "stages": rows([6], [4, 2], [6], state=[[1], [2, 1], [1]]),
    "a TP group, then one": rows([6], [6], tensor=[2, 1]),
    "TP groups of unlike sizes": rows([4, 2], tensor=[[2, 1]]),
}
FURTHER = [("gpt2", True), ("llama", True)]


@pytest.mark.parametrize(
    ("name", "every_stage"), left_out([("gpt2", False), ("gpt2", True), ("llama", True)], FURTHER)
)
def test_stages_and_tp_groups_read_their_parts(name, every_stage, tmp_path):
    model = pretrained(name)
    model.save_pretrained(tmp_path)
    plans = {
        (layout, stage): staged_plan(name, LAYOUTS[layout], zero_stage=stage)
        for layout, one in zip(LAYOUTS, (1, 3, 0), strict=True)
        for stage in ((0, 1, 3) if every_stage else (one,))
    }
    work = {key: (plan, (name, tmp_path)) for key, plan in plans.items()}
    for pieces in run_in_turn(_staged_pieces, work).values():
        assert_values(pieces, model)


def _staged_pieces(plan_json, name, weights):
    model = build(ARCHITECTURES[name].factory, SEED)
    return pieces_of(prepare(model, Plan.model_validate_json(plan_json), weights=weights))


def test_other_dtypes_are_converted(tmp_path):
    model = own_blocks().to(torch.bfloat16)
    save_file(model.state_dict(), tmp_path / "half.safetensors")
    engine = engine_alone(own_blocks, 1, 1, weights=tmp_path)
    assert_values([pieces_of(engine)], model.float())


class Scaled(nn.Module):
    """Has a parameter without dimensions and one of three."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.cube = nn.Parameter(torch.randn(3, 5, 7))
        self.inner = nn.Sequential(nn.Linear(32, 32))

    def forward(self, x):
        return self.inner(x) * self.scale + self.cube.sum()


def scaled():
    return Regression([Scaled(), Scaled()])


def _scaled_pieces(weights, shares):
    return pieces_of(engine_for(scaled, shares, weights=weights))


def test_parameters_of_any_number_of_dimensions_are_cut_anywhere(tmp_path):
    model = scaled()
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    shares = [Share(1, 1, 1), Share(1, 1, 37), Share(0, 0, 3)]
    assert_values(run_ranks(_scaled_pieces, 3, tmp_path, shares), model)


def test_running_statistics_are_read_too(tmp_path):
    def factory():
        model = own_blocks()
        model.blocks[0].mlp.append(nn.BatchNorm1d(12))
        return model

    model = factory()
    model.blocks[0].mlp[3].running_mean.fill_(3.0)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    engine = engine_alone(factory, 2, 1, weights=tmp_path)
    assert (engine.model.blocks[0].mlp[3].running_mean == 3).all()


@pytest.mark.parametrize("kept", ["first", "second"])
def test_running_statistics_that_two_modules_share_are_in_a_file_under_one_name(tmp_path, kept):
    def factory():
        model = own_blocks()
        first, second = nn.BatchNorm1d(12), nn.BatchNorm1d(12)
        second.running_mean = first.running_mean
        model.blocks[0].mlp.append(first)
        model.blocks[1].mlp.append(second)
        return model

    model = factory()
    model.blocks[0].mlp[3].running_mean.fill_(3.0)
    state = model.state_dict()
    del state[f"blocks.{int(kept == 'first')}.mlp.3.running_mean"]
    save_file(state, tmp_path / "weights.safetensors")
    engine = engine_alone(factory, 2, 1, weights=tmp_path)
    first, second = (engine.model.blocks[n].mlp[3].running_mean for n in range(2))
    assert first is second
    assert (first == 3).all()


def test_tied_parameters_are_found_by_any_of_their_names(tmp_path):
    def factory():
        model = own_blocks()
        model.blocks[2].out.weight = model.blocks[0].out.weight
        return model

    model = factory()
    values = model.state_dict()
    del values["blocks.0.out.weight"]
    save_file(values, tmp_path / "weights.safetensors")
    assert_values([pieces_of(engine_alone(factory, 1, 1, weights=tmp_path))], model)


def test_a_missing_tensor_is_named(tmp_path):
    values = own_blocks().state_dict()
    del values["blocks.1.out.weight"]
    save_file(values, tmp_path / "weights.safetensors")
    with raises(InputError, code="weights-of-another-model", why="blocks.1.out.weight"):
        engine_alone(own_blocks, 1, 1, weights=tmp_path)


def test_a_wrong_shape_is_told(tmp_path):
    values = own_blocks().state_dict()
    values["leave.weight"] = torch.zeros(4, 31)
    save_file(values, tmp_path / "weights.safetensors")
    with raises(InputError, code="weights-of-another-model", why=("leave.weight", 4, 31, 32)):
        engine_alone(own_blocks, 1, 1, weights=tmp_path)


def test_a_wrong_shape_of_a_buffer_is_told(tmp_path):
    def factory():
        model = own_blocks()
        model.register_buffer("table", torch.zeros(3))
        return model

    values = factory().state_dict()
    values["table"] = torch.zeros(4)
    save_file(values, tmp_path / "weights.safetensors")
    with raises(InputError, code="weights-of-another-model", why=(4, 3)):
        engine_alone(factory, 1, 1, weights=tmp_path)


def test_tensors_without_a_place_are_told(tmp_path):
    save_file(own_blocks().state_dict() | {"other": torch.zeros(1)}, tmp_path / "w.safetensors")
    assert find_unused_tensors(own_blocks(), tmp_path) == ["other"]


def test_a_folder_without_weights_is_refused(tmp_path):
    with raises(InputError, code="safetensors-missing"):
        engine_alone(own_blocks, 1, 1, weights=tmp_path)


def test_a_file_that_is_no_safetensors_is_refused(tmp_path):
    (tmp_path / "weights.safetensors").write_text("hello")
    with raises(InputError, code="weights-unreadable"):
        engine_alone(own_blocks, 1, 1, weights=tmp_path)


@pytest.mark.parametrize("in_folder", [False, True])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path, in_folder):
    pipe = tmp_path / "model.safetensors"
    os.mkfifo(pipe)
    with raises(InputError, code="weights-unreadable") as caught:
        engine_alone(own_blocks, 1, 1, weights=tmp_path if in_folder else pipe)
    assert (caught.value.where, caught.value.why) == (str(pipe), "it is a pipe, not a file")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InputError):
        engine_alone(own_blocks, 1, 1, weights=tmp_path / "none.safetensors")
