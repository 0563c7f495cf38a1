"""A last stage with chunked cross-entropy trains like one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from gpumix.engine.cross_entropy import linear_cross_entropy
from gpumix.engine.cross_entropy.linear_cross_entropy import LinearCrossEntropy
from gpumix.schema.plan.stage import Mode
from helpers.extended import chosen, left_out
from helpers.training.reference import Trained, joined
from helpers.training.staging import Row, rows, run_in_turn, staged_plan, train_rank
from helpers.training.turns import STEPS, assert_same

ROWS = 10  # of a chunk: a micro-batch has several


def in_chunks(layout: Sequence[Row], *, only: Sequence[int] = ()) -> list[Row]:
    """The same with chunked cross-entropy at all workers of the last stage, or at these only."""
    *others, last = layout
    shares = tuple(
        share._replace(mode=share.mode.model_copy(update={"head": "chunked"}))
        if number in (only or range(len(last.shares)))
        else share
        for number, share in enumerate(last.shares)
    )
    return [*others, last._replace(shares=shares)]


TWO = rows([6], [2, 4])
THREE = rows([6], [4, 2], [6])
ALONE = rows([8], [8], micro_batch=2)
KEPT = rows([6], [2, 4], mode=Mode(recompute=False))
TP_GROUP = rows([6], [6], tensor=[1, 2])

WAYS: dict[str, tuple[list[Row], dict[str, Any]]] = {
    "1f1b, 0": (in_chunks(TWO), {"zero_stage": 0}),
    "1f1b, 1": (in_chunks(THREE), {"zero_stage": 1}),
    "gpipe, 3": (in_chunks(TWO), {"schedule": "gpipe", "zero_stage": 3}),
    "waves, 3": (in_chunks(ALONE), {"zero_stage": 3, "waves": 2}),
    "zero-bubble, 1": (in_chunks(KEPT), {"schedule": "zero-bubble", "zero_stage": 1}),
    "one of two, 1": (in_chunks(TWO, only=[1]), {"zero_stage": 1}),
    "a TP group, 1": (in_chunks(TP_GROUP), {"zero_stage": 1}),
    "a TP group, 3": (in_chunks(TP_GROUP), {"zero_stage": 3}),
}
AROUND: dict[str, tuple[list[Row], dict[str, Any]]] = {
    f"interleaved, {stage}": (
        in_chunks([*ALONE, *ALONE]),
        {"schedule": "interleaved", "zero_stage": stage, "waves": waves},
    )
    for stage, waves in [(1, 1), (3, 2)]
}
CASES = {
    # Tied to the embedding, which the first stage has.
    **{("gpt2", way): case for way, case in WAYS.items()},
    **{("gpt2-deep", way): case for way, case in AROUND.items()},
    # Its own.
    ("llama", "waves, 3"): WAYS["waves, 3"],
    # Tied, and all stages of the decoder take what the encoder gives.
    ("t5", "1f1b, 0"): WAYS["1f1b, 0"],
    ("t5-deep", "interleaved, 1"): AROUND["interleaved, 1"],
}
FURTHER = [(case,) for case in CASES if case != ("gpt2", "zero-bubble, 1")]


def _train(plan_json: str, name: str) -> tuple[list[float], Any, list[bool]]:
    """Losses, what was trained, and of each loss that ran in chunks whether the same pass made its
    gradients."""
    passes: list[bool] = []
    run = LinearCrossEntropy.run

    def noted(self: LinearCrossEntropy, upstream: Any, into: Any) -> Any:
        passes.append(upstream is not None)
        return run(self, upstream, into)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            linear_cross_entropy, "compute_chunk_rows", lambda rows, **sizes: min(rows, ROWS)
        )
        patch.setattr(LinearCrossEntropy, "run", noted)
        losses, pieces = train_rank(plan_json, name, STEPS)
    return losses, pieces, passes


@pytest.fixture(scope="module")
def trained(request):
    plans = {
        case: staged_plan(case[0], layout, **settings)
        for case, (layout, settings) in chosen(request, CASES).items()
    }
    return plans, run_in_turn(_train, {case: (plan, case[:1]) for case, plan in plans.items()})


@pytest.mark.parametrize("case", left_out(((case,) for case in CASES), FURTHER), ids=", ".join)
def test_training(case, trained):
    plans, found = trained
    plan = plans[case]
    losses, pieces, passes = zip(*found[case])
    assert_same(case[0], plan, list(losses), Trained(losses[0], joined(pieces)))
    last = len(plan.stages) - 1
    for rank, of_rank in enumerate(passes):
        count = 0
        if last in plan.stages_of(rank) and plan.worker_of(rank, last).mode.head == "chunked":
            count = STEPS * len(plan.numbers_of(rank, last))
        assert of_rank == [True] * count
