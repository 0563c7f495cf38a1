"""Rebalancing of micro-batches between the workers of a stage while a run trains. Pure.

A plan of several stages keeps its stages, state and micro-batches; workers of a stage only exchange
micro-batches. No part of the model moves, and other stages send and receive as before.
"""

from __future__ import annotations

from gpumix.cost.predict import predict
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile
from gpumix.train.elastic.device_pace import predict_pace, slowest_s, split_samples, with_samples_in
from gpumix.train.elastic.rebalancer import LEAST_GAIN_EACH

# Most trials with fewer micro-batches for workers out of memory.
MOST_TRIALS = 64


def redeal_micro_batches(profile: Profile, plan: Plan) -> Plan | None:
    """Return the predicted plan with each stage's micro-batches dealt to minimize the slowest
    worker's time; None without changes.

    Args:
        plan: predicted by `profile`, which has the present speeds of devices.
    """
    size = _compute_exchange_size(plan)
    if size is None:
        return None
    dealt = plan
    for number in range(len(plan.stages)):
        dealt = _redeal_stage(profile, dealt, number, size)
    return None if dealt is plan else dealt


def list_samples_by_stage(plan: Plan) -> list[list[int]]:
    """Return the samples of each group of each stage."""
    return [[tp_group[0].samples for tp_group in stage.tp_groups] for stage in plan.stages]


def _compute_exchange_size(plan: Plan) -> int | None:
    """Return the smallest number of samples for workers to exchange; None if none can move. All
    micro-batches have one size, and equally many of each wave move: the batch is cut as before."""
    if plan.schedule == "interleaved":  # devices would change in several stages at once
        return None
    sizes = {len(one.rows) for one in plan.stages[0].micro_batches(plan.waves)}
    if len(sizes) > 1:
        return None
    size = sizes.pop() * plan.waves
    counts = (n for of_stage in list_samples_by_stage(plan) for n in of_stage)
    return None if any(n % size for n in counts) else size


def _redeal_stage(profile: Profile, plan: Plan, number: int, size: int) -> Plan:
    """Deal the micro-batches of a stage; return the plan itself without a clear gain."""
    tp_groups, every = plan.stages[number].tp_groups, list_samples_by_stage(plan)
    now = [count // size for count in every[number]]
    paces = [predict_pace(plan, tp_group[0]).scale_samples(size) for tp_group in tp_groups]
    clearly_s = slowest_s(paces, now) * (1.0 - LEAST_GAIN_EACH)
    most = [plan.global_batch // size if count else 0 for count in now]
    for _ in range(MOST_TRIALS):
        counts = split_samples(plan.global_batch // size, paces, most)
        if counts is None or slowest_s(paces, counts) > clearly_s:
            return plan
        every[number] = [count * size for count in counts]
        dealt = with_samples_in(plan, every)
        expected = predict(profile, dealt)
        full = {w.device for w in expected.workers if w.peak_bytes > w.memory_limit_bytes}
        if not full:
            return dealt.model_copy(update={"prediction": expected})
        more = [
            n
            for n, tp_group in enumerate(tp_groups)
            if tp_group[0].device in full and counts[n] > now[n]
        ]
        if not more:
            return plan
        for n in more:
            most[n] = counts[n] - 1
    return plan
