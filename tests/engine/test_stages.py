"""A plan of several stages trains like one process."""

from __future__ import annotations

import gc
import sys
import weakref
from types import ModuleType

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from gpumix.engine.prepare import prepare
from gpumix.spec.errors import InputError, MachineError
from gpumix.spec.plan import Mode, Plan
from gpumix.spec.shares import share_of
from harness import run_ranks
from models import ARCHITECTURES, mean_loss
from reference import batches, initialised, train_alone, worst_error
from staging import (
    EVERY,
    Row,
    own_samples,
    rows,
    staged_engine,
    staged_plan,
    train_in_stages,
    train_in_turn,
)

GPT2 = ARCHITECTURES["gpt2"]
STEPS = 2
TOLERANCE = 1e-5
KEPT = Mode(recompute=False)
SIZES = [6, 5, 4, 2]

LAYOUTS = {
    "1 + 1": rows([6], [6]),
    "1 + 2": rows([6], [2, 4]),
    "1 + 2 + 1": rows([6], [4, 2], [6]),
    "2 + 2, crossing": rows([4, 2], [2, 4]),
    "2 of which one stores only": rows([6, 0], [2, 4]),
}

RAGGED = {
    "3 + 1, crossing": rows([4, 2], [2, 4], micro_batch=1, state=[[3, 1], [1, 4]]),
    "one that stores nothing": rows([4, 2], [6], micro_batch=1, state=[[1, 0], [1]]),
    "one that stores only": rows([6], [6, 0], micro_batch=1, state=[[1], [1, 2]]),
    "two teams": rows([4, 2], micro_batch=1, state=[[1, 3]], tensor=[2]),
    "a team, then two": rows([6], [4, 2], micro_batch=1, state=[[1], [1, 3]], tensor=[2, 1]),
}
TEAMS = {
    "two teams": rows([4, 2], tensor=[2]),
    "a team, then two": rows([6], [4, 2], tensor=[2, 1]),
    "one, then a team": rows([6], [6], tensor=[1, 2]),
}
ALL = LAYOUTS | TEAMS


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("schedule", "stage"), [("gpipe", 0), ("1f1b", 1), ("eager-1f1b", 0), ("zero-bubble", 1)]
)
def test_layouts(layout, schedule, stage):
    assert_parity("gpt2", LAYOUTS[layout], schedule=schedule, zero_stage=stage)


@pytest.mark.parametrize(
    ("layout", "waves"),
    [
        (rows([6], [2, 4]), 1),
        (rows([8], [8], micro_batch=1), 2),
        (rows([4, 4], [4, 4]), 2),
        (rows([6, 4], [6, 4]), 2),
    ],
)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b"])
@pytest.mark.parametrize("stage", [2, 3])
def test_waves(layout, waves, schedule, stage):
    assert_parity("gpt2", layout, schedule=schedule, zero_stage=stage, waves=waves)


@pytest.mark.parametrize("stage", [0, 1])
def test_weights_come_later(stage):
    layout = rows([6], [2, 4], mode=KEPT)
    assert_parity("gpt2", layout, schedule="zero-bubble", zero_stage=stage)


def test_weights_that_come_later_get_gradients_from_where_no_input_comes_before():
    """T5's first block returns its position bias, which depends on weights alone."""
    layout = rows([6], [6], mode=KEPT)
    assert_parity("t5", layout, schedule="zero-bubble", zero_stage=1)


@pytest.mark.parametrize(("stage", "waves"), [(0, 1), (1, 1), (2, 2), (3, 1), (3, 2), (3, 3)])
@pytest.mark.parametrize("samples", [([8], [8]), ([4, 4], [4, 4])], ids=["1 + 1", "2 + 2"])
def test_stages_go_round(samples, stage, waves):
    """Four units on two ranks or pairs of ranks, of which each has two stages."""
    one, other = rows(*samples, micro_batch=1)
    layout = [one, other, one, other]
    assert_parity("bert", layout, schedule="interleaved", zero_stage=stage, waves=waves)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("layout", RAGGED)
def test_workers_that_store_unequal_parts(layout, stage):
    waves = 2 if stage > 1 else 1
    assert_parity("gpt2", RAGGED[layout], zero_stage=stage, waves=waves)


WAYS = {
    "1f1b": (LAYOUTS["1 + 2"], {"zero_stage": 1}),
    "zero-bubble": (
        rows([6], [2, 4], mode=KEPT, state=[[1], [3, 1]]),
        {"zero_stage": 1, "schedule": "zero-bubble"},
    ),
    "waves": (
        rows([4, 2], [6], micro_batch=1, state=[[1, 2], [1]]),
        {"zero_stage": 3, "schedule": "eager-1f1b", "waves": 3},
    ),
}


@pytest.fixture(scope="module")
def by_architecture():
    plans = {
        (name, way): (name, staged_plan(name, layout, **settings))
        for name in ARCHITECTURES
        for way, (layout, settings) in WAYS.items()
    }
    return train_in_turn(plans, STEPS)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name, way, by_architecture):
    losses, found = by_architecture[name, way]
    assert worst_error(found, train_alone(EVERY[name], 6, STEPS)) < TOLERANCE
    assert all(seen == losses[0] for seen in losses)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_weights_that_units_of_different_stages_share(stage):
    assert_parity("tied_blocks", LAYOUTS["1 + 2 + 1"], zero_stage=stage)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_units_that_a_stage_calls_again(stage):
    assert_parity("called_again", LAYOUTS["1 + 2"], cuts=[4], zero_stage=stage)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
@pytest.mark.parametrize(
    "layout, settings",
    [
        (rows([6], [2, 4], mode=KEPT), {"zero_stage": 1, "schedule": "zero-bubble"}),
        (rows([6], [6], tensor=[2, 1]), {"zero_stage": 3, "waves": 2}),
    ],
    ids=["stages", "a team, then one"],
)
def test_messages_through_memory_of_the_host(name, layout, settings):
    """As several ranks on one GPU send them (`tests/engine/test_on_gpus.py`)."""
    assert_parity(name, layout, staged_on="cpu", **settings)


@pytest.mark.parametrize("stage", [0, 3])
def test_code_between_units_that_goes_by_values_of_another_stage(stage):
    assert_parity("looks_back", LAYOUTS["1 + 2 + 1"], zero_stage=stage)


def assert_parity(name: str, layout: list[Row], *, staged_on: str = "", **settings):
    plan = staged_plan(name, layout, **settings)
    expected = train_alone(EVERY[name], plan.global_batch, STEPS)
    losses, found = train_in_stages(name, plan, STEPS, staged_on=staged_on)
    assert worst_error(found, expected) < TOLERANCE
    assert all(seen == losses[0] for seen in losses)


@pytest.mark.parametrize("layout", ["1 + 1", "two teams", "a team, then two"])
def test_other_samples_for_the_same_part_are_refused(layout):
    """As a loop gives them that takes ranks for parts of the batch."""
    plan = staged_plan("gpt2", ALL[layout], zero_stage=1)
    with pytest.raises(InputError, match="were given different ones"):
        run_ranks(_other_samples, len(plan.workers), plan.model_dump_json())


def _other_samples(plan_json: str) -> None:
    plan = Plan.model_validate_json(plan_json)
    engine = staged_engine("gpt2", plan)
    samples = sum(worker.samples for worker in plan.workers)
    (batch,) = batches(GPT2, samples, 1)
    begin = sum(worker.samples for worker in plan.workers[: engine.comm.rank])
    own = slice(begin, begin + plan.workers[engine.comm.rank].samples)
    engine.step({key: value[own] for key, value in batch.items()})


# -- beside steps ----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["1 + 2", *TEAMS])
@pytest.mark.parametrize("stage", [1, 3])
def test_all_ranks_get_all_of_the_state(layout, stage):
    plan = staged_plan("gpt2", ALL[layout], zero_stage=stage)
    found = run_ranks(_state_there_and_back, len(plan.workers), plan.model_dump_json())
    model = initialised(GPT2.factory)
    expected = {name: value.numpy() for name, value in model.state_dict().items()}
    for of_rank, norm, clipped in found:
        assert of_rank.keys() == expected.keys()
        for name, value in of_rank.items():
            assert np.array_equal(value, expected[name]), name
        assert norm == pytest.approx(_norm_alone(plan.global_batch), rel=1e-5)
        assert clipped == pytest.approx(0.5 * norm, rel=1e-5)


def _state_there_and_back(plan_json: str) -> tuple[dict[str, np.ndarray], float, float]:
    plan = Plan.model_validate_json(plan_json)
    engine = staged_engine("gpt2", plan)
    state = engine.state_dict()
    for parameter in engine.parameters():
        parameter.data.zero_()
    engine.load_state_dict(state)
    (batch,) = batches(GPT2, plan.global_batch, 1)
    engine.step(own_samples(plan, engine.comm.rank, batch))
    norm = engine.gradient_norm().item()
    engine.clip_grad_norm_(0.5 * norm)
    again = {name: value.numpy() for name, value in engine.state_dict().items()}
    return again, norm, engine.gradient_norm().item()


def _norm_alone(samples: int) -> float:
    model = initialised(GPT2.factory)
    (batch,) = batches(GPT2, samples, 1)
    mean_loss(model, batch).backward()
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("layout", ["2 + 2, crossing", "two teams", "a team, then two"])
def test_evaluation(stage, layout):
    """Also on a batch that is smaller than that of a step."""
    plan = staged_plan("gpt2", ALL[layout], zero_stage=stage)
    found = run_ranks(_evaluate, len(plan.workers), plan.model_dump_json(), SIZES)
    model = initialised(GPT2.factory).eval()
    expected = {n: mean_loss(model, *batches(GPT2, n, 1)).item() for n in SIZES}
    assert all(of_rank == pytest.approx(expected, rel=1e-5) for of_rank in found)


def _evaluate(plan_json: str, sizes: list[int]) -> dict[int, float]:
    plan = Plan.model_validate_json(plan_json)
    engine = staged_engine("gpt2", plan)
    (whole,) = batches(GPT2, plan.global_batch, 1)
    engine.evaluate(own_samples(plan, engine.comm.rank, whole))  # so some shapes are known, not all
    found = {}
    for samples in sizes:
        (batch,) = batches(GPT2, samples, 1)
        rows = share_of(plan, engine.comm.rank).rows(samples)
        own = [n for of_one in rows for n in of_one]
        found[samples] = engine.evaluate({k: v[own] for k, v in batch.items()}, samples).item()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("layout", ["1 + 2", *TEAMS])
def test_gradients_of_several_steps_add_up(stage, layout):
    """As autograd's do, and whatever the losses of each step are counted with."""
    plan = staged_plan("gpt2", ALL[layout], zero_stage=stage)
    found = run_ranks(_two_steps, len(plan.workers), plan.model_dump_json())
    model = initialised(GPT2.factory)
    for batch in batches(GPT2, plan.global_batch, 2):
        mean_loss(model, batch).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    assert found == pytest.approx([expected] * len(plan.workers), rel=1e-5)


def _two_steps(plan_json: str) -> float:
    plan = Plan.model_validate_json(plan_json)
    engine = staged_engine("gpt2", plan)
    for batch in batches(GPT2, plan.global_batch, 2):
        engine.step(own_samples(plan, engine.comm.rank, batch))
    return engine.gradient_norm().item()


@pytest.mark.parametrize("layout", ["1 + 1", "two teams"])
def test_optimizers_of_whole_matrices_are_refused(layout):
    plan = staged_plan("gpt2", ALL[layout])
    with pytest.raises(InputError, match="do not run with several stages"):
        run_ranks(_layout, len(plan.workers), plan.model_dump_json())


def _layout(plan_json: str) -> None:
    staged_engine("gpt2", Plan.model_validate_json(plan_json)).layout()


PRIVATE = "torch.distributed.pipelining._backward"


def test_a_torch_that_splits_no_backward_is_told_of():
    plan = staged_plan("gpt2", rows([6], [6], mode=KEPT), schedule="zero-bubble", zero_stage=1)
    with pytest.raises(MachineError, match="backward passes cannot be split here") as caught:
        run_ranks(_without_split, len(plan.workers), plan.model_dump_json())
    assert "cannot import name" in caught.value.why
    assert "1f1b" in caught.value.fix


def _without_split(plan_json: str) -> None:
    sys.modules[PRIVATE] = ModuleType(PRIVATE)
    staged_engine("gpt2", Plan.model_validate_json(plan_json))


@pytest.mark.parametrize("layout", ["1 + 1", "two teams"])
def test_no_two_ranks_replay_a_batch(layout):
    plan = staged_plan("gpt2", ALL[layout])
    with pytest.raises(InputError, match="only plans of one stage"):
        run_ranks(_replay, len(plan.workers), plan.model_dump_json())


def _replay(plan_json: str) -> None:
    engine = staged_engine("gpt2", Plan.model_validate_json(plan_json))
    engine.replay(None, lambda bucket, gradients: None)


def test_a_rank_holds_weights_of_its_own_stages_only():
    plan = staged_plan("gpt2", rows([6], [6], [6]), zero_stage=0)
    held = run_ranks(_held, 3, plan.model_dump_json())
    sizes = {name: 4 * p.numel() for name, p in GPT2.factory().named_parameters()}
    for stage, (found, without_values) in zip(plan.stages, held):
        units = [n for n in sizes if any(n.startswith(f"{unit}.") for unit in stage.units)]
        own = {*units, *stage.root}
        assert found == sum(sizes[name] for name in own)
        assert without_values == sizes.keys() - own


def test_nothing_is_left_of_a_model_that_had_its_values():
    plan = staged_plan("gpt2", rows([6], [6]), zero_stage=0)
    assert run_ranks(_outlived, 2, plan.model_dump_json()) == [[], []]


def _outlived(plan_json: str) -> list[str]:
    """Names of parameters of the model that are there after it was cut into stages."""
    model = GPT2.factory()
    before = {name: weakref.ref(p) for name, p in model.named_parameters()}
    engine = prepare(model, Plan.model_validate_json(plan_json))
    gc.collect()
    assert engine.plan.stages
    return [name for name, parameter in before.items() if parameter() is not None]


def _held(plan_json: str) -> tuple[int, set[str]]:
    """Bytes of parameters, and the names of those that have a shape only."""
    engine = staged_engine("gpt2", Plan.model_validate_json(plan_json))
    parameters = engine.model.named_parameters()
    without_values = {name for name, p in parameters if isinstance(p, FakeTensor)}
    return sum(group.full.nbytes for group in engine.groups()), without_values
