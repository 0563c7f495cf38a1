"""No rank holds more of a model than its shard, the buffers of a step and one parameter."""

from __future__ import annotations

import pytest

from gpumix.engine.model.deferred_init import build
from gpumix.engine.prepare import prepare
from gpumix.schema.plan.plan import Plan
from helpers.processes.harness import run_ranks
from helpers.training.memory import PeakBytes, storage_bytes
from helpers.training.models import VOCABULARY, Architecture, causal_lm, causal_model
from helpers.training.reference import SEED, Share, plan_for
from helpers.training.staging import EVERY, rows, staged_plan

# 12 blocks of 0.2 M parameters and embeddings of 0.4 M
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 12, "vocab_size": 3200}


FACTORY = causal_model("LlamaConfig", **WIDE)
EVERY["llama-wide"] = Architecture("llama-wide", FACTORY, causal_lm)


def _peak_of_preparing(shares):
    with PeakBytes() as tracker:
        model = build(FACTORY, SEED)
        engine = prepare(model, plan_for(model, shares))
    return _peak(tracker, engine)


def _peak_in_stages(plan_json, weights):
    with PeakBytes() as tracker:
        plan = Plan.model_validate_json(plan_json)
        engine = prepare(build(FACTORY, SEED), plan, weights=weights)
    return _peak(tracker, engine)


def _peak(tracker, engine):
    state = sum(2 * shard.master.nbytes for shard in engine.trained_shards())
    pooled = [memory for pool in engine.comm._pools.values() for memory in pool]
    flat = [t for g in engine.groups() for t in (g.full, g.gradient)]
    buffers = storage_bytes([*flat, *pooled])
    shapes, groups = engine.shapes(), engine.groups()
    own = {name for group in groups for _, name in group.names_by_parameter()}
    parameter = max(4 * shapes[name].numel() for name in own)
    everything = sum(4 * g.numel for g in engine.groups())
    return tracker.peak, state, buffers, parameter, everything


def test_a_rank_holds_its_shard_buffers_and_a_parameter():
    shares = [Share(1, 1, 0), Share(1, 1, 1), Share(1, 1, 9)]
    small = 4 * VOCABULARY * 2000  # norms, tables of positions, what the constructor computes with
    for peak, state, buffers, parameter, _ in run_ranks(_peak_of_preparing, 3, shares):
        assert peak < state + buffers + 2 * parameter + small


@pytest.mark.extended
def test_a_rank_without_state_never_holds_the_model():
    peaks = run_ranks(_peak_of_preparing, 2, [Share(1, 1, 0), Share(1, 1, 1)])
    peak, _, _, _, everything = peaks[0]
    assert peak < everything


@pytest.mark.extended
@pytest.mark.parametrize("from_files", [False, True], ids=["made", "read"])
def test_a_rank_of_stages_never_holds_what_others_compute(from_files, tmp_path):
    if from_files:
        FACTORY().save_pretrained(tmp_path)
    weights = tmp_path if from_files else None
    plan = staged_plan("llama-wide", rows([3], [3], [3]), zero_stage=1)
    told = run_ranks(_peak_in_stages, 3, plan.model_dump_json(), weights)
    small = 4 * VOCABULARY * 500
    for peak, state, buffers, parameter, everything in told:
        assert 2 * parameter + small < everything  # of the rank's own, as much as of another
        assert peak < state + buffers + 2 * parameter + small
