"""Adapters on a quantised base train as under stock libraries, whatever the plan; constants are
divided and counted as the weights are."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from gpumix.engine.access_between_steps import summon_full_params, unshard
from gpumix.engine.prepare import prepare
from gpumix.engine.quantised.linear_layers import make_quantised_linear
from gpumix.engine.quantised.quantised_parameter import QuantisedParameter
from gpumix.engine.quantised.weight_formats import (
    iterate_quantised_parameters,
    to_quantised_parameter,
)
from gpumix.engine.rehearsal import observations
from gpumix.engine.sharding.absent_parameter import AbsentParameter
from gpumix.engine.sharding.unit_discovery import count_frozen_bytes, split_into_units
from gpumix.integrations.common.plan_and_shard import without_weights
from gpumix.schema.errors import InputError
from gpumix.schema.plan.plan import Plan
from gpumix.testing.plans import Share
from helpers.errors import raises
from helpers.processes.harness import run_ranks
from helpers.training import quantised as q
from helpers.training.reference import worst_error

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

TOLERANCE = 1e-4
BASES = tuple(q.CONFIGS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return q.save_base(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("base", BASES)
def test_one_rank_trains_as_stock(folder, base, dora):
    plan = q.plan_of(q.load_adapted(folder, base, dora=dora), q.SHARES[1])
    found = q.merged([q.train_rank(folder, base, plan, dora=dora)])
    assert worst_error(found, q.train_stock(folder, base, dora=dora)) < TOLERANCE


@pytest.mark.parametrize("settings", [{"zero_stage": 3}, {"zero_stage": 1}, {"zero_stage": 0}])
@pytest.mark.parametrize("base", BASES)
def test_unlike_ranks_train_as_stock(folder, base, settings):
    plan = q.plan_of(q.load_adapted(folder, base), q.SHARES[3], **settings)
    found = q.merged(run_ranks(q.train_rank, 3, folder, base, plan))
    assert worst_error(found, q.train_stock(folder, base)) < TOLERANCE


@pytest.mark.parametrize("base", BASES)
def test_shares_that_cut_blocks_of_quantisation_train_as_stock(folder, base):
    """As a plan written by hand may: bytes are divided, and whole weights computed with."""
    model = q.load_adapted(folder, base)
    plan = q.plan_of(model, [Share(3, 3, 31), Share(3, 1, 69)], zero_stage=3)
    _, cuts = run_ranks(_cut, 2, folder, base, plan)
    assert any(begin % 32 for begin in cuts), "of the bytes of 64 weights"
    found = q.merged(run_ranks(q.train_rank, 2, folder, base, plan))
    assert worst_error(found, q.train_stock(folder, base)) < TOLERANCE


def _cut(folder: Path, base: str, plan: str) -> list[int]:
    """Where this rank's parts of quantised parameters begin."""
    engine, _ = q.engine_for(folder, base, Plan.model_validate_json(plan))
    packed = [group for group in engine.groups() if group.full.dtype == torch.uint8]
    return [piece.start for group in packed for piece in group.pieces if piece.start]


@pytest.mark.parametrize("base", BASES)
def test_stages_train_as_stock(folder, base):
    plan = q.plan_of_stages(q.load_adapted(folder, base), [6, 6], zero_stage=1)
    found = q.merged(run_ranks(q.train_rank, 2, folder, base, plan))
    assert worst_error(found, q.train_stock(folder, base)) < TOLERANCE


def test_ranks_that_compute_in_unlike_dtypes_gather_the_same_bytes(folder):
    model = q.load_adapted(folder, "nf4-double")
    plan = q.plan_of(model, q.SHARES[2], compute_dtype=["fp32", "bf16"], zero_stage=3)
    found = q.merged(run_ranks(q.train_rank, 2, folder, "nf4-double", plan))
    assert worst_error(found, q.train_stock(folder, "nf4-double")) < 0.2


@pytest.mark.parametrize("base", BASES)
def test_constants_are_divided_and_counted(folder, base):
    model = q.load_adapted(folder, base)
    constants = sum(
        t.nbytes for _, one in iterate_quantised_parameters(model) for t in one.tensors().values()
    )
    every = q.packed_bytes(model)
    assert constants <= every < 1.02 * constants
    slots = [slot for unit in split_into_units(model).all for slot in unit.slots]
    floats = sum(
        s.parameter.numel() for s in slots if not isinstance(s.parameter, QuantisedParameter)
    )
    trained = sum(s.parameter.numel() for s in slots if s.parameter.requires_grad)
    assert count_frozen_bytes(slots, torch.float32) == every + 4 * (floats - trained)
    plan = q.plan_of(model, q.SHARES[3], zero_stage=3)
    told = run_ranks(_held, 3, folder, base, plan)
    assert sum(of_rank for of_rank, _, _ in told) == every
    assert all(of_rank == pytest.approx(every * part, abs=64 * 4) for (of_rank, _, _), part in zip(
        told, (0.25, 0.75, 0.0)
    ))  # fmt: skip
    # Nothing of a whole weight is left beside a rank's part, and the units that are gathered.
    for _, outside, gathered in told:
        assert not outside
        assert gathered < 0.8 * every


def _held(folder: Path, base: str, plan: str) -> tuple[int, int, int]:
    """Bytes of packed pieces, of packed tensors that modules hold, and of gathered buffers."""
    engine, optimizer = q.engine_for(folder, base, Plan.model_validate_json(plan))
    q.step(engine, optimizer, 0)
    gc.collect()
    groups = [group for group in engine.groups() if group.full.dtype == torch.uint8]
    own = sum(piece.local.nbytes for group in groups for piece in group.pieces)
    full = {group.full.untyped_storage()._cdata: group.full.nbytes for group in groups}
    outside = 0
    for module in engine.model.modules():
        assert getattr(module, "quant_state", None) is None
        state = getattr(module, "state", None)
        assert state is None or (state.CB is None and state.SCB is None)
        for parameter in module._parameters.values():
            if parameter is not None and not isinstance(parameter, AbsentParameter):
                outside += parameter.nbytes
    return own, outside, sum(full.values())


def test_gathers_move_four_bits_and_constants_once(folder):
    plan = q.plan_of(q.load_adapted(folder, "nf4"), q.SHARES[2], zero_stage=3)
    for bytes_per_weight, counts in run_ranks(_gathered, 2, folder, "nf4", plan):
        assert bytes_per_weight <= 0.57
        # Of each block: what is trained, norms, and quantised parameters with their constants.
        assert counts == 3


def _gathered(folder: Path, base: str, plan: str) -> tuple[float, int]:
    engine, optimizer = q.engine_for(folder, base, Plan.model_validate_json(plan))
    weights = q.weights_of(q.load_adapted(folder, base))
    sizes = [g.full.nbytes for g in engine.groups() if g.full.dtype == torch.uint8]
    q.step(engine, optimizer, 0)
    unit = next(iter(engine._parts.units.values()))
    return sum(sizes) / weights, len(unit.bucket.groups)


@pytest.mark.parametrize("zero_stage", [0, 3])
@pytest.mark.parametrize("base", BASES)
def test_a_model_is_evaluated_called_made_whole_and_unsharded(folder, base, zero_stage):
    plan = q.plan_of(q.load_adapted(folder, base), q.SHARES[2], zero_stage=zero_stage)
    alone = q.load_adapted(folder, base)
    q.lay_out_nothing(alone)
    alone.eval()
    with torch.no_grad():
        expected = alone(**q.make_batch(9)).loss.item()
    state = {name: value.clone() for name, value in alone.state_dict().items()}
    for losses, saved in run_ranks(_outside_steps, 2, folder, base, plan):
        assert losses == pytest.approx([expected] * len(losses), rel=1e-5)
        assert saved.keys() == state.keys()
        for name, value in saved.items():
            assert torch.equal(torch.from_numpy(value), state[name]), name


def _outside_steps(folder: Path, base: str, plan: str):
    engine, _ = q.engine_for(folder, base, Plan.model_validate_json(plan))
    model, batch = engine.model.eval(), q.make_batch(9)
    rows = [row for part in engine.plan.rows_of(engine.comm.rank) for row in part]
    losses = [engine.evaluate({key: value[rows] for key, value in batch.items()}).item()]
    with torch.no_grad():
        losses.append(model(**batch).loss.item())
        with summon_full_params(model):
            losses.append(model(**batch).loss.item())
            inside = model.state_dict()
        losses.append(model(**batch).loss.item())
        saved = engine.state_dict()
        assert saved.keys() == inside.keys()
        engine.load_state_dict(saved)
        losses.append(model(**batch).loss.item())
        unshard(model)
        losses.append(model(**batch).loss.item())
    return losses, {name: value.numpy() for name, value in saved.items()}


@pytest.mark.parametrize("base", BASES)
def test_a_copy_without_weights_has_the_same_units_and_no_values(folder, base):
    model = q.load_adapted(folder, base)
    empty = without_weights(model)
    assert split_into_units(empty).fingerprint() == split_into_units(model).fingerprint()
    assert all(p.is_meta for p in empty.parameters())
    for _, one in iterate_quantised_parameters(empty):
        assert all(tensor.is_meta for tensor in one.tensors().values())
    assert not any(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("base", BASES)
def test_bytes_are_those_of_bitsandbytes(folder, base):
    """A weight that is quantised when it is read has the bytes of one that was loaded quantised,
    in any pieces."""
    layer = torch.nn.Linear(96, 40)
    ours = to_quantised_parameter((made := make_quantised_linear(layer, base)).weight, made)
    form = ours.format
    mine = form.read(form.quantise(layer.weight.detach()), 0, form.nbytes)
    theirs = make_quantised_linear(layer, base).to("cpu")
    loaded = to_quantised_parameter(theirs.weight, theirs)
    assert loaded.format == form
    assert torch.equal(form.read(loaded.tensors(), 0, form.nbytes), mine)
    cuts = [0, 1, 63, 64, 1000, form.nbytes - 3, form.nbytes]
    parts = [form.read(loaded.tensors(), a, b) for a, b in pairwise(cuts)]
    assert torch.equal(torch.cat(parts), mine)
    assert torch.equal(form.dequantise(form.views(mine)), form.dequantise(loaded.tensors()))


def test_storage_in_sixteen_bits_is_not_rounded(folder):
    """`bnb_4bit_quant_storage` names a dtype whose values mean nothing."""
    model = q.load_adapted(folder, "nf4", bnb_4bit_quant_storage=torch.bfloat16)
    plan = q.plan_of(model, q.SHARES[1])
    engine = prepare(model, Plan.model_validate_json(plan))
    losses = [q.step(engine, q.optimizer_for(engine.parameters()), 0)]
    assert losses == pytest.approx(q.train_stock(folder, "nf4", steps=1).losses, rel=1e-5)


# Layers with arithmetic of their own in a plan of fp32: it is rounding, and no coupling of samples.
COARSE = {
    "bf16": ("nf4", {"bnb_4bit_compute_dtype": torch.bfloat16}),
    "fp16": ("nf4", {"bnb_4bit_compute_dtype": torch.float16}),
    "outliers": ("int8", {"llm_int8_threshold": 2.5}),
}


@pytest.mark.parametrize("case", COARSE)
def test_layers_that_compute_coarsely_train_and_evaluate_as_stock(folder, case):
    base, settings = COARSE[case]
    model, alone = (q.load_adapted(folder, base, **settings) for _ in range(2))
    engine = prepare(model, Plan.model_validate_json(q.plan_of(model, q.SHARES[1])))
    # What rehearsals take for rounding, and would else refuse as a loss that couples samples.
    known = observations.TOLERANCE["fp16" if case == "fp16" else "bf16"]
    assert observations.tolerance_of(engine) == known
    optimizer = q.optimizer_for(engine.parameters())
    found = [q.step(engine, optimizer, number) for number in range(2)]
    found.append(engine.evaluate(q.make_batch(9)).item())
    q.lay_out_nothing(alone)
    stock = q.optimizer_for(p for p in alone.parameters() if p.requires_grad)
    for number, loss in enumerate(found):
        stock.zero_grad()
        alone.train(number < 2)
        expected = alone(**q.make_batch(number if number < 2 else 9)).loss
        assert loss == pytest.approx(expected.item(), rel=2e-3)
        if number < 2:
            expected.backward()
            stock.step()


def test_weights_that_are_trained_in_eight_bits_are_refused():
    from bitsandbytes.nn import Linear8bitLt

    model = torch.nn.Sequential(Linear8bitLt(64, 64), Linear8bitLt(64, 64))
    with raises(InputError, code="quantised-weights-trained"):
        split_into_units(model)


@pytest.mark.parametrize("base", BASES)
def test_a_product_keeps_no_input_that_its_backward_does_not_need(folder, base):
    """What is in a graph's own attributes cannot be dropped and computed again."""
    model = q.load_adapted(folder, base)
    prepare(model, Plan.model_validate_json(q.plan_of(model, q.SHARES[1])))
    layer = make_quantised_linear(torch.nn.Linear(64, 64), base).to("cpu")
    x = torch.randn(5, 64, requires_grad=True)
    hidden = x + 1
    seen = weakref.ref(hidden)
    y = layer(hidden)
    del hidden
    assert seen() is None
    (gradient,) = torch.autograd.grad(y.sum(), x)
    rows = to_quantised_parameter(layer.weight, layer)
    weight = rows.format.dequantise(rows.tensors())
    assert torch.allclose(gradient, weight.sum(0).expand(5, 64), rtol=1e-2, atol=1e-3)
