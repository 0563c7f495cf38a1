"""Plans of several stages that contradict themselves."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gpumix.schema.cluster.kernels import KernelSettings
from gpumix.schema.plan.plan import Plan
from gpumix.schema.plan.stage import Stage, StageInput, Worker


def stage(number: int, *devices: str, samples: int = 4, **changes: Any) -> Stage:
    """Of one call, whose workers share the samples equally."""
    share = {"device_class": "c", "samples": samples // len(devices), "micro_batch": 1}
    share |= changes.pop("worker", {})
    workers = [Worker(device=d, state_share=1 / len(devices), **share) for d in devices]
    takes = (StageInput(call=number - 1, output=0),) if number else ()
    return Stage(
        **{"units": (f"block.{number}",), "workers": tuple(workers), "takes": takes} | changes
    )


def plan(*stages: Stage, **changes: Any) -> Plan:
    given = {"strategy": "test", "model": "m", "sequence_length": 1, "global_batch": 4}
    return Plan(**given | {"stages": stages} | changes)


GOOD = (stage(0, "a"), stage(1, "b", "c"))


def test_a_device_has_one_rank_in_the_order_of_stages():
    found = plan(*GOOD)
    assert [worker.device for worker in found.workers] == ["a", "b", "c"]
    assert [found.stages_of(rank) for rank in range(3)] == [(0,), (1,), (1,)]
    assert found.ranks_of(1) == (1, 2)
    assert [found.rows_of(rank) for rank in (0, 2)] == [
        tuple(range(n, n + 1) for n in range(4)),
        tuple(range(n, n + 1) for n in (2, 3)),
    ]


def test_ranks_may_be_in_any_order():
    found = plan(*GOOD).for_devices(["c", "a", "b"])
    assert [worker.device for worker in found.workers] == ["c", "a", "b"]
    assert (found.ranks_of(0), found.ranks_of(1)) == ((1,), (0, 2))
    assert Plan.model_validate_json(found.model_dump_json()) == found


@pytest.mark.parametrize(
    ("part", "told"),
    [("workers", "a stage without devices"), ("units", "more stages than units")],
)
def test_a_stage_computes_something_on_some_device(part, told):
    tree = plan(*GOOD).model_dump(mode="json")
    tree["stages"][1][part] = []
    with pytest.raises(ValidationError, match=told):
        Plan.model_validate(tree)


@pytest.mark.parametrize(
    ("stages", "changes", "told"),
    [
        ((GOOD[0], stage(1, "b", worker={"micro_batch": 2})), {}, "same micro-batches"),
        ((GOOD[0], stage(1, "a")), {}, "device 'a' is in two stages"),
        ((GOOD[0], stage(1, "b", units=("block.0",))), {}, "unit 'block.0' is in two stages"),
        (
            (GOOD[0], stage(1, "b", takes=(StageInput(call=1, output=0),))),
            {},
            "stage 2 takes what call 1 returns, which is not in an earlier stage",
        ),
        (
            (*GOOD, stage(2, "d", takes=(StageInput(call=0, output=0),))),
            {},
            "nobody takes what stage 2 computes: 'takes' of stage 3 has none of its calls",
        ),
        ((GOOD[0], stage(1, "b", takes=())), {}, "nobody takes what stage 1 computes"),
        (GOOD, {"ranks": ("a", "b")}, r"\(a, b, c\)"),
        (GOOD, {"ranks": ("a", "b", "x")}, "a, b, x"),
        (GOOD, {"ranks": ("a", "b", "c", "c")}, "a, b, c, c"),
        (GOOD, {"waves": 2, "zero_stage": 1}, "ZeRO stages 2 and 3"),
        (
            GOOD,
            {"waves": 3, "zero_stage": 3},
            "3 waves.* stage 2 .* 2",
        ),
        (GOOD, {"sharding": "host"}, "the hosts of a stage repeat no state"),
        (
            (*GOOD, stage(2, "a"), stage(3, "b")),
            {"schedule": "interleaved"},
            "go round the same devices",
        ),
        (GOOD, {"schedule": "interleaved"}, "'1f1b'"),
    ],
)
def test_refused(stages, changes, told):
    with pytest.raises(ValidationError, match=told):
        plan(*stages, **changes)


@pytest.mark.parametrize(
    ("key", "other"),
    [
        ("host", "elsewhere"),
        ("device_class", "other"),
        ("compute_dtype", "bf16"),
        ("state_on", "host"),
        ("compile", True),
        ("efficiency", KernelSettings(tf32=True)),
    ],
)
def test_a_device_is_the_same_in_all_of_its_stages(key, other):
    names = ("a", "b", "a", "b")
    stages = [stage(number, name) for number, name in enumerate(names)]
    assert plan(*stages, schedule="interleaved")
    stages[3] = stage(3, "b", worker={key: other})
    with pytest.raises(ValidationError, match=f"device 'b'.* {key} .*stage 4"):
        plan(*stages, schedule="interleaved")
