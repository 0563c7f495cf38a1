"""What ranks take of a host while they read weights: what they keep, and little more. Counted by
the kernel, for real processes and a model of 100 MB."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gpumix
from gpumix.cost.loading_memory import compute_loading_bytes, predict_host_bytes
from gpumix.hardware.host.resident_memory import PeakMemory
from gpumix.integrations.common.plan_and_shard import without_weights
from gpumix.testing import Share, plan_for
from gpumix.train.run_log.loading import measure_loading
from helpers.processes.harness import run_ranks
from helpers.training.memory import storage_bytes

pytestmark = pytest.mark.slow

pytest.importorskip("peft")

MB = 10**6
OF_PYTHON = 20 * MB  # objects of modules, and of what libraries import later
WIDE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 13, "vocab_size": 8000}
TINY = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    made = tmp_path_factory.mktemp("models")
    for name, sizes in {"wide": WIDE, "tiny": TINY}.items():
        config = LlamaConfig(num_attention_heads=8, dtype="bfloat16", **sizes)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        model.save_pretrained(made / name, max_shard_size="20MB")
    return made


def load(folder: Path, lazily: bool) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from_pretrained = AutoModelForCausalLM.from_pretrained
    model = (gpumix.from_pretrained if lazily else from_pretrained)(folder)
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))


def peak_of_loading(folder: Path, lazily: bool) -> tuple[int, int, str]:
    """How far this rank's memory grows, what it keeps, and the line of the run's log."""
    load(folder / "tiny", lazily)  # what loads it is in memory
    dist.barrier()
    with PeakMemory() as memory, measure_loading() as meter:
        model = load(folder / "wide", lazily)
        plan = plan_for(model, [Share(1, 1, 1), Share(1, 1, 3)], compute_dtype="bf16")
        engine = gpumix.prepare(model, plan)
    flat = [t for g in engine.groups() for t in (g.full, g.gradient) if t is not None]
    masters = [shard.master for group in engine.groups() for shard in group.shards]
    pooled = [memory for pool in engine.comm._pools.values() for memory in pool]
    gradients = [shard.gradient for shard in engine.trained_shards()]
    kept = storage_bytes([*flat, *masters, *pooled, *gradients])
    return memory.grown_bytes, kept, meter.describe(engine)


def test_processes_take_what_the_plan_keeps_and_hardly_more(folder):
    lazy = run_ranks(peak_of_loading, 2, folder, True, timeout_s=300)
    for grown, kept, _ in lazy:
        assert grown <= 1.2 * kept + OF_PYTHON
    whole = run_ranks(peak_of_loading, 2, folder, False, timeout_s=300)
    for (grown, _, _), (in_full, _, _) in zip(lazy, whole, strict=True):
        assert grown + 60 * MB <= in_full  # 100 MB but for what it keeps anyway
    for _, _, told in lazy:
        amount = re.fullmatch(
            r"weights read in .*, with ([\d.]+) MiB of RAM on host localhost at most", told
        )
        assert amount is not None, told
        grown = sum(one for one, _, _ in lazy)
        assert float(amount[1]) * 2**20 == pytest.approx(grown, abs=8 * MB)


def plan_of(folder: Path) -> tuple[int, list[int], gpumix.Plan]:
    """What loading a model takes at most, sizes of a block and of the head, and a plan."""
    model = gpumix.from_pretrained(folder / "tiny")
    device_class = {"name": "d", "accelerator": "cpu", "memory_bytes": 10**9}
    cluster = {"classes": [device_class], "devices": [{"id": "d", "device_class": "d"}]}
    found = gpumix.profile(
        lambda: without_weights(model),
        lambda samples: dict.fromkeys(("input_ids", "labels"), torch.ones(samples, 4).long()),
        sequence_length=4,
        global_batch_size=2,
        cluster=gpumix.Cluster.model_validate(cluster),
        budget_s=1.0,
    )
    parts = model.model.layers[0].parameters(), [model.lm_head.weight]
    sizes = [sum(p.numel() for p in part) for part in parts]
    return compute_loading_bytes(found.model), sizes, gpumix.plan(found, global_batch_size=2)


def test_plans_tell_what_the_largest_block_takes(folder):
    [(largest, sizes, plan)] = run_ranks(plan_of, 1, folder, timeout_s=300)
    assert largest == 4 * max(sizes)
    assert plan.prediction is not None
    assert plan.prediction.loading_bytes == largest
    [worker] = plan.prediction.workers
    for on_cpu, kept in ((False, 0), (True, worker.peak_bytes)):
        [planned] = predict_host_bytes(plan, on_cpu=on_cpu).values()
        assert planned == worker.host_bytes + largest + kept
