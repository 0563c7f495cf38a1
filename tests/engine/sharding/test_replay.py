"""A batch that all ranks compute between two steps: what each makes of it, and nothing else."""

from __future__ import annotations

import pytest
import torch

from gpumix.engine.sharding import bucket as bucket_module
from gpumix.engine.sharding.bucket import SampledGradientNorm
from gpumix.engine.sharding.gradient_fingerprint import GradientFingerprints
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Mode
from gpumix.train.monitor.replay_verdict import group_comparable_ranks
from helpers.extended import chosen, left_out
from helpers.processes.harness import run_ranks
from helpers.training.models import ARCHITECTURES, gpt2, mean_loss
from helpers.training.reference import (
    Share,
    batches,
    engine_alone,
    engine_for,
    initialised,
    own_rows,
    pieces_of,
)
from helpers.training.staging import own_samples, rows, run_in_turn, staged_engine, staged_plan

GPT2 = ARCHITECTURES["gpt2"]
SHARES = [Share(3, 2, 2), Share(0, 0, 1), Share(2, 1, 1)]


def _trained(shares, zero_stage: int, replays: bool):
    engine = engine_for(gpt2(0.2), shares, zero_stage=zero_stage)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3)
    losses, prints = [], []
    rank = engine.comm.rank
    for batch in batches(GPT2, sum(s.samples for s in shares), 3):
        losses.append(engine.step(own_rows(batch, shares, rank)).item())
        optimizer.step()
        optimizer.zero_grad()
        if replays:
            one = next(batches(GPT2, 1, 1)) if shares[rank].samples else None
            seen = GradientFingerprints()
            engine.replay(one, seen.see)
            prints.append(seen.by_bucket())
    return losses, [piece[3] for piece in pieces_of(engine)], prints, engine.exchanged.own_norms


ONE, OTHER = rows([4, 4], [6, 2], micro_batch=2)
PAIRS = {
    "waves": ("llama", rows([2, 2], [1, 3], micro_batch=1), {"zero_stage": 3, "waves": 2}),
    "zero-bubble": (
        "gpt2",
        rows([4], [2, 2], mode=Mode(recompute=False)),
        {"schedule": "zero-bubble", "zero_stage": 1},
    ),
    "interleaved": ("bert", [ONE, OTHER, ONE, OTHER], {"schedule": "interleaved"}),
    "tp_groups": ("llama", rows([3, 1], tensor=[2]), {"zero_stage": 1}),
    "stages of TP groups": ("qwen3", rows([4], [2, 2], tensor=[2, 1]), {}),
    "one without samples": ("gpt2", rows([6], [4, 2, 0]), {"zero_stage": 1}),
}


def _trained_by(plan_json: str, name: str, replays: bool):
    plan = Plan.model_validate_json(plan_json)
    engine = staged_engine(name, plan)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3)
    losses, prints = [], []
    rank, architecture = engine.comm.rank, ARCHITECTURES[name]
    for batch in batches(architecture, plan.global_batch, 2):
        losses.append(engine.step(own_samples(plan, rank, batch)).item())
        optimizer.step()
        optimizer.zero_grad()
        if replays:
            computes = plan.workers[rank].samples > 0
            seen = GradientFingerprints()
            one = next(batches(architecture, 1, 1)) if computes else None
            times = engine.replay(one, seen.see)
            prints.append(seen.by_bucket(times) if computes else {})
    return losses, [piece[3] for piece in pieces_of(engine)], prints, engine.exchanged.own_norms


@pytest.fixture(scope="module")
def trained_in_stages(request):
    return run_in_turn(
        _trained_by,
        {
            (case, replays): (staged_plan(name, layout, **settings), (name, replays))
            for case, (name, layout, settings) in chosen(request, PAIRS).items()
            for replays in (False, True)
        },
    )


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize("case", PAIRS)
def test_in_stages_and_tp_groups_those_that_compute_the_same_are_alike(case, trained_in_stages):
    plain, replayed = (trained_in_stages[case, replays] for replays in (False, True))
    for mine, other in zip(replayed, plain, strict=True):
        assert mine[0] == other[0] and mine[3] == other[3]
        assert all((a == b).all() for a, b in zip(mine[1], other[1], strict=True))
    name, layout, settings = PAIRS[case]
    alike = group_comparable_ranks(staged_plan(name, layout, **settings))
    assert alike
    for ranks in alike:
        for prints in zip(*(replayed[rank][2] for rank in ranks), strict=True):
            for other in prints[1:]:
                assert list(prints[0]) == list(other) != []
                for bucket, values in other.items():
                    assert prints[0][bucket] == pytest.approx(values, rel=1e-4, abs=1e-6)


def _without_and_with_replays(zero_stage: int):
    return [_trained(SHARES, zero_stage, replays) for replays in (False, True)]


@pytest.mark.parametrize("zero_stage", left_out([1, 0, 3, 2], [1, 0, 2]))
def test_training_is_the_same_with_replays_between(zero_stage):
    plain, replayed = zip(*run_ranks(_without_and_with_replays, 3, zero_stage), strict=True)
    for mine, other in zip(replayed, plain, strict=True):
        assert mine[0] == other[0]
        assert all((a == b).all() for a, b in zip(mine[1], other[1], strict=True))
        assert mine[3] == other[3]
    # Ranks that compute make the same of it, but for the order in which they add up.
    for first, last in zip(replayed[0][2], replayed[2][2], strict=True):
        assert list(first) == list(last)
        for bucket, values in first.items():
            assert last[bucket] == pytest.approx(values, rel=1e-4, abs=1e-6)


def test_the_norm_of_one_rank_alone_is_that_of_the_gradient(monkeypatch):
    monkeypatch.setattr(bucket_module, "ROW_NUMEL", 2**30)  # all is looked at
    engine = engine_alone(GPT2.factory, 4, 2)
    batch = next(batches(GPT2, 4, 1))
    model = initialised(GPT2.factory)
    mean_loss(model, batch).backward()
    wanted = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    for _ in range(2):  # what a step told is that of the one before
        engine.step(batch)
        engine.evaluate(batch)
    (told,) = engine.exchanged.own_norms
    # Before the exact count is known the loss is divided by one that is guessed.
    guessed = engine.plan.global_batch * engine.plan.sequence_length
    counted = engine.exchanged.counts[0]
    assert told == pytest.approx(wanted * counted / guessed, rel=1e-4)


def test_norms_are_of_one_step_each():
    norm = SampledGradientNorm(torch.device("cpu"))
    norm.see("one", [torch.tensor([3.0])])
    norm.see("two", [torch.tensor([4.0])])
    assert norm.take() == 5.0
    assert norm.take() == 0.0


def test_of_large_gradients_a_part_is_looked_at():
    gradient = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    norm = SampledGradientNorm(torch.device("cpu"))
    norm.see("bucket", [gradient])
    assert norm.take().item() == pytest.approx(gradient.norm().item() / 8**0.5, rel=0.03)


def test_fingerprints_see_what_norms_do_not():
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    prints = []
    for one in (gradient, -gradient, gradient.flip(0)):
        seen = GradientFingerprints()
        seen.see("bucket", [one])
        prints.append(seen.by_bucket()["bucket"])
    assert prints[0][0] == pytest.approx(prints[1][0]) == pytest.approx(prints[2][0])
    assert prints[0] != pytest.approx(prints[1])
    assert prints[0] != pytest.approx(prints[2])
