"""What one rank's model or batch does wrong is told on all ranks, at once and by its name.

The ranks are a program's own, without `gpumix train`; nobody waits for the group's timeout.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gpumix.engine.prepare import prepare
from gpumix.schema.errors import GpumixError
from gpumix.schema.plan.plan import Plan
from helpers.extended import left_out
from helpers.processes.harness import run_ranks
from helpers.training.models import WIDTH, Block, Regression, causal_lm, causal_model, vectors
from helpers.training.reference import (
    Share,
    assert_ranks_step_plainly,
    engine_for,
    own_rows,
)
from helpers.training.staging import LooksBack, own_samples, rows, staged_plan

SHARES = [Share(3, 2, 1), Share(2, 1, 2)]
GROUP_TIMEOUT_S = 300.0  # far longer than the tests may take


class Ordered(Regression):
    """Calls its blocks in another order on the second rank, from step `after` on."""

    after = 0

    def __init__(self, orders=((0, 1, 2), (0, 2, 1))):
        super().__init__([Block() for _ in range(3)])
        self.orders = orders
        self.steps = 0

    def forward(self, x, target):
        x = self.enter(x)
        for number in self.orders[dist.get_rank() if self.steps >= self.after else 0]:
            x = self.blocks[number](x)
        return self.error(x, target)


class WritesOnSecond(Regression):
    def __init__(self):
        super().__init__([Writes(), Writes()])


class Writes(Block):
    def forward(self, x):
        y = super().forward(x)
        if dist.get_rank() == 1:
            x += y
        return y


class FailsInBackward(Block):
    """An error of the model's own code, in the middle of the backward pass."""

    def forward(self, x):
        y = super().forward(x)
        if dist.get_rank() == 1:
            y.register_hook(_fail)
        return y


def _fail(gradient):
    raise ZeroDivisionError("no good")


def _accounts(factory, steps=1, samples=5):
    engine = engine_for(factory, SHARES)
    mine = own_rows(vectors(samples, torch.Generator().manual_seed(0)), SHARES, dist.get_rank())
    for step in range(steps):
        engine.model.steps = step
        try:
            engine.step(mine)
        except (GpumixError, ZeroDivisionError) as error:
            return step, type(error).__name__, str(error)
    return None


def accounts(factory, steps=1):
    return run_ranks(_accounts, 2, factory, steps, timeout_s=20, group_timeout_s=GROUP_TIMEOUT_S)


class OrderedLater(Ordered):
    after = 1


class Shorter(Ordered):
    def __init__(self):
        super().__init__(((0, 1, 2), (0, 1)))


class WithoutUnits(Ordered):
    def __init__(self):
        super().__init__(((0, 1, 2), ()))


def blocks_that_fail_in_backward():
    return Regression([FailsInBackward(), FailsInBackward()])


TOLD = [
    (Ordered, 0, "ModelError", "units that are called behind 'blocks.1' were called before"),
    (OrderedLater, 1, "ModelError", "units that are called behind 'blocks.1' were called"),
    (WritesOnSecond, 0, "ModelError", "unit 'blocks.0' writes into its own input"),
    (blocks_that_fail_in_backward, 0, "ZeroDivisionError", "no good"),
]


@pytest.mark.parametrize("factory, step, kind, what", left_out(TOLD, TOLD[:3]))
def test_all_ranks_are_told(factory, step, kind, what):
    of_0, of_1 = accounts(factory, step + 1)
    assert of_1[:2] == (step, kind)
    assert what in of_1[2]
    assert kind != "ModelError" or of_1[2].startswith("rank 1: ")
    assert of_0[:2] == (step, "CommunicationError")
    assert "rank 1 failed" in of_0[2]
    assert what in of_0[2]


# -- in stages -------------------------------------------------------------------------------------


class BySamples(Regression):
    """Which block comes next its input says, which all stages have."""

    def __init__(self):
        super().__init__([Block() for _ in range(3)])

    def forward(self, x, target):
        first = (0, 1, 2) if x[0, 0, 0] > 0 else (0, 2, 1)
        x = self.enter(x)
        for number in first:
            x = self.blocks[number](x)
        return self.error(x, target)


def _staged_account(factory, plan_json, step):
    """What a rank is told when that step comes; all samples before are of one kind."""
    plan = Plan.model_validate_json(plan_json)
    engine = prepare(factory(), plan)
    batch = vectors(plan.global_batch, torch.Generator().manual_seed(0))
    for number in range(step + 1):
        engine.model.steps = number
        batch["x"][:, 0, 0] = 1.0 if number < step else -1.0
        try:
            engine.step(own_samples(plan, engine.comm.rank, batch))
        except GpumixError as error:
            return number, type(error).__name__, str(error)
    return None


def staged_accounts(factory, step=0, cut=1):
    plan = staged_plan("plain-own-blocks", rows([6], [6]), cuts=[cut])
    of_ranks = (factory, plan.model_dump_json(), step)
    return run_ranks(_staged_account, 2, *of_ranks, timeout_s=20, group_timeout_s=GROUP_TIMEOUT_S)


LATER = [
    (Ordered, 0, "unit 'blocks.1' was to be called as call 2 of 3"),
    (OrderedLater, 1, "unit 'blocks.1' was to be called as call 2 of 3"),
    (Shorter, 0, "unit 'blocks.2' was to be called as call 3 of 3"),
    (WithoutUnits, 0, "unit 'blocks.0' was to be called as call 1 of 3"),
]


@pytest.mark.parametrize("factory, step, what", left_out(LATER, [*LATER[:2], LATER[3]]))
def test_another_order_in_a_later_stage(factory, step, what):
    of_0, of_1 = staged_accounts(factory, step)
    assert of_1[:2] == (step, "ModelError") and of_1[2].startswith("rank 1: ")
    assert what in of_1[2]
    assert of_0[:2] == (step, "CommunicationError")
    assert "rank 1 failed" in of_0[2] and what in of_0[2]


@pytest.mark.extended
def test_an_order_that_depends_on_samples_in_stages():
    """All stages have these; who comes to the wrong call first tells the others."""
    for step, _, told in staged_accounts(BySamples, 1):
        assert step == 1
        assert "unit 'blocks.1' was to be called as call 2 of 3" in told


@pytest.mark.extended
def test_values_of_another_stage_that_the_plan_does_not_take():
    of_0, of_1 = staged_accounts(LooksBack, cut=2)
    assert of_1[:2] == (0, "ModelError")
    assert "looks at values that another stage has" in of_1[2]
    assert "after unit 'blocks.1'" in of_1[2]
    assert "rank 1 failed" in of_0[2]


def _given_too_little():
    """Rank 1 gets a batch of another size than its part of the plan."""
    engine = engine_for(lambda: Regression([Block(), Block()]), SHARES)
    rank = dist.get_rank()
    try:
        engine.step(vectors(3, torch.Generator().manual_seed(0)))
    except GpumixError as error:
        return rank, str(error)
    return None


def test_a_batch_that_does_not_fit_on_one_rank():
    of_0, of_1 = run_ranks(_given_too_little, 2, timeout_s=20, group_timeout_s=GROUP_TIMEOUT_S)
    for _, told in (of_0, of_1):
        assert "rank 1 was given 3 samples, the plan gives it 2" in told


# -- experts without tokens ------------------------------------------------------------------------


class Experts(nn.Module):
    """Sends a sample to the expert that its first value names, and computes no expert in vain."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x, expert):
        y = torch.zeros_like(x)
        for number, module in enumerate(self.experts):
            chosen = (expert == number).nonzero()[:, 0]
            if len(chosen):
                y = y.index_add(0, chosen, module(self.norm(x[chosen])))
        return x + y


class Routed(Regression):
    def __init__(self):
        super().__init__([Experts(), Experts()])

    def forward(self, x, target, expert):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, expert)
        return self.error(x, target)


def routed(experts):
    batch = vectors(len(experts), torch.Generator().manual_seed(0))
    return batch | {"expert": torch.tensor(experts)}


EXPERTS = [[0, 0, 0, 1, 1], [0, 1, 0, 0, 1], [1, 1, 1, 1, 1]]


@pytest.mark.parametrize(
    "experts",
    left_out(EXPERTS, EXPERTS[1:]),
    ids=["of one rank", "of one micro-batch", "of nobody"],
)
def test_experts_that_see_no_tokens(experts):
    """The third one sees none at all: its gradient is zero."""
    assert_ranks_step_plainly(Routed, SHARES, routed(experts))


def mixtral():
    return causal_model(
        "MixtralConfig",
        num_key_value_heads=2,
        num_local_experts=16,
        num_experts_per_tok=1,
        intermediate_size=48,
    )()


@pytest.mark.extended
def test_more_experts_than_a_sample_reaches():
    """In transformers' own mixture; with a mean over all, as its own loss of one process."""
    batch = causal_lm(5, torch.Generator().manual_seed(0))
    assert_ranks_step_plainly(mixtral, SHARES, batch)
