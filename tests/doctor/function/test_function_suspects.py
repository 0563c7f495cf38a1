"""What is suspected of a function, by what its steps showed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpumix.doctor.function.observations import (
    LoaderObservation,
    ModelObservation,
    Observations,
    OptimizerObservation,
    Site,
)
from gpumix.doctor.function.suspects import NAMES, find_suspects

# Ten steps of a tenth of a second, of 16 samples each; the optimizer takes 1%.
LOADER = LoaderObservation(
    place="train.py:5",
    workers=0,
    batch_size=16,
    persistent=False,
    streams=False,
    waited_s=0.01,
    cpu_s=0.01,
    begun=0,
    samples=160,
)
OPTIMIZER = OptimizerObservation(
    place="train.py:8", name="AdamW", fused=False, fusible=True, seconds=0.01
)
MODEL = ModelObservation(
    place="train.py:9", name="GPT", fp32=True, eager_attention=False, compiled=False
)
RETRAINING = ("batch", "bf16", "fp64", "remade_optimizer")
SEEN = Observations(
    steps=10,
    seconds=1.0,
    losses=(1.0,),
    loaders=(LOADER,),
    optimizers=(OPTIMIZER,),
    models=(MODEL,),
    threads=4,
    cores=4.0,
    memory_share=0.1,
)
A100 = replace(SEEN, cuda=True, capability=8, tf32=True)


def site(what: str, calls: int, seconds: float) -> tuple[Site, ...]:
    return (Site("train.py:12", what, calls, seconds),)


def names(seen: Observations, kernels_share: float | None = None) -> list[str]:
    found = [one.name for one in find_suspects(seen, kernels_share)]
    assert set(found) <= set(NAMES)
    return found


def starved(**changes: Any) -> Observations:
    """It waits half of its time."""
    waiting = {"waited_s": 0.5, "cpu_s": 0.5} | changes
    return replace(SEEN, loaders=(replace(LOADER, **waiting),))


def test_nothing_is_suspected_of_a_function_that_shows_nothing():
    assert names(SEEN) == []


@pytest.mark.parametrize(
    ("seen", "name", "changes", "fix"),
    [
        (
            replace(SEEN, copies=site("copy to the GPU", 10, 0.2)),
            "copies",
            {"pinned": True},
            "non_blocking=True) at train.py:12",
        ),
        (
            replace(SEEN, syncs=site("item", 20, 0.2)),
            "syncs",
            {"late_values": True},
            "at train.py:12",
        ),
        (replace(SEEN, writes=site("print", 900, 0.2)), "prints", {"quiet": True}, "train.py:12"),
        (
            replace(SEEN, anomaly=True, set={"anomaly": "train.py:1"}),
            "anomaly",
            {"anomaly": False},
            "at train.py:1",
        ),
        (
            replace(SEEN, deterministic=True),
            "deterministic",
            {"deterministic": False},
            "use_deterministic_algorithms(False)",
        ),
        (
            replace(SEEN, threads=1, set={"threads": "train.py:2"}),
            "threads",
            {"threads": 4},
            "set_num_threads(4) at train.py:2",
        ),
        (
            replace(SEEN, threads=1),
            "threads",
            {"threads": 4},
            "OMP_NUM_THREADS",
        ),
        (
            replace(SEEN, recomputed=site("checkpoint", 40, 0.0)),
            "recompute",
            {"recompute": False},
            "at train.py:12",
        ),
        (
            replace(SEEN, models=(replace(MODEL, eager_attention=True),)),
            "attention",
            {"attention": "sdpa"},
            'attn_implementation="sdpa"',
        ),
        (
            replace(SEEN, optimizers=(replace(OPTIMIZER, seconds=0.2),)),
            "fused_optimizer",
            {"fused": ("train.py:8",)},
            "AdamW(..., fused=True) at train.py:8",
        ),
        (
            replace(SEEN, optimizers=(replace(OPTIMIZER, seconds=0.4, fused=True),)),
            "batch",
            {"batch_size": {"train.py:5": 32}},
            "batch_size=32) at train.py:5",
        ),
        (
            replace(SEEN, optimizers=(replace(OPTIMIZER, remade=10),)),
            "remade_optimizer",
            {"reuse_optimizer": ("train.py:8",)},
            "before the loop, at train.py:8 (AdamW)",
        ),
        (
            replace(SEEN, cpu_bf16=True),
            "bf16",
            {"autocast": "bf16"},
            'torch.autocast("cpu", torch.bfloat16) around the call at train.py:9',
        ),
        (
            replace(SEEN, compiler=True),
            "compile",
            {"compile": "default"},
            "model.compile()",
        ),
        (
            replace(SEEN, models=(replace(MODEL, fp32=False, fp64=True),)),
            "fp64",
            {"fp32": True},
            "model.float() before its optimizer is made, and batches in float32, for the call at",
        ),
        (
            replace(
                SEEN,
                models=(replace(MODEL, fp32=False, fp64=True),),
                set={"default_dtype": "train.py:3"},
            ),
            "fp64",
            {"fp32": True},
            "torch.set_default_dtype(torch.float32) at train.py:3",
        ),
        (
            replace(SEEN, retries=4),
            "retries",
            {"expandable_segments": True},
            "PYTORCH_CUDA_ALLOC_CONF",
        ),
    ],
)
def test_what_is_suspected(seen, name, changes, fix):
    (found,) = find_suspects(seen)
    assert found.name in NAMES
    assert (found.name, found.changes) == (name, changes)
    assert fix in found.fix
    assert found.changes_training == (name in RETRAINING)
    assert found.changes_training == bool(found.note)
    assert found.costly == (name == "compile")


@pytest.mark.parametrize(
    "seen",
    [
        replace(SEEN, syncs=site("item", 5, 0.2)),  # not in each step
        replace(SEEN, syncs=site("__bool__", 20, 0.2)),  # an older one would steer code wrongly
        replace(SEEN, recomputed=site("checkpoint", 40, 0.0), memory_share=0.6),  # no room
        replace(SEEN, optimizers=(replace(OPTIMIZER, seconds=0.2, fused=True),)),
        replace(SEEN, optimizers=(replace(OPTIMIZER, seconds=0.2, fusible=False),)),
        replace(SEEN, optimizers=(replace(OPTIMIZER, remade=2),)),  # one for each epoch
    ],
)
def test_what_is_not(seen):
    assert names(seen) == []


def test_of_a_gpu_nothing_is_left_to_the_user():
    assert not any(one.changes_training or one.costly for one in find_suspects(A100))
    assert names(replace(A100, capability=7, cpu_bf16=True)) == ["fused_optimizer", "compile"]


def test_of_a_gpu_dtypes_and_kernels_are_suspected():
    plain = replace(OPTIMIZER, fused=True)
    gpu = replace(A100, optimizers=(plain,))
    assert names(gpu) == ["bf16", "compile"]
    assert names(replace(gpu, tf32=False)) == ["tf32", "bf16", "compile"]
    assert names(replace(gpu, capability=7)) == ["compile"]
    assert names(replace(gpu, models=(replace(MODEL, fp32=False, compiled=True),))) == []
    assert names(A100) == ["bf16", "fused_optimizer", "compile"]


def test_a_gpu_that_waits_for_launches():
    """Larger batches come last: they change what is trained."""
    assert names(A100, 0.9) == names(A100)
    small = ["bf16", "fused_optimizer", "launches", "compile", "batch"]
    assert names(A100, 0.4) == small


def test_the_input_comes_first():
    assert names(replace(starved(), anomaly=True)) == ["workers", "anomaly"]
