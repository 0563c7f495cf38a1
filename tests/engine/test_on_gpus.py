"""The engine on GPUs ends where one process on the CPU does. `pytest -m gpu tests/engine`."""

from __future__ import annotations

import time
import zlib
from itertools import product

import pytest
import torch

import cuda_device
from gpumix.engine.comm.parameter_pool import PooledVector
from gpumix.engine.comm.process_groups import make_communicator
from gpumix.engine.cross_entropy.fused_cross_entropy import compute_fused_losses
from gpumix.engine.cross_entropy.linear_cross_entropy import GradientSum
from gpumix.engine.model.equal_weights import broadcast_weights
from gpumix.engine.model.rng import preserve_all_rng
from gpumix.schema.plan.plan import Collectives
from gpumix.schema.plan.stage import Mode
from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.training.models import ARCHITECTURES
from helpers.training.reference import (
    Share,
    batches,
    engine_for,
    joined,
    own_rows,
    train_alone,
    train_by_plan,
    worst_error,
)
from helpers.training.staging import rows, staged_plan, train_in_stages
from helpers.training.whole_optimizers import assert_close, expected_after, train_rank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STEPS = 3
LAGS = ("side-late", "side-early")


@pytest.fixture(autouse=True)
def _streams_run_behind(request):
    """On the CUDA device for tests, where each test has one of two lags that never change."""
    if cuda_device.is_here():
        name = request.node.nodeid.encode()
        cuda_device.set_lag(LAGS[zlib.crc32(name) % 2])
        yield
        cuda_device.set_lag("")
    else:
        yield


TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
THREE = pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three CUDA devices")


@pytest.mark.parametrize(
    "name",
    left_out(
        ["gpt2", "llama", "mixtral", "t5", "plain-own-blocks"], ["gpt2", "llama", "mixtral", "t5"]
    ),
)
def test_one_gpu_trains_like_one_process(name):
    found = train_by_plan(name, [Share(5, 2, 1)], STEPS, backend="nccl")
    assert worst_error(found, train_alone(ARCHITECTURES[name], 5, STEPS)) < 1e-4


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_low_precision_stays_close(dtype):
    found = train_by_plan("llama", [Share(4, 2, 1)], STEPS, backend="nccl", compute_dtype=dtype)
    alone = train_alone(ARCHITECTURES["llama"], 4, STEPS)
    assert found.losses == pytest.approx(alone.losses, rel=0.03)


@pytest.mark.parametrize(
    "name, dtype",
    left_out(
        [("gemma2", "fp32"), ("t5", "fp32"), ("gpt2", "bf16")],
        [("gemma2", "fp32"), ("gpt2", "bf16")],
    ),
)
def test_a_head_in_chunks(name, dtype):
    settings = {"head": "chunked", "compute_dtype": dtype}
    found = train_by_plan(name, [Share(5, 2, 1)], STEPS, backend="nccl", **settings)
    alone = train_alone(ARCHITECTURES[name], 5, STEPS)
    assert found.losses == pytest.approx(alone.losses, rel=0.03 if dtype == "bf16" else 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_fused_loss_is_that_of_pytorch(dtype):
    rows, classes = (8, 5000) if cuda_device.is_here() else (300, 32_001)  # Triton's interpreter
    logits = (3 * torch.randn(rows, classes, device="cuda")).to(dtype)
    targets = torch.randint(classes, (rows,), device="cuda")
    factors = torch.randn(rows, device="cuda")
    leaf = logits.double().requires_grad_()
    right = torch.nn.functional.cross_entropy(leaf, targets, reduction="none")
    (right * factors).sum().backward()
    assert leaf.grad is not None
    losses = compute_fused_losses(logits, targets, factors, 0.0)
    assert torch.allclose(losses.double(), right, rtol=1e-5)
    error = (logits.double() - leaf.grad).norm() / leaf.grad.norm()
    assert error < {4: 1e-5}.get(dtype.itemsize, 1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_ends_in_an_fp32_gradient(dtype):
    """Also on a device whose library cannot do that at once, where it goes by parts."""
    gradient, hidden = (torch.randn(64, n, device="cuda").to(dtype) for n in (96, 32))
    total = GradientSum(torch.full((96, 32), torch.nan, device="cuda"), empty=True)
    for times in (1, 2):
        total.add_product(gradient, hidden)
        expected = times * (gradient.double().t() @ hidden.double())
        error = (total.tensor.double() - expected).norm() / expected.norm()
        assert error < 1e-2


MODES = {
    "kept graphs": Mode(recompute=False),
    "inputs on the host": Mode(boundary="host"),
    "one after the other": Mode(order="sequential"),
    "uncut": Mode(order="sequential", recompute=False),
}


# Each mode with the state in one of both places.
MODES_AND_PLACES = [(mode, place) for mode in MODES for place in ("device", "host")]
OTHER_PLACES = [(mode, ("host", "device")[n % 2]) for n, mode in enumerate(MODES)]


@pytest.mark.parametrize(("mode", "place"), left_out(MODES_AND_PLACES, OTHER_PLACES))
def test_modes(mode, place):
    on_host = (0,) if place == "host" else ()
    stage = 0 if MODES[mode].order == "sequential" else 3
    settings = {"zero_stage": stage, "on_host": on_host}
    found = train_by_plan("gpt2", [Share(5, 2, 1, MODES[mode])], STEPS, backend="nccl", **settings)
    assert worst_error(found, train_alone(ARCHITECTURES["gpt2"], 5, STEPS)) < 1e-4


@TWO
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stages(stage):
    shares = [Share(3, 2, 1), Share(2, 1, 2)]
    found = train_by_plan("gpt2", shares, STEPS, backend="nccl", zero_stage=stage)
    assert worst_error(found, train_alone(ARCHITECTURES["gpt2"], 5, STEPS)) < 1e-4


@pytest.mark.parametrize("stage", left_out([0, 1, 3], [1]))
def test_ranks_share_a_gpu(stage):
    shares = [Share(3, 2, 1), Share(2, 1, 2)]
    found = train_by_plan("gpt2", shares, STEPS, zero_stage=stage, staged_on="cuda:0")
    assert worst_error(found, train_alone(ARCHITECTURES["gpt2"], 5, STEPS)) < 1e-4


IN_STAGES = {
    "1f1b": (rows([6], [6]), {"zero_stage": 0}),
    "waves": (rows([6], [6]), {"zero_stage": 3, "waves": 3}),
    "zero-bubble": (
        rows([6], [6], mode=Mode(recompute=False)),
        {"zero_stage": 1, "schedule": "zero-bubble"},
    ),
    "interleaved": (rows([8], [8]) * 2, {"zero_stage": 1, "schedule": "interleaved"}),
    "a TP group": (rows([5], tensor=[2]), {"zero_stage": 1}),
    "a TP group that divides the sequence": (
        rows([5], tensor=[2], sequence=True),
        {"zero_stage": 1},
    ),
}
OF_UNLIKE_SIZES = {"one next to a TP group": (rows([4, 3], tensor=[(1, 2)]), {"zero_stage": 3})}


# Some layouts with one of both architectures; others on GPUs of their own.
SHARED = [(name, case) for case in IN_STAGES | OF_UNLIKE_SIZES for name in ("bert", "t5")]
FEW = [
    ("bert", "waves"),
    ("bert", "interleaved"),
    ("bert", "a TP group that divides the sequence"),
]


@pytest.mark.parametrize(
    ("name", "case"), left_out(SHARED, [one for one in SHARED if one not in FEW])
)
def test_ranks_of_stages_and_tp_groups_share_a_gpu(name, case):
    layout, settings = (IN_STAGES | OF_UNLIKE_SIZES)[case]
    plan = staged_plan(name, layout, **settings)
    _, found = train_in_stages(name, plan, STEPS, staged_on="cuda:0")
    expected = train_alone(ARCHITECTURES[name], plan.global_batch, STEPS)
    assert worst_error(found, expected) < 1e-4


@TWO
@pytest.mark.parametrize(
    "case",
    [
        *left_out(IN_STAGES, ["interleaved", "a TP group", "a TP group that divides the sequence"]),
        *(pytest.param(case, marks=THREE) for case in OF_UNLIKE_SIZES),
    ],
)
def test_stages_and_tp_groups_on_gpus_of_their_own(case):
    layout, settings = (IN_STAGES | OF_UNLIKE_SIZES)[case]
    plan = staged_plan("t5", layout, **settings)
    _, found = train_in_stages("t5", plan, STEPS, backend="nccl")
    expected = train_alone(ARCHITECTURES["t5"], plan.global_batch, STEPS)
    assert worst_error(found, expected) < 1e-4


FORMS = {
    "list": Collectives(gather="list", reduce="list"),
    "padded": Collectives(gather="padded", reduce="padded", padding=2.0),
    "default": Collectives(),
}
DIVIDED = {
    "alike": [(3, 2, 1), (3, 3, 1)],
    "uneven": [(4, 3, 3), (2, 1, 1)],
    "apart": [(6, 2, 0), (0, 0, 1)],
}


# Each form with one division.
FORMED = [(form, shares) for form in FORMS for shares in DIVIDED]
ONCE = [("list", "apart"), ("padded", "uneven"), ("default", "alike")]


@TWO
@pytest.mark.parametrize(
    ("forms", "shares"), left_out(FORMED, [one for one in FORMED if one not in ONCE])
)
def test_every_collective_trains_like_one_process(forms, shares):
    given = [Share(*share) for share in DIVIDED[shares]]
    settings = {"collectives": FORMS[forms]}
    found = train_by_plan("gpt2", given, STEPS, backend="nccl", **settings)
    assert worst_error(found, train_alone(ARCHITECTURES["gpt2"], 6, STEPS)) < 1e-4


@pytest.mark.parametrize("kind", ["adafactor", "muon"])
@pytest.mark.parametrize(
    "shares",
    [
        [(2, 1, 1)],
        *(pytest.param(s, marks=TWO) for s in ([(2, 1, 2), (1, 1, 1)], [(1, 1, 0), (0, 0, 1)])),
    ],
)
def test_whole_optimizers_end_where_torch_does(kind, shares):
    """Against torch's own on the CPU: bf16 rounds Muon's iteration a little differently."""
    given = [Share(*share) for share in shares]
    results = run_ranks(train_rank, len(shares), kind, "gpt2", given, backend="nccl")
    expected = expected_after(kind, ARCHITECTURES["gpt2"].factory)
    tolerance = {"adafactor": 1e-4, "muon": 3e-2}[kind]
    assert_close(joined([pieces for pieces, *_ in results]), expected, tolerance)


ON_HOST = list(product((0, 3), (False, True), ("fp32", "bf16")))
BOTH_WAYS = [(0, True, "bf16"), (3, False, "fp32")]


@pytest.mark.parametrize(
    ("stage", "early", "dtype"),
    left_out(ON_HOST, [one for one in ON_HOST if one not in BOTH_WAYS]),
)
def test_state_on_the_host(stage, early, dtype):
    """As with state on the device: it is rounded the same way."""
    (found,) = run_ranks(_losses_with_state_anywhere, 1, stage, early, dtype, backend="nccl")
    on_device, on_host = found
    assert on_host == pytest.approx(on_device, rel=1e-6)


def _losses_with_state_anywhere(stage, early, dtype):
    return [_losses_of(stage, early, on_host=place, compute_dtype=dtype) for place in ((), (0,))]


def _losses_of(stage, early, **settings):
    """Those of some steps, with an evaluation in between. Without early updates each other step
    adds to the gradients of the one before."""
    settings |= {"zero_stage": stage}
    engine = engine_for(ARCHITECTURES["llama"].factory, [Share(4, 2, 1)], **settings)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for number, batch in enumerate(batches(ARCHITECTURES["llama"], 4, 4)):
        if early:
            losses.append(engine.step(batch, optimizer))
        else:
            losses.append(engine.step(batch))
            if number % 2:
                optimizer.step()
        if early or number % 2:
            optimizer.zero_grad()
        if number == 1:
            losses.append(engine.evaluate(batch))
            with torch.no_grad():  # anybody may, between steps
                for parameter in engine.parameters():
                    parameter.data.mul_(0.99)
    return [loss.item() for loss in losses]


@pytest.mark.parametrize(
    ("early", "dtype"), left_out(list(product((False, True), ("fp32", "bf16"))), [(True, "fp32")])
)
def test_parameters_on_the_host(early, dtype):
    """As with parameters on the device, which rounds them the same way."""
    (found,) = run_ranks(_losses_with_parameters_anywhere, 1, early, dtype, backend="nccl")
    on_device, on_host = found
    assert on_host == pytest.approx(on_device, rel=1e-6)


def _losses_with_parameters_anywhere(early, dtype):
    places = ("device", "host")
    return [_losses_of(3, early, parameters_on=place, compute_dtype=dtype) for place in places]


@TWO
def test_gpus_share_parameters_on_their_host():
    shares = [Share(3, 2, 1), Share(2, 1, 2)]
    found = train_by_plan("gpt2", shares, STEPS, backend="nccl", parameters_on="host")
    assert worst_error(found, train_alone(ARCHITECTURES["gpt2"], 5, STEPS)) < 1e-4


@TWO
def test_gpus_of_two_hosts_have_parameters_on_both():
    shares = [Share(3, 2, 1, host="a"), Share(2, 1, 1, host="b")]
    settings = {"parameters_on": "host", "sharding": "host"}
    found = train_by_plan("gpt2", shares, STEPS, backend="nccl", **settings)
    assert worst_error(found, train_alone(ARCHITECTURES["gpt2"], 5, STEPS)) < 1e-4


@TWO
def test_no_rank_updates_what_another_gpu_still_copies():
    first, second = run_ranks(_logit_before_the_update, 2, backend="nccl")
    assert first == second


def _logit_before_the_update():
    """Call the model after the gradients of a step. One rank copies late."""
    shares = [Share(3, 2, 1), Share(2, 1, 2)]
    engine = engine_for(ARCHITECTURES["gpt2"].factory, shares, parameters_on="host")
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.5)
    whole = next(batches(ARCHITECTURES["gpt2"], 5, 1))
    engine.step(own_rows(whole, shares, engine.comm.rank))
    copy = PooledVector._copy

    def copy_late(vector, *args):
        time.sleep(0.1 * engine.comm.rank)
        copy(vector, *args)

    PooledVector._copy = copy_late
    logits = engine.model(whole["input_ids"].to(engine.device)).logits
    optimizer.step()
    return logits.sum().item()


def test_ranks_on_one_gpu_share_parameters_on_the_host():
    shares = [Share(3, 2, 1), Share(2, 1, 2)]
    settings = {"parameters_on": "host", "staged_on": "cuda:0"}
    found = train_by_plan("gpt2", shares, STEPS, **settings)
    assert worst_error(found, train_alone(ARCHITECTURES["gpt2"], 5, STEPS)) < 1e-4


def test_numbers_of_a_program_go_on_on_its_gpu():
    torch.cuda.manual_seed(5)
    before = torch.cuda.get_rng_state()
    with preserve_all_rng():
        torch.manual_seed(0)
        assert not torch.equal(torch.cuda.get_rng_state(), before)
    assert torch.equal(torch.cuda.get_rng_state(), before)


@TWO
def test_ranks_with_other_values_take_those_of_the_first():
    for names, value in run_ranks(_made_alike, 2, backend="nccl"):
        assert names == ["weight"]
        assert value == 0.0


def _made_alike() -> tuple[list[str], float]:
    device, rank = torch.device("cuda", torch.cuda.current_device()), torch.distributed.get_rank()
    layer = torch.nn.Linear(3, 3, device=device)
    torch.nn.init.zeros_(layer.bias)
    torch.nn.init.constant_(layer.weight, rank)
    return broadcast_weights(layer, make_communicator(device)), layer.weight.max().item()
