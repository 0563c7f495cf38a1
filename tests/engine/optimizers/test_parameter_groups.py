"""Parameter groups by the model's own names, and optimizers that know only some parameters."""

from __future__ import annotations

from fnmatch import fnmatch
from itertools import product

import pytest
import torch

import gpumix
from gpumix.engine.sharding.state_dict import collect_optimizer_state, load_optimizer_state
from gpumix.integrations.common.optimizer_adapter import take_over_optimizer
from gpumix.schema.errors import InputError
from gpumix.schema.job.job import OptimizerSpec, ParameterGroup
from gpumix.schema.plan.plan import Plan
from gpumix.train.rank_setup.optimizer import build_optimizer
from helpers.errors import raises
from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.training.models import ARCHITECTURES
from helpers.training.reference import (
    batches,
    engine_alone,
    initialised,
    joined,
    mean_loss,
    pieces_of,
    tensor_errors,
)
from helpers.training.staging import EVERY, own_samples, rows, staged_engine, staged_plan

GPT2 = ARCHITECTURES["gpt2"]
STEPS = 3


def decayed(name: str) -> bool:
    return name.endswith("weight") and "ln_" not in name


def grouped(named_parameters):
    named = list(named_parameters)
    return torch.optim.SGD(
        [
            {"params": [p for n, p in named if decayed(n)], "weight_decay": 0.1},
            {"params": [p for n, p in named if not decayed(n)], "lr": 0.01},
        ],
        lr=0.1,
        momentum=0.9,
    )


def only_head(named_parameters):
    """Knows the last norm and nothing else; the other parameters' gradients are never zeroed."""
    return torch.optim.SGD([p for n, p in named_parameters if "ln_f" in n], lr=0.1)


def trained_plainly(optimizer_of):
    model = initialised(GPT2.factory)
    optimizer = optimizer_of(model.named_parameters())
    for batch in batches(GPT2, 4, STEPS):
        optimizer.zero_grad()
        mean_loss(model, batch).backward()
        optimizer.step()
    return {n: p.detach().numpy() for n, p in model.named_parameters()}


def trained_by_engine(optimizer_of):
    engine = engine_alone(GPT2.factory, 4, 2)
    optimizer = optimizer_of(engine.named_parameters())
    for batch in batches(GPT2, 4, STEPS):
        optimizer.zero_grad()
        engine.step(batch)
        optimizer.step()
    return joined([pieces_of(engine)])


def test_names_are_the_models_own():
    engine = engine_alone(GPT2.factory, 4, 2)
    expected = {n for n, _ in GPT2.factory().named_parameters()}
    assert {n for n, _ in engine.named_parameters()} == expected
    assert engine.shapes() == {n: p.shape for n, p in GPT2.factory().named_parameters()}


def test_groups_train_as_they_do_plainly():
    errors = tensor_errors(trained_by_engine(grouped), trained_plainly(grouped))
    assert max(errors.values()) < 1e-5, errors


def test_an_optimizer_may_know_a_part_of_the_parameters():
    errors = tensor_errors(trained_by_engine(only_head), trained_plainly(only_head))
    assert max(errors.values()) < 1e-5, errors


# -- by patterns -----------------------------------------------------------------------------------


def by_patterns(*groups):
    engine = engine_alone(GPT2.factory, 4, 2)
    names = {id(p): n for n, p in engine.named_parameters()}
    made = torch.optim.AdamW(gpumix.parameter_groups(engine, *groups), lr=0.1).param_groups
    return [({names[id(p)] for p in g["params"]}, g["lr"], g["weight_decay"]) for g in made]


def test_the_first_pattern_that_matches_counts():
    every = {n for n, _ in GPT2.factory().named_parameters()}
    found = by_patterns({"match": "*.ln_1.bias", "lr": 0.5}, {"match": "*.bias", "weight_decay": 0})
    first = {f"transformer.h.{i}.ln_1.bias" for i in range(3)}
    biases = {n for n in every if n.endswith(".bias")} - first
    assert found == [(first, 0.5, 0.01), (biases, 0.1, 0), (every - first - biases, 0.1, 0.01)]


def test_no_group_is_left_over_where_patterns_match_all():
    assert len(by_patterns({"match": "*", "lr": 0.5})) == 1


def test_a_group_without_a_pattern_is_refused():
    with raises(InputError, code="parameter-group-without-names"):
        by_patterns({"mtch": "*"})


def test_a_pattern_without_a_parameter_is_refused():
    with raises(InputError, code="parameter-group-empty", what="*.biases"):
        by_patterns({"match": "*.biases"})
    with raises(InputError, code="parameter-group-empty", why=("*.bias", "transformer.h.0")):
        by_patterns({"match": "*.bias"}, {"match": "*.ln_1.bias"})


def _of_job(engine, match):
    groups = (ParameterGroup(match=match, lr=0.02),)
    spec = OptimizerSpec(name="sgd", lr=0.1, weight_decay=0.0, groups=groups)
    return build_optimizer(spec, engine.pieces(), names=engine.trained_names())


def _of_engine(engine, match):
    return torch.optim.SGD(gpumix.parameter_groups(engine, {"match": match, "lr": 0.02}), lr=0.1)


def _of_model(named, match):
    named = list(named)
    matching = [p for n, p in named if fnmatch(n, match)]
    others = [p for n, p in named if not fnmatch(n, match)]
    return torch.optim.SGD([{"params": matching, "lr": 0.02}, {"params": others}], lr=0.1)


def _taken_over(engine, match):
    """Made of the model's own parameters."""
    model = initialised(GPT2.factory)
    optimizer = _of_model(model.named_parameters(), match)
    take_over_optimizer(optimizer, engine, {id(p): n for n, p in model.named_parameters()})
    return optimizer


def _of_parameters(engine, match):
    """No groups."""
    return torch.optim.SGD(engine.parameters(), lr=0.1)


def _by_plan(name, plan_json, make, match):
    """On a rank: its pieces after some steps."""
    plan = Plan.model_validate_json(plan_json)
    engine = staged_engine(name, plan)
    optimizer = make(engine, match)
    for batch in batches(EVERY[name], plan.global_batch, STEPS):
        engine.step(own_samples(plan, engine.comm.rank, batch))
        optimizer.step()
        optimizer.zero_grad()
    state = collect_optimizer_state(engine.pieces(), optimizer)
    load_optimizer_state(engine.pieces(), optimizer, state)
    return pieces_of(engine)


def _assert_trains_plainly(name, plan, make, match):
    ranks = len(plan.workers)
    found = joined(run_ranks(_by_plan, ranks, name, plan.model_dump_json(), make, match))
    model = initialised(EVERY[name].factory)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = _of_model(trained, "" if make is _of_parameters else match)
    for batch in batches(EVERY[name], plan.global_batch, STEPS):
        optimizer.zero_grad()
        mean_loss(model, batch).backward()
        optimizer.step()
    errors = tensor_errors(found, {n: p.detach().numpy() for n, p in model.named_parameters()})
    assert max(errors.values()) < 1e-5, errors


ALONE = list(product(["plain-own-blocks", "frozen_bottom"], [_of_job, _of_engine, _of_parameters]))


@pytest.mark.parametrize(
    ("name", "make"),
    left_out(ALONE, [one for one in ALONE if one != ("frozen_bottom", _of_engine)]),
)
def test_a_group_that_one_stage_has_alone(name, make):
    """And a stage that trains nothing."""
    plan = staged_plan(name, rows([4], [4]), cuts=[2])
    _assert_trains_plainly(name, plan, make, "leave.*")


@pytest.mark.extended
@pytest.mark.parametrize("make", [_of_engine, _of_job, _taken_over])
def test_groups_of_a_rank_that_has_several_parts_of_a_parameter(make):
    plan = staged_plan("gpt2", rows([4, 3], tensor=[(1, 2)]), zero_stage=1)
    _assert_trains_plainly("gpt2", plan, make, "transformer.h.1.*")


ADAGRAD = {"lr": 0.05, "initial_accumulator_value": 0.1, "lr_decay": 0.01}


def test_an_optimizer_with_state_before_its_first_update_is_taken_over():
    engine, model = engine_alone(GPT2.factory, 4, 2), initialised(GPT2.factory)
    names = {id(p): name for name, p in model.named_parameters()}
    given = torch.optim.Adagrad(model.parameters(), **ADAGRAD)
    take_over_optimizer(given, engine, names)
    plain = torch.optim.Adagrad(model.parameters(), **ADAGRAD)
    for batch in batches(GPT2, 4, STEPS):
        for optimizer, step in ((given, engine.step), (plain, lambda b: mean_loss(model, b))):
            optimizer.zero_grad()
            loss = step(batch)
            if optimizer is plain:
                loss.backward()
            optimizer.step()
    expected = {n: p.detach().numpy() for n, p in model.named_parameters()}
    assert max(tensor_errors(joined([pieces_of(engine)]), expected).values()) < 1e-4


def test_an_optimizer_that_has_updated_is_not_taken_over():
    engine, model = engine_alone(GPT2.factory, 4, 2), initialised(GPT2.factory)
    optimizer = torch.optim.Adagrad(model.parameters(), **ADAGRAD)
    mean_loss(model, next(batches(GPT2, 4, 1))).backward()
    optimizer.step()
    with raises(InputError, code="optimizer-not-replaceable"):
        take_over_optimizer(optimizer, engine, {id(p): n for n, p in model.named_parameters()})
