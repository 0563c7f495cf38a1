"""AdamW in 8 bits: the arithmetic, and that no plan changes a bit of it."""

from __future__ import annotations

import copy
import functools
import importlib
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gpumix
from gpumix.engine.optimizers import adamw_8bit
from gpumix.engine.optimizers.eight_bit_map import get_map, make_values
from gpumix.engine.sharding.parameter_slice import ParameterSlice
from gpumix.schema.errors import InputError
from gpumix.schema.plan.optimizer_state import count_adamw_8bit_bytes
from gpumix.schema.plan.plan import Plan
from helpers.errors import raises
from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.training.checkpoints import assert_same, checkpointer, whole
from helpers.training.checkpoints import optimizer_values as state_values
from helpers.training.eight_bit import (
    BLOCK,
    SETTINGS,
    Moment,
    batch_of,
    make,
    step_anew,
    trained_alone,
    values_of_map,
    wide,
    wide_engine,
)
from helpers.training.reference import (
    Share,
    engine_for,
    initialised,
    joined,
    own_rows,
    pieces_of,
    plan_for,
)
from helpers.training.staging import EVERY, rows, staged_engine, staged_plan
from helpers.training.whole_optimizers import gradient, update_pieces

STEPS = 5
NUMEL = 5000  # nineteen blocks and a half


# -- arithmetic ------------------------------------------------------------------------------------


def slope(numel: int, step: int) -> torch.Tensor:
    """Some blocks are far larger than others, some elements are zero."""
    generator = torch.Generator().manual_seed(step)
    scale = 10.0 ** torch.randint(-6, 2, (-(-numel // 64),), generator=generator)
    found = torch.randn(numel, generator=generator) * scale.repeat_interleave(64)[:numel]
    return torch.where(torch.rand(numel, generator=generator) < 0.02, 0.0, found)


def test_the_map_is_that_of_the_paper():
    for signed in (True, False):
        np.testing.assert_allclose(make_values(signed=signed), values_of_map(signed), rtol=1e-5)


@pytest.mark.parametrize("signed", [True, False])
def test_the_nearest_value_is_found(signed):
    """Also in the middle between two, of the numbers beside it, and of the largest and smallest."""
    found = get_map(signed, torch.device("cpu"))
    middles = (found.values[:-1] + found.values[1:]) / 2
    numbers = [found.values, middles, torch.linspace(-1, 1, 10_001), torch.tensor([0.0, -0.0])]
    for value in (middles, found.values):
        numbers += [value.nextafter(torch.tensor(end)) for end in (2.0, -2.0)]
    numbers.append(10.0 ** torch.linspace(-40, 0, 10_001) * (1 if not signed else -1))
    every = torch.cat(numbers).clamp(-1, 1)
    assert torch.equal(found.find_nearest(every).int(), torch.bucketize(every, middles).int())


def test_steps_are_those_of_the_same_written_anew():
    p = nn.Parameter(torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)))
    optimizer, expected = make([p]), p.detach().numpy().astype(float)
    moments = [Moment(NUMEL, signed) for signed in (True, False)]
    for step in range(1, 9):
        p.grad = slope(NUMEL, step)
        expected = step_anew(expected, p.grad.numpy().astype(float), moments, step)
        optimizer.step()
        state = optimizer.state[p]
        for moment, name in zip(moments, adamw_8bit.CODES):
            codes = state[name].numpy()
            apart = np.abs(codes.astype(int) - moment.codes)
            # A value between two of the map may go to either by rounding alone.
            assert apart.max() <= 1 and (apart > 0).mean() < 2e-3
            moment.codes = codes.copy()
        for moment, name in zip(moments, adamw_8bit.MAXIMA):
            np.testing.assert_allclose(state[name].numpy(), moment.maxima, rtol=1e-5)
            moment.maxima = state[name].numpy().astype(float)
    np.testing.assert_allclose(p.detach().numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("numel", [4095, 4096, NUMEL])
def test_small_parameters_keep_state_in_fp32(numel):
    p = nn.Parameter(torch.zeros(numel))
    p.grad = slope(numel, 0)
    optimizer = make([p])
    optimizer.step()
    held = [value for value in optimizer.state[p].values() if value.dim()]
    assert sum(value.nbytes for value in held) == count_adamw_8bit_bytes(numel)
    assert (sum(value.nbytes for value in held) <= 2.1 * numel) == (numel >= 4096)


def test_small_parameters_are_updated_as_by_adamw():
    p, other = (nn.Parameter(torch.ones(100)) for _ in range(2))
    ours, torchs = make([p]), torch.optim.AdamW([other], **SETTINGS)
    for step in range(4):
        p.grad = other.grad = slope(100, step)
        ours.step()
        torchs.step()
    torch.testing.assert_close(p, other, rtol=1e-5, atol=1e-7)


def test_values_do_not_depend_on_the_place_in_a_tensor():
    """Kernels treat the ends of tensors, and parts of threads, by other instructions."""
    numel = 40 * BLOCK + 77
    whole_one = nn.Parameter(torch.randn(numel, generator=torch.Generator().manual_seed(2)))
    parts = [
        nn.Parameter(part.clone())
        for part in whole_one.detach().split([BLOCK, 7 * BLOCK, 13 * BLOCK, numel - 21 * BLOCK])
    ]
    alone, cut = make([whole_one]), make(parts, min_8bit_size=1)
    for step in range(6):
        whole_one.grad = slope(numel, step)
        begin = 0
        for part in parts:
            part.grad = whole_one.grad[begin : begin + part.numel()].clone()
            begin += part.numel()
        alone.step()
        cut.step()
    assert torch.equal(torch.cat([part.detach() for part in parts]), whole_one.detach())


def test_chunks_change_nothing(monkeypatch):
    model, _ = trained_alone(wide, 3)
    monkeypatch.setattr(adamw_8bit, "CHUNK_ON_CPU", 2 * BLOCK)
    chunked, _ = trained_alone(wide, 3)
    for a, b in zip(model.parameters(), chunked.parameters(), strict=True):
        assert torch.equal(a, b)


def test_bitsandbytes_comes_to_the_same(monkeypatch):
    """By the quantisation of its own torch code: that of its kernel for CPUs is coarser near zero,
    and does not take the nearest value there."""
    bnb = pytest.importorskip("bitsandbytes")
    ops = importlib.import_module("bitsandbytes.backends.cpu.ops")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)

    def quantise(values, code, maxima, codes, block):
        kernel = torch.ops.bitsandbytes.quantize_blockwise.default
        for into, found in zip((codes, maxima), kernel.redispatch(keys, values, code, block)):
            into.copy_(found)

    monkeypatch.setattr(ops, "_quant_blockwise_fp32_direct", quantise)
    start = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))
    p, other = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    ours, theirs = make([p]), bnb.optim.AdamW8bit([other], **SETTINGS)
    for step in range(8):
        p.grad, other.grad = slope(NUMEL, step), slope(NUMEL, step)
        ours.step()
        theirs.step()
        for name, codes in zip(adamw_8bit.CODES, ("state1", "state2")):
            found, expected = ours.state[p][name].int(), theirs.state[other][codes].int()
            assert (found != expected).float().mean() < 2e-3
            ours.state[p][name].copy_(theirs.state[other][codes])  # no difference adds up
        near = torch.isclose(p.detach(), other.detach(), rtol=1e-4, atol=1e-5)
        assert near.float().mean() > 0.998
        other.data.copy_(p.data)


def test_a_state_dict_is_loaded_to_the_bit():
    _, optimizer = trained_alone(wide, 2)
    fresh = make(p for p in initialised(wide).parameters() if p.requires_grad)
    groups = fresh.param_groups
    fresh.load_state_dict(optimizer.state_dict())
    assert fresh.param_groups is groups
    for ours, theirs in zip(fresh.state.values(), optimizer.state.values(), strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            assert value.dtype == theirs[key].dtype and torch.equal(value, theirs[key]), key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("numel", [100, NUMEL])
def test_so_is_that_of_16_bit_parameters(numel, dtype):
    made = []
    for _ in range(2):
        p = nn.Parameter(torch.ones(numel, dtype=dtype))
        made.append((p, make([p])))
    for step in range(4):
        for p, optimizer in made:
            p.grad = slope(numel, step).clamp(-1, 1).to(dtype)
            optimizer.step()
        (p, optimizer), (fresh, _) = made
        made[1] = fresh, make([fresh])
        made[1][1].load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert torch.equal(p, fresh)
        for key, value in optimizer.state[p].items():
            found = made[1][1].state[fresh][key]
            assert found.dtype == value.dtype and torch.equal(found, value), key


def test_a_state_of_another_optimizer_is_refused():
    """By torch's AdamW too, which would take bytes for numbers."""
    p = nn.Parameter(torch.ones(NUMEL))
    ours, torchs = make([p]), torch.optim.AdamW([p])
    p.grad = slope(NUMEL, 0)
    ours.step()
    torchs.step()
    saved = copy.deepcopy([ours.state_dict(), torchs.state_dict()])
    with raises(InputError, code="optimizer-state-mismatch", why="exp_avg_codes"):
        make([p]).load_state_dict(saved[1])
    with raises(InputError, code="optimizer-state-mismatch"):
        make([p]).load_state_dict(
            torch.optim.SGD([p], momentum=0.5).state_dict()
            | {"state": {0: {"momentum_buffer": p.data}}}
        )
    torchs.load_state_dict(saved[0])
    with pytest.raises(KeyError, match="exp_avg"):
        torchs.step()


# -- cuts ------------------------------------------------------------------------------------------

PLANS: dict[str, tuple[list[Share], dict[str, Any]]] = {
    "one rank": ([Share(2, 1, 1)], {}),
    "two": ([Share(1, 1, 2), Share(1, 1, 1)], {"zero_stage": 1}),
    "two replicas": ([Share(1, 1, 2), Share(1, 1, 1)], {"zero_stage": 0}),
    "three, one without state": ([Share(1, 1, 3), Share(1, 1, 0), Share(0, 0, 4)], {}),
    "three on hosts": ([Share(1, 1, 5), Share(0, 0, 2), Share(1, 1, 7)], {"on_host": [0, 2]}),
    "four": ([Share(0, 0, 1), Share(2, 1, 2), Share(0, 0, 3), Share(0, 0, 4)], {"zero_stage": 2}),
    "hosts repeat": (
        [Share(1, 1, n, host=host) for n, host in ((1, "a"), (3, "a"))]
        + [Share(0, 0, n, host=host) for n, host in ((2, "b"), (1, "b"))],
        {"sharding": "host"},
    ),
}


def _train(shares: list[Share], settings: dict[str, Any]) -> tuple[list[float], Any]:
    engine = wide_engine(shares, **settings)
    optimizer = make(engine.parameters(), lr=2e-3)
    losses = []
    for step in range(STEPS):
        batch = own_rows(batch_of(0, 2), shares, engine.comm.rank)
        early = step % 2 == 1
        losses.append(engine.step(batch, optimizer if early else None).item())
        if not early:
            optimizer.step()
        optimizer.zero_grad()
    return losses, pieces_of(engine)


@functools.cache
def trained(plan: str) -> list[Any]:
    shares, settings = PLANS[plan]
    return run_ranks(_train, len(shares), shares, settings)


@pytest.mark.parametrize("plan", left_out(PLANS, PLANS.keys() - {"three on hosts", "hosts repeat"}))
def test_any_plan_gives_the_same_bits(plan):
    """Of two micro-batches gradients are the same sums by any plan."""
    expected, found = trained("one rank"), trained(plan)
    [(losses, pieces)] = expected
    assert [one for one, _ in found] == [losses] * len(found)
    assert losses[-1] < losses[0]
    assert_same(joined([p for _, p in found]), joined([pieces]))


def test_cuts_are_between_blocks():
    shares, settings = PLANS["three on hosts"]
    places = chain.from_iterable(run_ranks(_places, 3, shares, settings))
    for name, numel, begin, end in places:
        assert begin % BLOCK == 0 or begin == numel, name
        assert end % BLOCK == 0 or end == numel, name


def _places(shares: list[Share], settings: dict[str, Any]) -> list[tuple[str, int, int, int]]:
    engine = wide_engine(shares, **settings)
    return [(p.name, p.window.numel, p.start, p.end) for p in engine.pieces()]


def test_a_plan_that_cuts_blocks_is_refused_before_training():
    shares = PLANS["two"][0]
    found = run_ranks(_refused, 2, shares)
    assert len(set(found)) == 1
    assert "AdamW8bit quantises blocks of 256 elements" in found[0]
    assert "a share ends at element" in found[0] and "`optimizer_state: 8bit`" in found[0]


def _refused(shares: list[Share]) -> str:
    engine = engine_for(wide, shares, zero_stage=2)
    optimizer = make(engine.parameters())
    before = pieces_of(engine)
    values = [v.copy() for *_, v in before]
    with pytest.raises(InputError) as caught:
        engine.check_optimizer(optimizer)
    engine.step(own_rows(batch_of(0, 2), shares, engine.comm.rank))
    with pytest.raises(InputError):
        optimizer.step()
    assert all((a == b).all() for a, (*_, b) in zip(values, pieces_of(engine)))
    return str(caught.value)


# -- states that move ------------------------------------------------------------------------------


def _save(folder: Any, shares: list[Share], settings: dict[str, Any]) -> dict[str, Any]:
    engine = wide_engine(shares, **settings)
    optimizer = make(engine.parameters())
    update_pieces(engine, optimizer, range(2))
    checkpointer(folder).save(2, engine, optimizer, cursor={})
    return state_values(engine, optimizer)


def _resume(folder: Any, shares: list[Share], settings: dict[str, Any]) -> tuple[Any, Any]:
    engine = wide_engine(shares, **settings)
    optimizer = make(engine.parameters())
    checkpointer(folder).load(engine, optimizer)
    state = state_values(engine, optimizer)
    update_pieces(engine, optimizer, range(2, STEPS))
    return state, pieces_of(engine)


@pytest.mark.parametrize("plan", left_out(["one rank", "four", "three on hosts"], ["one rank"]))
def test_any_plan_takes_up_what_another_saved(plan, tmp_path):
    shares, settings = PLANS["three, one without state"]
    saved = whole(run_ranks(_save, 3, tmp_path, shares, settings))
    shares, settings = PLANS[plan]
    results = run_ranks(_resume, len(shares), tmp_path, shares, settings)
    assert_same(whole([state for state, _ in results]), saved)
    model, _ = trained_alone(wide, STEPS)
    expected = {n: p.detach().numpy() for n, p in model.named_parameters()}
    assert_same(joined([pieces for _, pieces in results]), expected)


def test_a_checkpoint_of_other_state_is_refused(tmp_path):
    engine = wide_engine([Share(2, 1, 1)])
    optimizer = make(engine.parameters(), min_8bit_size=10_000)
    update_pieces(engine, optimizer, range(1))
    checkpointer(tmp_path).save(1, engine, optimizer, cursor={})
    with raises(InputError, code="checkpoint-damaged", why="exp_avg_codes"):
        checkpointer(tmp_path).load(engine, make(engine.parameters()))


def test_a_checkpoint_in_8_bits_for_an_optimizer_that_quantises_less(tmp_path):
    """Of a plan that need not cut between blocks, as nothing says that state is quantised."""
    engine = wide_engine([Share(2, 1, 1)])
    optimizer = make(engine.parameters())
    update_pieces(engine, optimizer, range(1))
    checkpointer(tmp_path).save(1, engine, optimizer, cursor={})
    with raises(InputError, code="checkpoint-damaged", why="exp_avg"):
        checkpointer(tmp_path).load(engine, make(engine.parameters(), min_8bit_size=10_000))


STATES = [(1, 2, 3), (3, 0, 1), (0, 1, 0), (2, 2, 1)]


def _move(states: list[tuple[int, ...]], on_host: list[int]) -> Any:
    def plan_of(state: tuple[int, ...]) -> Plan:
        shares = [Share(2 if rank == 0 else 0, 1 if rank == 0 else 0, n) for rank, n in
                  enumerate(state)]  # fmt: skip
        settings = {"zero_stage": 2, "optimizer_state": "8bit", "on_host": on_host}
        return plan_for(wide(), shares, **settings)

    shares = [Share(2, 1, states[0][0]), Share(0, 0, states[0][1]), Share(0, 0, states[0][2])]
    engine = wide_engine(shares, zero_stage=2, on_host=on_host)
    optimizer = make(engine.parameters())
    for step, state in enumerate(states):
        engine.replan(plan_of(state), optimizer)
        update_pieces(engine, optimizer, range(step, step + 1))
    return pieces_of(engine), state_values(engine, optimizer)


@pytest.mark.parametrize("on_host", left_out([[], [1]], [[]]), ids=str)
def test_state_moves_while_a_run_trains(on_host):
    results = run_ranks(_move, 3, STATES, on_host)
    model, optimizer = trained_alone(wide, len(STATES))
    expected = {n: p.detach().numpy() for n, p in model.named_parameters()}
    assert_same(joined([pieces for pieces, _ in results]), expected)
    state = whole([values for _, values in results])
    names = {id(p): n for n, p in model.named_parameters()}
    for p, values in optimizer.state.items():
        for key, value in values.items():
            found = np.asarray(state[f"{names[id(p)]}.{key}"])
            assert np.array_equal(found.reshape(-1), value.numpy().reshape(-1)), key


# -- stages and tensor-parallel groups -------------------------------------------------------------

STAGED = {
    "1 + 1": rows([6], [6]),
    "2 + 2, ragged": rows([4, 2], [2, 4], state=[[3, 1], [1, 4]]),
}


def _in_stages(plan_json: str) -> Any:
    plan = Plan.model_validate_json(plan_json)
    engine = staged_engine("gpt2", plan)
    optimizer = make(engine.parameters(), min_8bit_size=1)
    update_pieces(engine, optimizer, range(3))
    return pieces_of(engine)


@pytest.mark.parametrize("layout", left_out(STAGED, ["1 + 1"]))
@pytest.mark.parametrize("zero_stage", left_out([1, 3], [1]))
def test_stages_change_no_bit(layout, zero_stage):
    plan = staged_plan("gpt2", STAGED[layout], zero_stage=zero_stage, optimizer_state="8bit")
    found = joined(run_ranks(_in_stages, len(plan.workers), plan.model_dump_json()))
    model, _ = trained_alone(EVERY["gpt2"].factory, 3, min_8bit_size=1)
    expected = {n: p.detach().numpy() for n, p in model.named_parameters()}
    assert_same({name: found[name] for name in expected}, expected)


def test_a_tp_group_whose_parts_cut_blocks_is_refused():
    plan = staged_plan("gpt2", rows([4, 2], tensor=[2]), optimizer_state="8bit")
    found = run_ranks(_refuse_tp_group, len(plan.workers), plan.model_dump_json())
    assert all("tensor parallelism divides elements" in one for one in found)


def _refuse_tp_group(plan_json: str) -> str:
    engine = staged_engine("gpt2", Plan.model_validate_json(plan_json))
    with pytest.raises(InputError) as caught:
        engine.check_optimizer(make(engine.parameters(), min_8bit_size=1))
    return str(caught.value)


@pytest.mark.parametrize(
    ("shape", "dim", "packed"), [((768, 512), 0, 3), ((768, 1024), 1, 1), ((64, 96), 0, 1)]
)
def test_maxima_lie_in_windows_as_their_elements_do(shape, dim, packed):
    """The maxima of the blocks of all tensor-parallel parts are those of the tensor."""
    tensor = gradient("x", torch.Size(shape), 0)
    alone = ParameterSlice(torch.Size(shape)).of_blocks(BLOCK)
    expected = tensor.reshape(-1, BLOCK).abs().amax(1).view(alone.shape)
    found = torch.zeros(alone.shape)
    for part in range(2):
        window = ParameterSlice(torch.Size(shape), dim, 2, part, packed)
        maxima = window.of(tensor).reshape(-1, BLOCK).abs().amax(1)
        of_blocks = window.of_blocks(BLOCK)
        assert of_blocks.shape == alone.shape
        of_blocks.put(maxima.view(of_blocks.local_shape), found)
    assert torch.equal(found, expected)


def test_windows_of_parts_of_blocks_are_refused():
    for window in (
        ParameterSlice(torch.Size((64, 96)), 1, 2, 0),
        ParameterSlice(torch.Size((10, 96)), 0, 2, 0),
        ParameterSlice(torch.Size((4, 768)), 1, 2, 0),
    ):
        with pytest.raises(ValueError, match=r"cut blocks|cannot be divided"):
            window.of_blocks(BLOCK)


def test_other_optimizers_in_8_bits_are_refused():
    class Lion8bit(torch.optim.SGD):
        pass

    engine = wide_engine([Share(2, 1, 1)])
    engine.step(batch_of(0, 2))
    with raises(InputError, code="optimizer-not-elementwise") as caught:
        Lion8bit(engine.parameters()).step()
    assert caught.value.fix.startswith("gpumix.AdamW8bit(engine.parameters()")


def test_public_name():
    assert gpumix.AdamW8bit is adamw_8bit.AdamW8bit
