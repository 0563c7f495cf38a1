"""The optimizers of a job: each trains, is resumed, and is what the planner counts with."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from toys import model as toy_model

import gpumix
from gpumix.schema.cluster.cluster import Cluster, Device, DeviceClass
from gpumix.schema.errors import InputError
from gpumix.schema.job.job import OptimizerSpec, ParameterGroup
from gpumix.schema.profile.profile import ModelProfile
from gpumix.schema.reading.read import read_job
from gpumix.train.rank_setup.optimizer import (
    build_optimizer,
    build_trial_optimizer,
    set_learning_rates,
)
from helpers.errors import raises
from helpers.extended import left_out
from helpers.runs.jobs import BATCH, PAIR, TENSOR_PLAN, plan_for, toy, train, write_job
from helpers.training.reference import engine_alone

OPTIMIZERS = {
    "adafactor": {"name": "adafactor", "lr": 0.3, "weight_decay": 0.0},
    "muon": {"name": "muon", "lr": 3e-2, "weight_decay": 0.0},
    "groups": {"lr": 1e-2, "groups": [{"match": "blocks.0.*", "lr": 3e-2, "weight_decay": 0.5}]},
}
CLUSTER = Cluster(
    classes=(DeviceClass(name="cpu", accelerator="cpu", memory_bytes=2**26),),
    devices=(Device(id="d0", device_class="cpu"),),
)


@pytest.mark.parametrize("name", left_out(OPTIMIZERS, ("adafactor", "groups")))
def test_a_job_is_trained_and_resumed_to_the_bit(tmp_path, name):
    job = write_job(tmp_path, optimizer=OPTIMIZERS[name], lr_scheduler={"type": "constant"})
    plan = plan_for(job, shares=(0.7, 0.0, 0.3))
    whole = train(job, f"output_dir={tmp_path / 'whole'}", plan=plan)
    assert whole.losses[-1] < 0.9 * whole.losses[0]
    train(job, "max_steps=3", plan=plan)
    assert train(job, plan=plan, resume=True).losses == whole.losses[3:]


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_a_job_is_planned_and_trained_in_tensor_parallel_groups(tmp_path, name):
    """And resumed by a rank alone."""

    def job_of(folder, **more):
        model = toy() | {"tensor_plan": TENSOR_PLAN}
        constant = {"optimizer": OPTIMIZERS[name], "lr_scheduler": {"type": "constant"}}
        return write_job(tmp_path / folder, model=model, **constant, **more)

    alone = job_of("alone", cluster=[PAIR[0] | {"count": 1}])
    expected = train(alone).losses
    assert expected[-1] < 0.9 * expected[0]
    job = job_of("pair", cluster=PAIR, techniques={"tensor_parallel_size": 2})
    assert read_job(job).space == read_job(job).techniques
    assert train(job, "max_steps=3").losses == pytest.approx(expected[:3], rel=1e-4)
    plan = plan_for(alone, samples=(BATCH,), shares=(1.0,))
    moved = job_of("pair", cluster=[PAIR[0] | {"count": 1}])
    assert train(moved, plan=plan, resume=True).losses == pytest.approx(expected[3:], rel=1e-4)


@pytest.mark.extended
def test_another_plan_goes_on_alike(tmp_path):
    job = write_job(tmp_path, optimizer=OPTIMIZERS["adafactor"], lr_scheduler={"type": "constant"})
    plan = plan_for(job)
    whole = train(job, f"output_dir={tmp_path / 'whole'}", plan=plan)
    train(job, "max_steps=3", plan=plan)
    other = plan_for(job, (0, 5, 3), (0.1, 0.9, 0.0))
    assert train(job, plan=other, resume=True).losses == pytest.approx(whole.losses[3:], rel=1e-4)


def _job_in_8_bits(folder, **changes):
    """Of a model whose matrices are large enough."""
    settings = {
        "model": toy(width=64),
        "optimizer": {"name": "adamw_8bit", "lr": 3e-3},
        "lr_scheduler": {"type": "constant"},
        "max_grad_norm": None,  # the norm's last digits depend on the cuts
    }
    return write_job(folder, **(settings | changes))


def test_another_plan_goes_on_to_the_bit_in_8_bits(tmp_path):
    """Gradients are summed in the order of ranks, whatever these store."""
    job = _job_in_8_bits(tmp_path)
    first, other = (
        plan_for(job, shares=shares).model_copy(update={"optimizer_state": "8bit"})
        for shares in ((0.7, 0.0, 0.3), (0.1, 0.5, 0.4))
    )
    whole = train(job, f"output_dir={tmp_path / 'whole'}", plan=first)
    assert whole.losses[-1] < 0.9 * whole.losses[0]
    train(job, "max_steps=3", plan=first)
    assert train(job, plan=other, resume=True).losses == whole.losses[3:]


def test_a_plan_whose_shares_cut_blocks_is_refused_before_training(tmp_path):
    job = _job_in_8_bits(tmp_path)
    with raises(InputError, code="plan-cuts-quantised-blocks") as caught:
        train(job, plan=plan_for(job, shares=(0.7, 0.0, 0.3)))
    assert "`optimizer_state: 8bit`" in caught.value.fix


def test_a_plan_decides_what_a_job_allows(tmp_path):
    spec = {"name": "adamw", "lr": 3e-3}
    allowing = _job_in_8_bits(tmp_path / "allowing", optimizer=spec, allow="8bit-optimizer")
    named = _job_in_8_bits(tmp_path / "named")
    plan = plan_for(named, shares=(0.7, 0.0, 0.3)).model_copy(update={"optimizer_state": "8bit"})
    whole = train(named, plan=plan)
    train(allowing, "max_steps=3", plan=plan)
    assert train(allowing, plan=plan, resume=True).losses == whole.losses[3:]


@pytest.mark.extended
def test_a_job_in_8_bits_is_planned_from_its_profile(tmp_path):
    job = _job_in_8_bits(tmp_path, max_steps=1)
    assert train(job).steps == 1


def test_tp_groups_are_no_technique_of_optimizers_that_do_not_fit_them(tmp_path):
    job = read_job(_job_in_8_bits(tmp_path))
    assert job.space == job.techniques.without_tensor_parallel()
    settings = {"techniques": {"tensor_parallel_size": [2]}}
    with raises(InputError, code="values-conflict", what="adamw_8bit"):
        read_job(_job_in_8_bits(tmp_path, **settings))


def test_groups_that_match_nothing_are_told_before_anything_is_measured(tmp_path):
    job = write_job(tmp_path, optimizer={"groups": [{"match": "*.biases", "lr": 1.0}]})
    with raises(InputError, code="parameter-group-empty", what="*.biases"):
        train(job)


def test_groups_have_their_own_rates_and_decay(tmp_path):
    engine = engine_alone(toy_model, 2, 1)
    spec = OptimizerSpec(
        lr=0.1,
        weight_decay=0.2,
        groups=(
            ParameterGroup(match="blocks.*.norm.*", weight_decay=0.3),
            ParameterGroup(match="blocks.*", lr=0.5),
        ),
    )
    optimizer = build_optimizer(spec, engine.pieces())
    job = read_job(write_job(tmp_path, lr_scheduler={"warmup_steps": 4}))
    set_learning_rates(optimizer, job, 1)
    names = {id(p): n for n, p in engine.named_parameters()}
    found = {
        names[id(p)]: (g["lr"], g["weight_decay"])
        for g in optimizer.param_groups
        for p in g["params"]
    }
    assert found["blocks.1.norm.bias"] == found["blocks.1.norm.weight"] == (0.05, 0.3)
    assert found["blocks.1.into.weight"] == (0.25, 0.2)
    assert found["blocks.1.into.bias"] == (0.25, 0.0)
    assert found["embedding.weight"] == (0.05, 0.2)
    assert found["head.bias"] == (0.05, 0.0)


def test_the_settings_are_those_of_torch():
    engine = engine_alone(toy_model, 2, 1)
    spec = OptimizerSpec(
        name="adafactor", lr=0.1, beta2_decay=-0.5, clip_threshold=2.0, least_scale=0.5
    )
    (group, _) = build_optimizer(spec, engine.pieces(), engine.layout).param_groups
    expected = {"beta2_decay": -0.5, "d": 2.0, "eps": (None, 0.5), "lr": 0.1, "weight_decay": 0.1}
    assert expected.items() <= group.items()
    spec = OptimizerSpec(name="muon", ns_steps=3, nesterov=False, adjust_lr="original", eps=1e-5)
    groups = build_optimizer(spec, engine.pieces(), engine.layout).param_groups
    muon = next(g for g in groups if g["use_muon"])
    assert (muon["ns_steps"], muon["nesterov"], muon["momentum"]) == (3, False, 0.95)
    assert muon["adjust_lr_fn"] == "original"
    assert {g["eps"] for g in groups if not g["use_muon"]} == {1e-5}


# -- what the planner counts with ------------------------------------------------------------------


def held_bytes(spec: OptimizerSpec, factory=toy_model) -> float:
    """Of the optimizer's state of a whole toy model, an element."""
    engine = engine_alone(factory, 2, 1)
    optimizer = build_optimizer(spec, engine.pieces(), engine.layout)
    for p in engine.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    held = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    elements = sum(p.numel() for p in engine.parameters())
    return sum(t.numel() * t.element_size() for t in held) / elements


def measured(spec: OptimizerSpec, factory=toy_model) -> tuple[ModelProfile, float]:
    profile = gpumix.profile(
        factory,
        lambda n: dict.fromkeys(("input_ids", "labels"), torch.zeros(n, 8, dtype=torch.int64)),
        sequence_length=8,
        global_batch_size=2,
        cluster=CLUSTER,
        optimizer=lambda parameters: build_trial_optimizer(spec, parameters),
        budget_s=5,
        progress=lambda line: None,
    )
    assert profile.classes[0].optimizer_s_per_element > 0
    return profile.model, profile.optimizer_bytes_per_element


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_the_state_is_what_the_profile_says(name):
    spec = OptimizerSpec(name=name)
    model, per_element = measured(spec)
    assert per_element == spec.state_bytes_per_element(model)
    assert per_element == pytest.approx(held_bytes(spec))


def test_state_in_8_bits_is_counted_by_the_sizes_of_parameters():
    spec = OptimizerSpec(name="adamw_8bit")
    factory = partial(toy_model, width=64)
    model, per_element = measured(spec, factory)
    assert per_element == spec.state_bytes_per_element(model)
    assert per_element == pytest.approx(held_bytes(spec, factory))
    assert 2.03125 < per_element < 4  # norms, biases and embeddings are small


def test_adafactor_counts_as_having_no_state():
    spec = OptimizerSpec(name="adafactor")
    model, per_element = measured(spec)
    assert per_element == spec.state_bytes_per_element(model) == 0


@pytest.mark.extended
def test_a_job_with_muon_is_planned_from_its_profile(tmp_path):
    """The toy's elements are half in matrices of blocks, so its state is no whole number."""
    job = write_job(tmp_path, optimizer=OPTIMIZERS["muon"], model=toy(width=20), max_steps=1)
    assert train(job).steps == 1
