"""A plan of several stages trains like one process."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from gpumix.engine.model.forward_coroutine import ModelError
from gpumix.engine.prepare import prepare
from gpumix.schema.errors import InputError, MachineError
from gpumix.schema.plan.batch_shares import get_batch_share
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import PLAIN, Mode
from helpers.errors import raises
from helpers.extended import chosen, left_out
from helpers.processes.harness import run_ranks
from helpers.training.models import ARCHITECTURES, mean_loss
from helpers.training.reference import batches, initialised
from helpers.training.staging import (
    EVERY,
    Row,
    own_samples,
    rows,
    run_in_turn,
    staged_engine,
    staged_plan,
    train_in_stages,
    train_in_turn,
    train_rank,
)
from helpers.training.turns import STEPS, assert_case, assert_same, in_turn

GPT2 = ARCHITECTURES["gpt2"]
KEPT = Mode(recompute=False)
SIZES = [6, 5, 4, 2]


def layouts(mode: Mode = PLAIN) -> dict[str, list[Row]]:
    return {
        "1 + 1": rows([6], [6], mode=mode),
        "1 + 2": rows([6], [2, 4], mode=mode),
        "1 + 2 + 1": rows([6], [4, 2], [6], mode=mode),
        "2 + 2, crossing": rows([4, 2], [2, 4], mode=mode),
        "2 of which one stores only": rows([6, 0], [2, 4], mode=mode),
    }


LAYOUTS = layouts()
RAGGED = {
    "3 + 1, crossing": rows([4, 2], [2, 4], micro_batch=1, state=[[3, 1], [1, 4]]),
    "one that stores nothing": rows([4, 2], [6], micro_batch=1, state=[[1, 0], [1]]),
    "one that stores only": rows([6], [6, 0], micro_batch=1, state=[[1], [1, 2]]),
    "two TP groups": rows([4, 2], micro_batch=1, state=[[1, 3]], tensor=[2]),
    "a TP group, then two": rows([6], [4, 2], micro_batch=1, state=[[1], [1, 3]], tensor=[2, 1]),
}
TP_GROUPS = {
    "two TP groups": rows([4, 2], tensor=[2]),
    "a TP group, then two": rows([6], [4, 2], tensor=[2, 1]),
    "one, then a TP group": rows([6], [6], tensor=[1, 2]),
}
ALL = LAYOUTS | TP_GROUPS


BY_SCHEDULE = {
    f"{name}, {schedule}": (
        "gpt2",
        layouts(mode)[name],
        {"schedule": schedule, "zero_stage": stage},
    )
    for schedule, stage, mode, names in [
        ("gpipe", 0, PLAIN, ["1 + 2", "2 + 2, crossing"]),
        ("1f1b", 1, PLAIN, LAYOUTS),
        ("eager-1f1b", 0, PLAIN, ["1 + 1", "1 + 2 + 1"]),
        ("zero-bubble", 1, KEPT, ["1 + 2 + 1", "2 + 2, crossing", "2 of which one stores only"]),
    ]
    for name in names
}
by_schedule = in_turn(BY_SCHEDULE)


# By the other schedules unlike architectures train.
FEW = {"1 + 2, gpipe"}


@pytest.mark.parametrize("case", left_out(BY_SCHEDULE, BY_SCHEDULE.keys() - FEW))
def test_layouts(case, by_schedule):
    assert_case(case, by_schedule)


def waves(mode: Mode) -> list[tuple[list[Row], int]]:
    return [
        (rows([6], [2, 4], mode=mode), 1),
        (rows([8], [8], micro_batch=1, mode=mode), 2),
        (rows([4, 4], [4, 4], mode=mode), 2),
        (rows([6, 4], [6, 4], mode=mode), 2),
    ]


IN_WAVES = {PLAIN: waves(PLAIN), KEPT: waves(KEPT)}
# Each layout at both stages, and by each schedule.
WAVES = {
    f"{schedule}, {stage}, {number}": (
        "gpt2",
        layout,
        {"schedule": schedule, "zero_stage": stage, "waves": count},
    )
    for schedule, stage, numbers in [
        ("gpipe", 2, [0, 2]),
        ("gpipe", 3, [1, 3]),
        ("1f1b", 2, [1, 3]),
        ("1f1b", 3, [0, 2]),
        ("eager-1f1b", 2, [2]),
        ("eager-1f1b", 3, [0, 1, 3]),
        ("zero-bubble", 2, [0, 1, 2, 3]),
        ("zero-bubble", 3, [0, 1, 2, 3]),
    ]
    for number in numbers
    for layout, count in [IN_WAVES[KEPT if schedule == "zero-bubble" else PLAIN][number]]
}
in_waves = in_turn(WAVES)


@pytest.mark.extended
@pytest.mark.parametrize("case", WAVES)
def test_waves(case, in_waves):
    assert_case(case, in_waves)


def twice(samples: Sequence[Sequence[int]]) -> list[Row]:
    """Stages on two ranks or pairs of ranks, of which each has two."""
    one, other = rows(*samples, micro_batch=2)
    return [one, other, one, other]


ROUND = {
    f"{layout}, {stage}, {waves}": (
        "bert",
        twice(samples),
        {"schedule": "interleaved", "zero_stage": stage, "waves": waves},
    )
    for layout, samples, settings in [
        ("1 + 1", ([8], [8]), [(0, 1), (2, 2), (3, 3)]),
        ("2 + 2", ([4, 4], [4, 4]), [(1, 1), (2, 2), (3, 1), (3, 2)]),
    ]
    for stage, waves in settings
}
AROUND = {"schedule": "interleaved", "zero_stage": 1}
ROUND |= {
    # The last stage takes what both stages of the other rank give, which are not in turn there.
    "from two stages of a rank": ("t5-deep", twice(([8], [8])), {"cuts": [4, 5, 6], **AROUND}),
    # A micro-batch is in a later wave of the first stage than of the second.
    "unlike waves": (
        "bert",
        rows([1, 4], [5], micro_batch=1) * 2,
        {"schedule": "interleaved", "zero_stage": 2, "waves": 3},
    ),
    # What they share is in another order of stages on the one rank than on the other.
    "shared crosswise": ("tied_crosswise", twice(([8], [8])), AROUND),
}
going_round = in_turn(ROUND)


FEW_ROUND = {"1 + 1, 2, 2"}


@pytest.mark.slow
@pytest.mark.parametrize("case", left_out(ROUND, ROUND.keys() - FEW_ROUND))
def test_stages_go_round(case, going_round):
    assert_case(case, going_round)


UNEQUAL = {
    f"{layout}, {stage}": (
        "gpt2",
        RAGGED[layout],
        {"zero_stage": stage, "waves": 2 if stage > 1 else 1},
    )
    for stage, layouts_at in [
        (1, ["3 + 1, crossing", "one that stores only", "a TP group, then two"]),
        (2, ["one that stores nothing", "two TP groups"]),
        (3, RAGGED),
    ]
    for layout in layouts_at
}
unequal = in_turn(UNEQUAL)


@pytest.mark.extended
@pytest.mark.parametrize("case", UNEQUAL)
def test_workers_that_store_unequal_parts(case, unequal):
    assert_case(case, unequal)


WAYS = {
    "1f1b": (LAYOUTS["1 + 2"], {"zero_stage": 1}),
    "zero-bubble": (
        rows([6], [2, 4], mode=KEPT, state=[[1], [3, 1]]),
        {"zero_stage": 1, "schedule": "zero-bubble"},
    ),
    "waves": (
        rows([2, 1], [3], micro_batch=1, state=[[1, 2], [1]]),
        {"zero_stage": 3, "schedule": "eager-1f1b", "waves": 2},
    ),
}


# Each architecture in one way, and unlike ones in all.
ARCHITECTURES_BY_WAY = [
    (name, way)
    for number, name in enumerate(ARCHITECTURES)
    for way in (WAYS if name in ("gpt2", "t5", "mixtral") else [list(WAYS)[number % len(WAYS)]])
]


@pytest.fixture(scope="module")
def by_architecture(request):
    plans = {
        (name, way): (name, staged_plan(name, WAYS[way][0], **WAYS[way][1]))
        for name, way in chosen(request, dict.fromkeys(ARCHITECTURES_BY_WAY))
    }
    return plans, train_in_turn(plans, STEPS)


FEW_ARCHITECTURES = {("gpt2", "zero-bubble"), ("t5", "waves")}


@pytest.mark.parametrize(
    "case",
    left_out(
        [(case,) for case in ARCHITECTURES_BY_WAY],
        [(case,) for case in ARCHITECTURES_BY_WAY if case not in FEW_ARCHITECTURES],
    ),
    ids=str,
)
def test_architectures(case, by_architecture):
    assert_case(case, by_architecture)


@pytest.mark.extended
def test_stages_of_several_units_go_round_three():
    """A decoder whose head, at one end of the row, is tied to what is at the other."""
    layout = 2 * rows([6], [6], [6])
    plan = staged_plan("gpt2-deep", layout, cuts=[1, 3, 4, 5, 7], **AROUND)
    assert_same("gpt2-deep", plan, *train_in_stages("gpt2-deep", plan, STEPS))


def of_two(*modes: Mode) -> Row:
    """Workers of one stage that do not the same."""
    row = LAYOUTS["2 + 2, crossing"][0]
    return row._replace(
        shares=tuple(share._replace(mode=mode) for share, mode in zip(row.shares, modes))
    )


ODD = {
    **{
        f"one keeps its graphs, {stage}": (
            "gpt2",
            [LAYOUTS["1 + 2"][0], layouts(KEPT)["1 + 2"][1]],
            {"schedule": "zero-bubble", "zero_stage": stage},
        )
        for stage in [0, 1, 2, 3]
    },
    # Where they reduce together, neither of both splits.
    **{
        f"one of two in a stage keeps its graphs, {stage}": (
            "gpt2",
            [of_two(KEPT, PLAIN), layouts(KEPT)["2 + 2, crossing"][1]],
            {"schedule": "zero-bubble", "zero_stage": stage},
        )
        for stage in [0, 1, 2, 3]
    },
    **{
        f"weights of units that share them come later, {stage}": (
            "tied_blocks",
            layouts(KEPT)["1 + 2 + 1"],
            {"schedule": "zero-bubble", "zero_stage": stage},
        )
        for stage in [0, 1, 2, 3]
    },
    **{
        f"weights of units that are called again come later, {stage}": (
            "called_again",
            layouts(KEPT)["1 + 2"],
            {"cuts": [4], "schedule": "zero-bubble", "zero_stage": stage},
        )
        for stage in [1, 2, 3]
    },
    # T5's first block returns its position bias, which depends on weights alone.
    "weights come later that no input comes before": (
        "t5",
        rows([6], [6], mode=KEPT),
        {"schedule": "zero-bubble", "zero_stage": 3},
    ),
    **{
        f"units of different stages share weights, {stage}": (
            "tied_blocks",
            LAYOUTS["1 + 2 + 1"],
            {"zero_stage": stage},
        )
        for stage in [0, 1, 3]
    },
    **{
        f"a stage calls units again, {stage}": (
            "called_again",
            LAYOUTS["1 + 2"],
            {"cuts": [4], "zero_stage": stage},
        )
        for stage in [0, 1, 3]
    },
    **{
        f"a stage takes what several calls return, not in their order, {stage}": (
            "u_shape",
            LAYOUTS["1 + 2"],
            {"cuts": [3], "zero_stage": stage},
        )
        for stage in [1, 3]
    },
    **{
        f"a stage has no gradients to wait for, {schedule}, {stage}": (
            "starts_without_gradients",
            layouts(KEPT)["1 + 2"],
            {"zero_stage": stage, "schedule": schedule},
        )
        for schedule in ["1f1b", "zero-bubble"]
        for stage in [1, 3]
    },
    **{
        f"a stage trains nothing, {stage}": (
            "frozen_bottom",
            LAYOUTS["1 + 2 + 1"],
            {"cuts": [1, 2], "zero_stage": stage},
        )
        for stage in [0, 1, 3]
    },
    **{
        f"code between units goes by values of another stage, {stage}": (
            "looks_back",
            LAYOUTS["1 + 2 + 1"],
            {"zero_stage": stage},
        )
        for stage in [0, 3]
    },
    "code between units fills tensors in the likeness of another stage's": (
        "fills_in_the_likeness",
        LAYOUTS["1 + 1"],
        {"zero_stage": 1},
    ),
    "what a block returns goes by its number": ("by_number", LAYOUTS["1 + 1"], {"zero_stage": 1}),
    "blocks share a dict": ("shares_by_dict", LAYOUTS["1 + 2"], {"zero_stage": 2}),
    "blocks return fewer positions, or are given fewer": (
        "halves",
        LAYOUTS["1 + 1"],
        {"cuts": [4], "zero_stage": 1},
    ),
    "blocks go by values": ("looks_inside", LAYOUTS["1 + 1"], {"zero_stage": 1}),
    "a model that has one stage": ("goes_by_numbers", rows([4], micro_batch=4), {"zero_stage": 1}),
}
odd = in_turn(ODD)
FEW_ODD = {"weights of units that are called again come later, 3", "blocks share a dict"}


@pytest.mark.parametrize("case", left_out(ODD, ODD.keys() - FEW_ODD))
def test_odd_models(case, odd):
    assert_case(case, odd)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "cuts", "lacking", "lacks", "told"),
    [("t5", [1, 3], 1, (0, 1), "output 0"), ("u_shape", [3], 1, (1, 0), "loss")],
)
def test_what_has_no_values_goes_no_further(name, cuts, lacking, lacks, told):
    """By a plan one of whose stages does not take all that it needs."""
    plan = staged_plan(name, rows(*[[2]] * (len(cuts) + 1)), cuts, zero_stage=0)
    stages = list(plan.stages)
    takes = tuple(t for t in stages[lacking].takes if (t.call, t.output) != lacks)
    assert takes != stages[lacking].takes
    stages[lacking] = stages[lacking].model_copy(update={"takes": takes})
    plan = plan.model_copy(update={"stages": tuple(stages)})
    with raises(ModelError, code="remote-value-not-taken", what=told):
        run_ranks(train_rank, len(plan.workers), plan.model_dump_json(), name, 1)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "layout", "settings"),
    [
        ("t5", rows([6], [2, 4], mode=KEPT), {"zero_stage": 1, "schedule": "zero-bubble"}),
        ("gpt2", rows([6], [6], tensor=[2, 1]), {"zero_stage": 3, "waves": 2}),
    ],
    ids=["stages", "a TP group, then one"],
)
def test_messages_through_memory_of_the_host(name, layout, settings):
    """As several ranks on one GPU send them (`tests/engine/test_on_gpus.py`)."""
    plan = staged_plan(name, layout, **settings)
    assert_same(name, plan, *train_in_stages(name, plan, STEPS, staged_on="cpu"))


@pytest.mark.parametrize(
    "layout",
    left_out(
        ["1 + 1", "two TP groups", "a TP group, then two"],
        ["two TP groups", "a TP group, then two"],
    ),
)
def test_other_samples_for_the_same_part_are_refused(layout):
    """As a loop gives them that takes ranks for parts of the batch."""
    plan = staged_plan("gpt2", ALL[layout], zero_stage=1)
    with raises(InputError, code="samples-differ-in-group"):
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


Cases = Sequence[tuple[str, int]]  # layouts and ZeRO stages


def of_each(function: Callable[..., Any], cases: Cases, *more):
    """A fixture: plans, and what a function of them comes to on each of their ranks."""

    @pytest.fixture(scope="module")
    def found(request):
        plans = {
            (layout, stage): staged_plan("gpt2", ALL[layout], zero_stage=stage)
            for layout, stage in chosen(request, dict.fromkeys(cases))
        }
        return plans, run_in_turn(function, {key: (plan, more) for key, plan in plans.items()})

    return found


WITH_STATE: Cases = [
    ("1 + 2", 1),
    ("1 + 2", 3),
    ("two TP groups", 3),
    ("a TP group, then two", 1),
    ("one, then a TP group", 3),
]


@pytest.mark.parametrize(
    "case",
    left_out([(case,) for case in WITH_STATE], [(case,) for case in WITH_STATE[1:]]),
    ids=str,
)
def test_all_ranks_get_all_of_the_state(case, states):
    plans, found = states
    plan = plans[case]
    model = initialised(GPT2.factory)
    expected = {name: value.numpy() for name, value in model.state_dict().items()}
    for of_rank, norm, clipped in found[case]:
        assert of_rank.keys() == expected.keys()
        for name, value in of_rank.items():
            assert np.array_equal(value, expected[name]), name
        assert norm == pytest.approx(_norm_alone(plan.global_batch), rel=1e-5)
        assert clipped == pytest.approx(0.5 * norm, rel=1e-5)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "more"),
    [("tied_crosswise", {}), ("gpt2-deep", {"zero_stage": 3, "waves": 2})],
)
def test_all_ranks_get_the_state_of_stages_that_go_round(name, more):
    """Also of weights that stages share, whose gradients count once in the norm."""
    plan = staged_plan(name, twice(([8], [8])), **AROUND | more)
    model = initialised(EVERY[name].factory)
    expected = _norm_alone(plan.global_batch, name)
    for of_rank, norm, clipped in run_ranks(_state_there_and_back, 2, plan.model_dump_json(), name):
        assert all(np.array_equal(of_rank[n], p.detach()) for n, p in model.named_parameters())
        assert norm == pytest.approx(expected, rel=1e-5)
        assert clipped == pytest.approx(0.5 * norm, rel=1e-5)


def _state_there_and_back(
    plan_json: str, name: str = "gpt2"
) -> tuple[dict[str, np.ndarray], float, float]:
    plan = Plan.model_validate_json(plan_json)
    engine = staged_engine(name, plan)
    state = engine.state_dict()
    for parameter in engine.parameters():
        parameter.data.zero_()
    engine.load_state_dict(state)
    (batch,) = batches(EVERY[name], plan.global_batch, 1)
    engine.step(own_samples(plan, engine.comm.rank, batch))
    norm = engine.gradient_norm().item()
    engine.clip_grad_norm_(0.5 * norm)
    again = {name: value.numpy() for name, value in engine.state_dict().items()}
    return again, norm, engine.gradient_norm().item()


states = of_each(_state_there_and_back, WITH_STATE)


def _norm_alone(samples: int, name: str = "gpt2") -> float:
    model = initialised(EVERY[name].factory)
    (batch,) = batches(EVERY[name], samples, 1)
    mean_loss(model, batch).backward()
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()


EVALUATED: Cases = [
    ("2 + 2, crossing", 1),
    ("2 + 2, crossing", 3),
    ("two TP groups", 1),
    ("a TP group, then two", 3),
]


@pytest.mark.parametrize(
    "case",
    left_out([(case,) for case in EVALUATED], [(case,) for case in EVALUATED[1:]]),
    ids=str,
)
def test_evaluation(case, evaluated):
    """Also on a batch that is smaller than that of a step."""
    _, found = evaluated
    model = initialised(GPT2.factory).eval()
    expected = {n: mean_loss(model, *batches(GPT2, n, 1)).item() for n in SIZES}
    assert all(of_rank == pytest.approx(expected, rel=1e-5) for of_rank in found[case])


def _evaluate(plan_json: str, sizes: list[int]) -> dict[int, float]:
    plan = Plan.model_validate_json(plan_json)
    engine = staged_engine("gpt2", plan)
    (whole,) = batches(GPT2, plan.global_batch, 1)
    engine.evaluate(own_samples(plan, engine.comm.rank, whole))  # so some shapes are known, not all
    found = {}
    for samples in sizes:
        (batch,) = batches(GPT2, samples, 1)
        rows = get_batch_share(plan, engine.comm.rank).rows(samples)
        own = [n for of_one in rows for n in of_one]
        found[samples] = engine.evaluate({k: v[own] for k, v in batch.items()}, samples).item()
    return found


evaluated = of_each(_evaluate, EVALUATED, SIZES)


SUMMED: Cases = [
    ("1 + 2", 0),
    ("1 + 2", 2),
    ("two TP groups", 0),
    ("two TP groups", 2),
    ("a TP group, then two", 1),
    ("one, then a TP group", 1),
]


@pytest.mark.extended
@pytest.mark.parametrize("case", SUMMED, ids=str)
def test_gradients_of_several_steps_add_up(case, summed):
    """As autograd's do, and whatever the losses of each step are counted with."""
    plans, found = summed
    plan = plans[case]
    model = initialised(GPT2.factory)
    for batch in batches(GPT2, plan.global_batch, 2):
        mean_loss(model, batch).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    assert found[case] == pytest.approx([expected] * len(plan.workers), rel=1e-5)


def _two_steps(plan_json: str) -> float:
    plan = Plan.model_validate_json(plan_json)
    engine = staged_engine("gpt2", plan)
    for batch in batches(GPT2, plan.global_batch, 2):
        engine.step(own_samples(plan, engine.comm.rank, batch))
    return engine.gradient_norm().item()


summed = of_each(_two_steps, SUMMED)


PRIVATE = "torch.distributed.pipelining._backward"


def test_a_torch_that_splits_no_backward_is_told_of():
    plan = staged_plan("gpt2", rows([6], [6], mode=KEPT), schedule="zero-bubble", zero_stage=1)
    with raises(MachineError, code="split-backward-unavailable") as caught:
        run_ranks(_without_split, len(plan.workers), plan.model_dump_json())
    assert "cannot import name" in caught.value.why
    assert "1f1b" in caught.value.fix


def _without_split(plan_json: str) -> None:
    sys.modules[PRIVATE] = ModuleType(PRIVATE)
    staged_engine("gpt2", Plan.model_validate_json(plan_json))


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
