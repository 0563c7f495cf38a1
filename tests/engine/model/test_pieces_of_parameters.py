"""What programs do with the parameters of an optimizer: as with full parameters, or refused."""

from __future__ import annotations

import copy
import io
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _default_to_fused_or_foreach

from gpumix.engine.model.piece_parameter import _is_elementwise
from gpumix.schema.errors import InputError
from gpumix.schema.plan.stage import Mode
from helpers.errors import raises
from helpers.extended import every_second, every_third
from helpers.processes.harness import run_ranks
from helpers.training.models import ARCHITECTURES
from helpers.training.reference import Share, batches, engine_for, initialised, mean_loss, own_rows

GPT2 = ARCHITECTURES["gpt2"]
STEPS = 4
UNEVEN = [Share(3, 1, 1), Share(0, 0, 0), Share(1, 1, 5)]
WHOLE = [Share(1, 1, 1), Share(3, 3, 1)]


# -- changes between a step and its update ---------------------------------------------------------


def by_engine(model):
    model.clip_grad_norm_(0.1)


def by_value(model):
    nn.utils.clip_grad_value_(model.parameters(), 0.001)


def by_name(model):
    for name, parameter in model.named_parameters():
        if "wte" in name:
            parameter.grad *= 0.1


def of_matrices(model):
    """Decays as many programs do, by dimensions."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2 and parameter.shape[-1] > 1:
                parameter.data.mul_(0.9).add_(torch.zeros_like(parameter) + 0.001)


def by_data(model):
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.9
        parameter.grad.data = parameter.grad.data * 0.5


def by_norm(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def by_each_norm(model):
    for parameter in model.parameters():
        nn.utils.clip_grad_norm_([parameter], 0.01)


def by_total(model):
    total = sum(p.grad.pow(2).sum() for p in model.parameters())
    if total > 1:
        for parameter in model.parameters():
            parameter.grad = None


def by_means(model):
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.grad.sub_(parameter.grad.mean(dim=1, keepdim=True))


def by_greatest_norm(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(min(1.0, 1.5 / parameter.norm()))


def by_rows(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[0] = 0.0


def by_noise(model):
    for parameter in model.parameters():
        parameter.grad.add_(torch.randn_like(parameter))


def if_finite(model):
    if not all(p.grad.isfinite().all() for p in model.parameters()):
        raise ValueError("a gradient is not finite")


def nothing(model):
    pass


# -- optimizers ------------------------------------------------------------------------------------


class Own(torch.optim.Optimizer):
    def __init__(self, parameters, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)

    def update(self, p, group):
        p.add_(p.grad, alpha=-group["lr"])


class Signs(Own):
    """Keeps a state, as most do."""

    def update(self, p, group):
        mean = self.state[p].setdefault("mean", torch.zeros_like(p))
        mean.lerp_(p.grad, 0.1)
        p.add_(mean.sign(), alpha=-0.01 * group["lr"])


class OfMatrices(Own):
    """Decays matrices alone."""

    def update(self, p, group):
        p.mul_(0.9 if p.dim() > 1 else 1.0).add_(p.grad, alpha=-group["lr"])


class Derived(torch.optim.AdamW):
    def __init__(self, parameters) -> None:
        super().__init__(parameters, foreach=True)

    def step(self, closure=None):
        return super().step(closure)


class Lists(Own):
    """Computes with lists of tensors, as torch's optimizers on GPUs."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            pieces = [p for p in group["params"] if p.grad is not None]
            updates = torch._foreach_mul([p.grad for p in pieces], -group["lr"])
            torch._foreach_add_(updates, torch._foreach_sign(updates), alpha=1e-3)
            torch._foreach_add_(pieces, updates)


class ListsOfNorms(Own):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            pieces = [p for p in group["params"] if p.grad is not None]
            norms = torch._foreach_norm([p.grad for p in pieces])
            for p, norm in zip(pieces, norms):
                p.add_(p.grad / (norm + 1), alpha=-group["lr"])


class ByNorms(Own):
    def update(self, p, group):
        p.add_(p.grad / (p.grad.norm() + 1), alpha=-group["lr"])


class LateByNorms(Own):
    """As an optimizer that looks at norms after a warm-up."""

    def update(self, p, group):
        state = self.state[p]
        state["step"] = state.get("step", 0) + 1
        factor = 1.0 if state["step"] < 3 else 1 / (1 + p.norm())
        p.add_(p.grad * factor, alpha=-group["lr"])


class Around(Own):
    """Its own step is that of another one."""

    def __init__(self, parameters) -> None:
        parameters = list(parameters)
        super().__init__(parameters)
        self.inner = ByNorms(parameters)

    def step(self, closure=None):
        self.inner.step()


def hooked(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def scale(optimizer, *_):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = p.grad.sign() * p.grad.abs().mean()

    optimizer.register_step_pre_hook(scale)
    return optimizer


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1.0)


# -- compared --------------------------------------------------------------------------------------


def losses_alone(change, optimizer):
    model = initialised(GPT2.factory)
    model.clip_grad_norm_ = partial(nn.utils.clip_grad_norm_, [*model.parameters()])
    chosen, losses = optimizer(model.parameters()), []
    for batch in batches(GPT2, 4, STEPS):
        chosen.zero_grad()
        loss = mean_loss(model, batch)
        loss.backward()
        change(model)
        chosen.step()
        losses.append(loss.item())
    return losses


def trained(shares, change, optimizer, **settings):
    """Losses of steps until an error, and the error."""
    engine = engine_for(GPT2.factory, shares, **settings)
    chosen, losses = optimizer(engine.parameters()), []
    for batch in batches(GPT2, 4, STEPS):
        chosen.zero_grad()
        losses.append(engine.step(own_rows(batch, shares, engine.comm.rank)).item())
        try:
            change(engine)
            chosen.step()
        except InputError as error:
            return losses, str(error)
    return losses, ""


EXACT = [
    *((change, sgd) for change in (by_engine, by_value, by_name, by_data, of_matrices)),
    *((nothing, kind) for kind in (Own, Signs, OfMatrices, Derived, Lists, torch.optim.NAdam)),
]
REFUSED = [
    *(
        (change, sgd, asked)
        for change, asked in {
            by_norm: "linalg_vector_norm",
            by_each_norm: "linalg_vector_norm",
            by_total: "sum",
            by_means: "mean",
            by_greatest_norm: "norm",
            by_rows: "__setitem__",
            by_noise: "randn_like",
            if_finite: "all",
        }.items()
    ),
    *((nothing, kind, "norm") for kind in (ByNorms, LateByNorms, Around)),
    (nothing, ListsOfNorms, "_foreach_norm"),
    (nothing, hooked, "mean"),
]


@pytest.mark.parametrize(("change", "optimizer"), EXACT)
def test_what_goes_by_elements_is_as_in_one_process(change, optimizer):
    expected = pytest.approx(losses_alone(change, optimizer), rel=1e-4)
    for losses, error in run_ranks(trained, 3, UNEVEN, change, optimizer):
        assert losses == expected, error


@pytest.mark.parametrize(("change", "optimizer", "asked"), every_second(REFUSED))
def test_what_is_not_that_of_the_parameter_is_refused_before_it_is_used(change, optimizer, asked):
    expected = losses_alone(change if change is not by_noise else nothing, optimizer)
    told = run_ranks(trained, 3, UNEVEN, change, optimizer)
    assert [losses == pytest.approx(expected[: len(losses)], rel=1e-4) for losses, _ in told] == [
        True
    ] * 3
    assert all(f"a program asked for {asked} of it" in error for _, error in told)


@pytest.mark.parametrize(
    ("change", "optimizer"),
    every_third(
        [*EXACT, *((change, kind) for change, kind, _ in REFUSED if change is not by_noise)]
    ),
)
def test_all_is_exact_where_every_rank_has_all(change, optimizer):
    expected = pytest.approx(losses_alone(change, optimizer), rel=1e-4)
    for losses, error in run_ranks(partial(trained, zero_stage=0), 2, WHOLE, change, optimizer):
        assert losses == expected, error


# -- pieces as tensors -----------------------------------------------------------------------------


def looked_at():
    engine = engine_for(GPT2.factory, WHOLE)
    engine.step(own_rows(next(batches(GPT2, 4, 1)), WHOLE, engine.comm.rank))
    first = max(engine.parameters(), key=lambda p: p.numel())
    buffer = io.BytesIO()
    torch.save({"state": first.detach() * 2}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)["state"]
    twice = copy.deepcopy(copy.deepcopy(first))
    with raises(InputError, code="parameter-piece-incomplete"):
        first.data + torch.ones(first.numel(), 1)
    return (
        {name: tuple(p.shape) for name, p in engine.named_parameters()}
        == {name: tuple(shape) for name, shape in engine.shapes().items()},
        type(loaded) is torch.Tensor and loaded.dim() == 1 and loaded.numel() == first.numel(),
        len(first.tolist()) == len(first.grad.numpy()) == first.numel(),
        copy.deepcopy(first.data * 1).numel() == first.numel(),
        "Piece" in repr(first),
        twice.tolist() == first.tolist()
        and twice.grad.tolist() == first.grad.tolist()
        and twice.data_ptr() != first.data_ptr()
        and twice.parameter_name == first.parameter_name,
        copy.deepcopy({"of": [engine]})["of"][0] is engine,
    )


def test_pieces_have_the_shapes_of_parameters_and_can_be_read_and_saved():
    assert run_ranks(looked_at, 2) == [(True,) * 7] * 2


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("mul_ add sub_ sqrt lerp_ addcdiv_ sign clamp where isfinite gt _foreach_lerp_", True),
        ("_foreach_addcmul_ _foreach_sqrt __iadd__ __neg__ relu masked_fill nan_to_num_", True),
        ("norm sum mean max min argmax sort cumsum matmul softmax any all equal", False),
        ("_foreach_norm normal_ rand_like bernoulli_ dropout __getitem__ cat roll t", False),
    ],
)
def test_operations_are_told_apart_by_torchs_own_marks(names, expected):
    assert {_is_elementwise(name) for name in names.split()} == {expected}


def test_torchs_optimizers_choose_fused_kernels_for_pieces_too():
    engine = engine_for(GPT2.factory, [Share(4, 2, 1)])
    plain = [nn.Parameter(torch.zeros(3))]
    choose = _default_to_fused_or_foreach
    assert choose([*engine.parameters()], False, True) == choose(plain, False, True)
    assert choose([*engine.parameters()], False, True)[0]


def test_a_closure_of_a_step_runs_as_outside_of_it():
    """Its steps may use chunked cross-entropy, and its clipping goes by pieces."""
    engine = engine_for(GPT2.factory, [Share(4, 2, 1, Mode(head="chunked"))])
    optimizer = sgd(engine.parameters())
    batch = next(batches(GPT2, 4, 1))

    def closure():
        optimizer.zero_grad()
        loss = engine.step(batch)
        assert {p.dim() for p in engine.parameters()} == {1, 2}
        return loss

    losses = [optimizer.step(closure).item(), optimizer.step(closure=closure).item()]
    assert losses[1] < losses[0] == pytest.approx(engine_alone_loss(batch), rel=1e-5)


def engine_alone_loss(batch):
    return mean_loss(initialised(GPT2.factory), batch).item()
