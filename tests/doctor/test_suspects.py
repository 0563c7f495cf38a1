"""What is suspected of a job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpumix.doctor.function.observations import Site
from gpumix.doctor.rank_watch import RankObservations
from gpumix.doctor.suspects import NAMES, Evidence, find_suspects
from gpumix.schema.job.job import Job
from gpumix.schema.plan.plan import Plan
from gpumix.train.run_log.interruption_cost import InterruptionCost

ITEM = Site("model.py:3", "item", calls=10, seconds=0.1)
PRINT = Site("model.py:4", "print", calls=20, seconds=0.1)

HEALTHY: dict[str, Any] = {
    "model": {"config": {"model_type": "gpt2"}},
    "data": {"factory": "toys:data"},
    "sequence_length": 8,
    "global_batch_size": 4,
    "max_steps": 10,
}


def seen(job: dict[str, Any], **given: Any) -> Evidence:
    evidence = {
        "input_share": 0.01,
        "step_s": 0.1,
        "save": InterruptionCost(),
        "evaluation": InterruptionCost(),
        "padding_share": None,
        "inside": RankObservations(),
        "steps": 10,
        "retries": 0,
        "kernels_share": None,
        "compilers": False,
        "cpu_compilers": False,
        "cpu_bf16": (),
        "other_dtypes": False,
        "tf32": (),
        "planned_s": 0.1,
        "predict_step_s": lambda changes: None if "global_batch_size" in changes else 0.05,
        "plan": Plan.model_construct(stages=()),
    }
    return Evidence(job=Job.model_validate(HEALTHY | job), **evidence | given)


def names(evidence: Evidence) -> list[str]:
    found = [one.name for one in find_suspects(evidence)]
    assert set(found) <= set(NAMES)
    return found


def data(**given: Any) -> dict[str, Any]:
    return {"data": HEALTHY["data"] | given}


def test_nothing_is_suspected_of_a_job_that_says_nothing():
    assert names(seen({})) == []
    assert names(seen({}, input_share=0.5)) == []  # the loader does what it can already


@pytest.mark.parametrize(
    ("job", "given", "name", "changes"),
    [
        (data(num_workers=0), {"input_share": 0.2}, "workers", {"data.num_workers": "auto"}),
        (data(prefetch=1), {"input_share": 0.2}, "workers", {"data.prefetch": "auto"}),
        ({"strategy": "even"}, {}, "strategy", {"strategy": "optimal"}),
        (
            {"techniques": {"gradient_checkpointing": True}},
            {},
            "gradient_checkpointing",
            {"techniques.gradient_checkpointing": [True, False]},
        ),
        (
            {"techniques": {"tensor_parallel_size": 2}},
            {},
            "tensor_parallel_size",
            {"techniques.tensor_parallel_size": [1, 2, 4, 8]},
        ),
        ({"precision": "fp32"}, {"other_dtypes": True}, "precision", {"precision": "auto"}),
        (
            {"advanced": {"efficiency": {"fused_optimizer": False}}},
            {},
            "fused_optimizer",
            {"advanced.efficiency.fused_optimizer": "auto"},
        ),
        ({}, {"compilers": True}, "compile", {"torch_compile": True}),
        ({}, {"compilers": True, "kernels_share": 0.9}, "compile", {"torch_compile": True}),
        ({}, {"compilers": True, "kernels_share": 0.4}, "launches", {"torch_compile": True}),
        ({}, {"cpu_bf16": ("cpu",)}, "bf16", {"precision": {"cpu": "bf16"}}),
        ({}, {"retries": 3}, "retries", {"expandable_segments": True}),
        ({}, {"inside": RankObservations(syncs=(ITEM,))}, "syncs", {"late_values": True}),
        ({}, {"inside": RankObservations(writes=(PRINT,))}, "prints", {"quiet": True}),
        (
            {"techniques": {"leave_out": False}},
            {},
            "leave_out",
            {"techniques.leave_out": None},
        ),
        (
            {"model": {"config": {"model_type": "gpt2", "_attn_implementation": "eager"}}},
            {},
            "eager",
            {"advanced.efficiency.attention": "sdpa"},
        ),
        (
            {
                "data": {
                    "dataset": "texts",
                    "column": "text",
                    "packing": "documents",
                    "tokenize": "on-the-fly",
                }
            },
            {"input_share": 0.2},
            "tokenize",
            {"data.tokenize": "ahead"},
        ),
        (
            data(packing="none"),
            {"padding_share": 0.3},
            "padding",
            {"data.bucketing": True},
        ),
        (
            {"save_steps": 2},
            {"save": InterruptionCost(0.1)},
            "checkpoints",
            {"save_steps": 50},  # then it is 2 % of the steps
        ),
        (
            {"save_steps": 1},
            {"save": InterruptionCost(0.001, 0.001, 0.4)},
            "checkpoints",
            {"save_steps": 4},  # then one is written before the next begins
        ),
        (
            {"eval_steps": 1},
            {"evaluation": InterruptionCost(0.2)},
            "evaluation",
            {"eval_steps": 100},
        ),
    ],
)
def test_what_is_suspected(job, given, name, changes):
    (found,) = find_suspects(seen(job, **given))
    assert found.name in NAMES
    assert (found.name, found.changes) == (name, changes)


def test_compiled_code_of_cpus_takes_minutes_to_try():
    (found,) = find_suspects(seen({}, cpu_compilers=True))
    assert (found.name, found.costly) == ("compile", True)
    (found,) = find_suspects(seen({}, cpu_compilers=True, compilers=True))
    assert not found.costly


def test_bf16_of_a_cpu_is_left_to_the_user():
    (found,) = find_suspects(seen({}, cpu_bf16=("cpu",)))
    assert found.changes_training and "look at the loss" in found.change_text
    assert names(seen({"precision": "fp32"}, cpu_bf16=("cpu",))) == []


def test_small_batches_come_last_and_are_left_to_the_user():
    *_, found = find_suspects(seen({"strategy": "even"}, predict_step_s=lambda changes: 0.08))
    assert (found.name, found.changes) == ("batch", {"global_batch_size": 8})
    assert found.changes_training and "`global_batch_size: 8`" in found.change_text


def test_another_order_of_samples_is_left_to_the_user():
    (found,) = find_suspects(seen(data(packing="none"), padding_share=0.3))
    assert found.changes_training
    assert "another order" in found.change_text and "cannot be gone on from" in found.change_text


@pytest.mark.parametrize(
    ("job", "given", "told"),
    [
        (
            {"save_steps": 2},
            {"save": InterruptionCost(0.1)},
            "`save_steps: 50` (what is on the disk is up to 50 steps old, 2 as it is)",
        ),
        (
            {"eval_steps": 1},
            {"evaluation": InterruptionCost(0.2)},
            "`eval_steps: 100` (the loss of evaluation is known every 100 steps, every 1 as it is)",
        ),
    ],
)
def test_what_is_given_up_is_told(job, given, told):
    (found,) = find_suspects(seen(job, **given))
    assert found.change_text == told and not found.changes_training


@pytest.mark.parametrize(
    ("job", "given"),
    [
        ({}, {"predict_step_s": lambda changes: 0.09}),  # of twice as many samples, by half of them
        ({}, {"predict_step_s": lambda changes: 0.05, "input_share": 0.2}),
        (data(num_workers=0), {"input_share": 0.02}),
        (data(packing="documents", tokenize="on-the-fly"), {"input_share": 0.2}),
        ({"precision": "fp32"}, {}),  # what its classes compute in by themselves
        ({"strategy": "even"}, {"predict_step_s": lambda changes: 0.099}),
        ({"strategy": "even"}, {"predict_step_s": lambda changes: None}),  # there is no such plan
        ({"techniques": {"gradient_checkpointing": True}}, {"predict_step_s": lambda changes: 0.2}),
        ({"save_steps": 100}, {"save": InterruptionCost(0.1)}),
        ({}, {"inside": RankObservations(syncs=(replace(ITEM, calls=3),))}),  # not in each step
        ({}, {"inside": RankObservations(syncs=(replace(ITEM, what="__bool__"),))}),
        ({}, {"inside": RankObservations(writes=(replace(PRINT, seconds=0.005),))}),
        ({"torch_compile": True}, {"compilers": True, "kernels_share": 0.4}),
        ({"save_steps": 10}, {"save": InterruptionCost(0.001, 0.001, 0.9)}),
        (data(packing="none"), {"padding_share": 0.01}),
    ],
)
def test_what_is_not(job, given):
    assert names(seen(job, **given)) == []
