"""Every ZeRO stage, order and division of the state trains like one process."""

from __future__ import annotations

import pytest

from gpumix.engine.schedule.micro_batch import MicroBatch
from gpumix.schema.plan.stage import Mode
from helpers.extended import chosen, left_out
from helpers.training.models import ARCHITECTURES
from helpers.training.reference import (
    Case,
    Share,
    batches,
    engine_alone,
    in_hosts,
    train_alone,
    train_by_plans,
    worst_error,
)
from helpers.training.staging import LLAMAS_ENDS

STEPS = 2
TOLERANCE = 2e-5
LAYERED, KEEPING = Mode(), Mode(recompute=False)
ONE_BY_ONE = Mode(order="sequential")
INLINE = Mode(order="sequential", recompute=False)


UNEVEN = [Share(3, 2, 1), Share(2, 1, 0, KEEPING), Share(0, 0, 2), Share(4, 3, 3, kept=3)]
ORDERS = [
    Share(3, 2, 1, ONE_BY_ONE),
    Share(2, 1, 0, INLINE),
    Share(0, 0, 1, INLINE),
    Share(4, 3, 2, LAYERED),
]
TWO = [Share(3, 2, 1), Share(2, 1, 2)]
# By 3 waves one rank has a micro-batch in each, one in the last two, one in none.
WAVES = [Share(3, 1, 1), Share(4, 2, 0, KEEPING), Share(0, 0, 2), Share(5, 2, 3)]
ON_HOST = Mode(boundary="host")


CASES: dict[str, Case] = {
    **{f"uneven, {stage}": ("gpt2", UNEVEN, {"zero_stage": stage}) for stage in range(4)},
    **{
        f"uneven, own blocks, {stage}": ("plain-own-blocks", UNEVEN, {"zero_stage": stage})
        for stage in (1, 3)
    },
    "orders meet, 0": ("gpt2", ORDERS, {"zero_stage": 0}),
    "orders meet, 1": ("bart", ORDERS, {"zero_stage": 1}),
    "one rank, one by one": ("gpt2", [Share(5, 2, 1, ONE_BY_ONE)], {"zero_stage": 0}),
    "one rank, inline": ("gpt2", [Share(5, 2, 1, INLINE)], {"zero_stage": 0}),
    "one rank, keeping": ("gpt2", [Share(5, 2, 1, KEEPING)], {"zero_stage": 3}),
    **{
        f"state divided inside hosts, {states}, {stage}": (
            "gpt2",
            in_hosts(*states),
            {"zero_stage": stage, "sharding": "host"},
        )
        for stage, states in [
            (1, (1, 2, 3, 0)),
            (2, (1, 2, 1, 2)),
            (3, (1, 2, 1, 2)),
            (3, (1, 2, 3, 0)),
        ]
    },
    **{
        f"joined by {joined}, {stage}": (
            "bart",
            TWO,
            {"zero_stage": stage, "stage": {"joined": joined}},
        )
        for stage, joined in [(0, 2), (2, 5), (3, 2), (3, 5)]
    },
    **{
        f"{waves} waves, {stage}": (name, WAVES, {"zero_stage": stage, "waves": waves})
        for name, waves, stage in [("gpt2", 2, 2), ("bart", 2, 3), ("gpt2", 3, 3)]
    },
    "waves, one rank": ("gpt2", [Share(5, 2, 1)], {"zero_stage": 3, "waves": 2}),
    "waves, hosts": (
        "gpt2",
        in_hosts(1, 2, 3, 0),
        {"zero_stage": 3, "sharding": "host", "waves": 2},
    ),
    "waves, state on hosts": ("llama", WAVES, {"waves": 3, "on_host": (0, 3)}),
    "ends of the root, 0": (
        "llama",
        [TWO[0], Share(2, 1, 2, INLINE)],
        {"zero_stage": 0, "stage": LLAMAS_ENDS},
    ),
    "ends of the root, 3": ("llama", TWO, {"zero_stage": 3, "stage": LLAMAS_ENDS}),
    **{
        f"inputs kept on the host, {name}": (
            name,
            [Share(3, 1, 1, ON_HOST), Share(4, 2, 0, ON_HOST, kept=3), Share(1, 1, 1)],
            {},
        )
        for name in ("gpt2", "whisper")
    },
    # What GPUs do that have no NCCL between them: here with devices that are the host itself.
    **{
        f"collectives through the host, {stage}": (
            "gpt2",
            in_hosts(0, 1, 2, 3),
            {"zero_stage": stage, "sharding": "host", "staged_on": "cpu"},
        )
        for stage in (1, 3)
    },
}


FURTHER = {
    "uneven, 1",
    "uneven, own blocks, 1",
    "uneven, own blocks, 3",
    "one rank, one by one",
    "one rank, inline",
    "state divided inside hosts, (1, 2, 1, 2), 3",
    "joined by 2, 0",
    "ends of the root, 0",
    "2 waves, 2",
    "waves, hosts",
    "collectives through the host, 3",
    "state divided inside hosts, (1, 2, 3, 0), 3",
    "state divided inside hosts, (1, 2, 1, 2), 2",
    "joined by 5, 2",
    "joined by 2, 3",
    "inputs kept on the host, whisper",
}


@pytest.fixture(scope="module")
def trained(request):
    return train_by_plans(chosen(request, CASES), STEPS)


@pytest.mark.parametrize("case", left_out(CASES, FURTHER))
def test_training_is_that_of_one_process(case, trained):
    name, shares, _ = CASES[case]
    found = trained[case]
    size = sum(share.samples for share in shares)
    assert worst_error(found, train_alone(ARCHITECTURES[name], size, STEPS)) < TOLERANCE
    later = found.counts[1:] if len(shares) == 1 else found.counts
    assert all(counts == found.expected_counts for counts in later)


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
