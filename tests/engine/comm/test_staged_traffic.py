"""What a plan of stages, or of tensor-parallel groups, says beforehand of collectives, messages and
peaks is what ranks do."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
from torch import nn

import gpumix
from gpumix.cost.predict import predict
from gpumix.cost.traffic import count_traffic
from gpumix.planner.plan import plan as make_plan
from gpumix.schema.job.search_space import Space
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Mode, Stage
from gpumix.schema.profile.profile import Profile
from helpers.extended import chosen, left_out
from helpers.training.counted_steps import BESIDE_THE_MODEL_BYTES, counted, llama, profiled
from helpers.training.reference import SEED, Share, plan_for

KEEP = Mode(recompute=False)
CHUNKED = Mode(recompute=False, head="chunked")
MOST = 4  # devices of a plan
# Of each stage its layers, and the samples, micro-batch, share and mode of each worker; then of how
# many ranks each worker is a tensor-parallel group, all or one after the other, and whether it
# divides the sequence too.
PLANS = {
    "1f1b": ([(3, [Share(6, 2, 1)]), (3, [Share(6, 2, 1)])], {"zero_stage": 0}),
    "kept": ([(4, [Share(6, 2, 1, KEEP)]), (2, [Share(6, 2, 1, KEEP)])], {"zero_stage": 0}),
    "gpipe": ([(3, [Share(6, 1, 1)]), (3, [Share(6, 1, 1)])],
              {"zero_stage": 1, "schedule": "gpipe"}),
    "uneven": ([(2, [Share(4, 1, 1), Share(2, 1, 2)]), (4, [Share(6, 1, 1)])], {"zero_stage": 1}),
    "stage 2": ([(3, [Share(4, 1, 1), Share(2, 1, 2)]), (3, [Share(4, 1, 2), Share(2, 1, 1)])],
                {"zero_stage": 2, "waves": 2}),
    "stage 3": ([(3, [Share(4, 1, 1), Share(2, 1, 2)]), (3, [Share(4, 1, 2), Share(2, 1, 1)])],
                {"zero_stage": 3, "waves": 2}),
    "zero-bubble": ([(3, [Share(6, 1, 1, KEEP)]), (3, [Share(6, 1, 1, KEEP)])],
                    {"zero_stage": 0, "schedule": "zero-bubble"}),
    "zero-bubble, one keeps": ([(3, [Share(6, 1, 1)]), (3, [Share(6, 1, 1, KEEP)])],
                               {"zero_stage": 0, "schedule": "zero-bubble"}),
    "zero-bubble, stage 2": ([(3, [Share(4, 1, 1, KEEP), Share(2, 1, 2, KEEP)]),
                              (3, [Share(4, 1, 2, KEEP), Share(2, 1, 1, KEEP)])],
                             {"zero_stage": 2, "waves": 2, "schedule": "zero-bubble"}),
    "zero-bubble, stage 3": ([(3, [Share(4, 1, 1, KEEP), Share(2, 1, 2, KEEP)]),
                              (3, [Share(4, 1, 2), Share(2, 1, 1, KEEP)])],
                             {"zero_stage": 3, "waves": 2, "schedule": "zero-bubble"}),
    "zero-bubble, one micro-batch": ([(3, [Share(6, 6, 1, KEEP)])] * 2,
                                     {"zero_stage": 0, "schedule": "zero-bubble"}),
    "one micro-batch": ([(2, [Share(6, 6, 1)])] * 3, {"zero_stage": 3}),
    "eager-1f1b": ([(2, [Share(6, 1, 1, KEEP)])] * 3, {"zero_stage": 0, "schedule": "eager-1f1b"}),
    "interleaved, kept": ([(2, [Share(6, 1, 1, KEEP)]), (1, [Share(6, 1, 1, KEEP)])] * 2,
                          {"zero_stage": 0, "schedule": "interleaved"}),
    "interleaved, in two modes": ([(1, [Share(6, 1, 1, KEEP)]), (2, [Share(6, 1, 1)]),
                                   (2, [Share(6, 1, 1)]), (1, [Share(6, 1, 1, CHUNKED)])],
                                  {"zero_stage": 0, "schedule": "interleaved"}),
    "interleaved, in waves": ([(2, [Share(4, 1, 1), Share(2, 1, 2)]),
                               (1, [Share(4, 1, 2), Share(2, 1, 1)])] * 2,
                              {"zero_stage": 3, "schedule": "interleaved", "waves": 2}),
    "a TP group": ([(6, [Share(6, 2, 1)], 2)], {"zero_stage": 0}),
    "TP groups, stage 3": ([(6, [Share(4, 2, 1), Share(2, 1, 2)], 2)], {"zero_stage": 3}),
    "a TP group, then one": ([(3, [Share(6, 2, 1)], 2), (3, [Share(6, 2, 1)], 1)],
                         {"zero_stage": 1}),
    "a TP group each": ([(2, [Share(6, 2, 1, KEEP)], 2), (4, [Share(6, 2, 1, KEEP)], 2)],
                    {"zero_stage": 0}),
    "sequence, joined": ([(6, [Share(6, 2, 1)], 2, True)], {"zero_stage": 3}),
    "sequence, kept": ([(6, [Share(6, 2, 1, KEEP)], 2, True)], {"zero_stage": 1}),
    "sequences, stage 3": ([(6, [Share(4, 2, 1), Share(2, 1, 2)], 2, True)], {"zero_stage": 3}),
    "sequence, then one": ([(3, [Share(6, 2, 1)], 2, True), (3, [Share(6, 2, 1)], 1)],
                           {"zero_stage": 1}),
    "a sequence each": ([(2, [Share(6, 2, 1, KEEP)], 2, True),
                         (4, [Share(6, 2, 1, KEEP)], 2, True)], {"zero_stage": 0}),
}  # fmt: skip
NEXT_TO_A_TP_GROUP = [Share(4, 2, 1), Share(2, 1, 2)]
UNLIKE = {
    "unlike, stage 0": ([(6, NEXT_TO_A_TP_GROUP, (1, 2))], {"zero_stage": 0}),
    "unlike, stage 1": ([(6, NEXT_TO_A_TP_GROUP, (2, 1))], {"zero_stage": 1}),
    "unlike, stage 2": ([(6, NEXT_TO_A_TP_GROUP, (1, 2))], {"zero_stage": 2}),
    "unlike, joined": ([(6, NEXT_TO_A_TP_GROUP, (1, 2))], {"zero_stage": 3}),
    "unlike, sequence": ([(6, NEXT_TO_A_TP_GROUP, (1, 2), True)], {"zero_stage": 3}),
    "unlike, then one": ([(3, [Share(4, 1, 1), Share(2, 1, 2)], (1, 2)), (3, [Share(6, 1, 1)])],
                         {"zero_stage": 3, "waves": 2}),
    "one, then unlike": ([(3, [Share(6, 1, 1)]), (3, [Share(4, 1, 1), Share(2, 1, 2)], (1, 2))],
                         {"zero_stage": 1}),
}  # fmt: skip
# What the planner is given.
PLANNED: dict[str, dict[str, Any]] = {
    "planned": {"space": Space(max_pipeline_stages=1, tensor_parallel_size=2, leave_out=False)},
    "planned in stages": {
        "strategy": "staged",
        "space": Space(
            min_pipeline_stages=2, tensor_parallel_size=1, zero_stages=0, leave_out=False
        ),
    },
}
FEW = {"stage 3", "interleaved, in two modes"}
SOME, SOME_UNLIKE = left_out(PLANS, PLANS.keys() - FEW), left_out(UNLIKE, UNLIKE)
SOME_PLANNED = left_out(PLANNED, PLANNED)


def _plan(model: nn.Module, profile: Profile, name: str) -> Plan:
    stages, settings = (PLANS | UNLIKE)[name]
    ends = [0, *accumulate(layers for layers, *_ in stages)]
    goes_round = settings.get("schedule") == "interleaved"
    row = len(stages) // 2 if goes_round else len(stages)
    found, device = [], 0
    for number, ((begin, end), (_, shares, *tp_group)) in enumerate(zip(pairwise(ends), stages)):
        device = device if number % row else 0
        one, (tensor, sequence) = plan_for(model, shares), [*tp_group, *(1, False)[len(tp_group) :]]
        needs = profile.model.needs_of(begin, end)
        sizes = [tensor] * len(shares) if isinstance(tensor, int) else tensor
        tensor = max(sizes)
        workers = [
            worker.model_copy(
                update={
                    "device": f"d{device + n}",
                    "parts": tensor // size,
                }
            )
            for n, (worker, size) in enumerate(
                (worker, size) for worker, size in zip(one.workers, sizes) for _ in range(size)
            )
        ]
        device += len(workers)
        found.append(
            Stage(
                units=profile.model.calls[begin:end],
                workers=tuple(workers),
                root=needs.root,
                takes=needs.outputs,
                tensor=tensor,
                sequence=sequence,
            )
        )
    if "joined" in name:
        found = [stage.model_copy(update={"joined": 4}) for stage in found]
    whole = plan_for(model, [Share(6, 2, 1)])
    update = {"stages": tuple(found), **settings}
    return Plan.model_validate(whole.model_dump() | update)


@pytest.fixture(scope="module")
def measured() -> Profile:
    return profiled(ranks=2)  # of which two may be a tensor-parallel group


@pytest.fixture(scope="module")
def profile(measured) -> Profile:
    """Of as many such devices as the plans have."""
    one = measured.cluster.devices[0]
    every = tuple(one.model_copy(update={"id": f"d{n}", "ordinal": n}) for n in range(MOST))
    cluster = measured.cluster.model_copy(update={"devices": every})
    return measured.model_copy(update={"cluster": cluster})


@pytest.fixture(scope="module")
def plans(request, profile, measured) -> dict[str, Plan]:
    model = gpumix.build(llama, SEED)
    made = {name: _plan(model, profile, name) for name in chosen(request, PLANS | UNLIKE)}
    for name, given in chosen(request, PLANNED).items():
        made[name] = make_plan(profile if "strategy" in given else measured, 6, **given)
    return made


@pytest.fixture(scope="module")
def done(plans):
    return counted(plans)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*SOME, *SOME_UNLIKE, *SOME_PLANNED])
def test_collectives_and_messages_are_those_that_were_counted(profile, plans, done, case):
    expected = count_traffic(profile, plans[case])
    for rank, (counts, sizes, _) in zip(expected, done[case], strict=True):
        assert dict(rank.counts) == counts
        assert dict(rank.bytes) == sizes


@pytest.mark.parametrize("case", [*SOME, *SOME_PLANNED])
def test_the_peak_is_that_which_was_predicted(profile, plans, done, case):
    predicted = predict(profile, plans[case]).workers
    for worker, (_, _, peak) in zip(predicted, done[case], strict=True):
        assert peak - BESIDE_THE_MODEL_BYTES <= worker.peak_bytes <= 1.02 * peak


@pytest.mark.parametrize("case", SOME_UNLIKE)
def test_the_peak_of_tp_groups_of_unlike_sizes_is_not_above_what_was_predicted(
    profile, plans, done, case
):
    """Undivided parameters, which all ranks have, count as if leaders alone had them."""
    predicted = predict(profile, plans[case]).workers
    for worker, (_, _, peak) in zip(predicted, done[case], strict=True):
        assert peak - BESIDE_THE_MODEL_BYTES <= worker.peak_bytes <= 1.25 * peak
