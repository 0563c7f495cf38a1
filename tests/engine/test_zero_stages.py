"""Every ZeRO stage, order and division of the state trains like one process."""

from __future__ import annotations

import pytest

from gpumix.engine.micro_batch import MicroBatch
from gpumix.spec.stage import Mode
from models import ARCHITECTURES
from reference import (
    Share,
    batches,
    engine_alone,
    train_alone,
    train_by_plan,
    worst_error,
)

STEPS = 2
TOLERANCE = 2e-5
LAYERED, KEEPING = Mode(), Mode(recompute=False)
ONE_BY_ONE = Mode(order="sequential")
INLINE = Mode(order="sequential", recompute=False)


def assert_parity(name, shares, **settings):
    trained = train_by_plan(name, shares, STEPS, **settings)
    size = sum(share.samples for share in shares)
    assert worst_error(trained, train_alone(ARCHITECTURES[name], size, STEPS)) < TOLERANCE
    later = trained.counts[1:] if len(shares) == 1 else trained.counts
    assert all(counts == trained.expected_counts for counts in later)


@pytest.mark.parametrize(
    ("name", "stage"),
    [*(("gpt2", stage) for stage in range(4)), ("plain-own-blocks", 1), ("plain-own-blocks", 3)],
)
def test_stages_with_uneven_everything(name, stage):
    shares = [Share(3, 2, 1), Share(2, 1, 0, KEEPING), Share(0, 0, 2), Share(4, 3, 3, kept=3)]
    assert_parity(name, shares, zero_stage=stage)


@pytest.mark.parametrize(("name", "stage"), [("gpt2", 0), ("bart", 1)])
def test_orders_meet(name, stage):
    shares = [
        Share(3, 2, 1, ONE_BY_ONE),
        Share(2, 1, 0, INLINE),
        Share(0, 0, 1, INLINE),
        Share(4, 3, 2, LAYERED),
    ]
    assert_parity(name, shares, zero_stage=stage)


@pytest.mark.parametrize("mode", [ONE_BY_ONE, INLINE, KEEPING])
def test_one_rank(mode):
    assert_parity("gpt2", [Share(5, 2, 1, mode)], zero_stage=0 if "seq" in mode.order else 3)


ALIKE, UNLIKE = (1, 2, 1, 2), (1, 2, 3, 0)


@pytest.mark.parametrize(("stage", "states"), [(1, UNLIKE), (2, ALIKE), (3, ALIKE), (3, UNLIKE)])
def test_state_divided_inside_hosts(stage, states):
    shares = [Share(n + 1, 2 if n else 1, states[n], host="ab"[n // 2]) for n in range(4)]
    assert_parity("gpt2", shares, zero_stage=stage, sharding="host")


@pytest.mark.parametrize(("stage", "joined"), [(0, 2), (2, 5), (3, 2), (3, 5)])
def test_joined_units(stage, joined):
    shares = [Share(3, 2, 1), Share(2, 1, 2)]
    assert_parity("bart", shares, zero_stage=stage, stage={"joined": joined})


@pytest.mark.parametrize("stage", [0, 3])
def test_ends_of_the_root(stage):
    ends = {
        "before": ("model.embed_tokens.weight",),
        "after": ("lm_head.weight", "model.norm.weight"),
    }
    shares = [Share(3, 2, 1), Share(2, 1, 2, LAYERED if stage else INLINE)]
    assert_parity("llama", shares, zero_stage=stage, stage=ends)


@pytest.mark.parametrize("name", ["gpt2", "whisper"])
def test_inputs_kept_on_the_host(name):
    host = Mode(boundary="host")
    shares = [Share(3, 1, 1, host), Share(4, 2, 0, host, kept=3), Share(1, 1, 1)]
    assert_parity(name, shares)


def test_what_comes_back_from_the_host_is_what_backward_runs_next(monkeypatch):
    seen = {"prefetch": [], "backward": []}

    def spy(name):
        original = getattr(MicroBatch, name)

        def called(batch, number, **options):
            seen[name].append((number, id(batch)))
            return original(batch, number, **options)

        monkeypatch.setattr(MicroBatch, name, called)

    spy("prefetch")
    spy("backward")
    architecture = ARCHITECTURES["gpt2"]
    engine = engine_alone(architecture.factory, 3, 1, mode=Mode(boundary="host"))
    engine.step(next(batches(architecture, 3, 1)))
    assert len(seen["backward"]) == 3 * len(engine.plan.stages[0].units) > 3
    assert seen["prefetch"] == seen["backward"][1:]


@pytest.mark.parametrize("stage", [1, 3])
def test_collectives_through_the_host(stage):
    """What GPUs do that have no NCCL between them: here with devices that are the host itself."""
    shares = [Share(n + 1, 2 if n else 1, n, host="ab"[n // 2]) for n in range(4)]
    assert_parity("gpt2", shares, zero_stage=stage, sharding="host", staged_on="cpu")
