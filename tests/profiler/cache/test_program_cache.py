"""What was measured of a program's model before is not measured again, unless something changed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gpumix
from gpumix.integrations.common.plan_and_shard import without_weights
from gpumix.profiler import input_pipeline
from gpumix.profiler.cache.program_cache import describe_work
from helpers.processes.harness import run_ranks
from helpers.training.models import ARCHITECTURES, LENGTH

GPT2 = ARCHITECTURES["gpt2"]
SLOW_S = 0.4  # for a sample: much longer than it takes to compute one on a busy machine


def batch(samples: int) -> dict[str, torch.Tensor]:
    return GPT2.batch(samples, torch.Generator().manual_seed(0))


def cluster() -> gpumix.Cluster:
    device_class = gpumix.DeviceClass(
        name="d", accelerator="cpu", memory_bytes=2**26, emulate_flops_per_s=2e10
    )
    devices = [gpumix.Device(id=f"d-{n}", device_class="d", host=f"host-{n}") for n in (0, 1)]
    return gpumix.Cluster(classes=(device_class,), devices=tuple(devices))


class Slow(torch.utils.data.Dataset):
    """Reading a sample keeps a core busy."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        until_s = time.thread_time() + self.seconds
        while time.thread_time() < until_s:
            pass
        return {"input_ids": torch.full((LENGTH,), index)}


def test_it_is_measured_once(tmp_path):
    for first, again in run_ranks(_measured, 2, tmp_path, "plain-own-blocks", CALLS[:2]):
        assert first == again
    assert _kept(tmp_path) == ["class", "links"]


def _kept(folder: Path) -> list[str]:
    """Of what there are measurements."""
    return sorted(path.name.split("-")[0] for path in (folder / "gpumix/profiles").iterdir())


@pytest.mark.extended
@pytest.mark.slow
def test_what_changed_and_what_reads_is_measured(tmp_path):
    for *profiles, with_data in run_ranks(_measured, 2, tmp_path, "gpt2", CALLS):
        first, again, changed = profiles
        assert first == again != changed
        # How fast hosts read is measured anew: the data may lie elsewhere.
        profile = gpumix.Profile.model_validate_json(with_data)
        assert profile.model_copy(update={"inputs": ()}).model_dump_json() == first
        fast, slow = profile.inputs
        assert (fast.host, slow.host) == ("host-0", "host-1")
        assert slow.cpu_s_per_sample > SLOW_S > fast.cpu_s_per_sample
        plan = gpumix.plan(
            profile,
            global_batch_size=4,
            space=gpumix.Space(max_pipeline_stages=1, tensor_parallel_size=(1,)),
        )
        assert {w.device: w.samples for w in plan.workers}.get("d-1", 0) <= 1
    assert _kept(tmp_path) == ["class", "class", "links", "links"]


# What the program says of itself, and whether it reads data.
CALLS = [("one", False), ("one", False), ("another", False), ("one", True)]


def _measured(folder: Path, name: str, calls: list[tuple[str, bool]]) -> list[str]:
    """On a rank: the profile that each call returns."""
    architecture = ARCHITECTURES[name]
    os.environ["XDG_CACHE_HOME"] = str(folder)
    slow_here = Slow(SLOW_S * dist.get_rank())
    input_pipeline.READERS = (1, 2)  # on a busy machine a core is waited for, and more are tried
    found = []
    for told, reads in calls:
        profile = gpumix.profile(
            architecture.factory,
            lambda samples: architecture.batch(samples, torch.Generator().manual_seed(0)),
            sequence_length=LENGTH,
            global_batch_size=4,
            cluster=cluster(),
            space=gpumix.Space(tensor_parallel_size=(1,)),
            dataset=slow_here if reads else None,
            budget_s=0.1,
            same_as=told,
        )
        found.append(profile.model_dump_json())
    return found


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_what_changes_the_work_is_told():
    def told(model: nn.Module, samples: int = 1, more: str = "") -> object:
        return describe_work(model, batch(samples), more)

    model = GPT2.factory()
    plain = told(model)
    assert told(GPT2.factory()) == plain
    assert told(without_weights(model)) == plain
    assert told(model, 2) != plain
    assert told(model, more="sgd") != plain
    model.transformer.h[0].ln_1.eps = 1e-3
    assert told(model) != plain
    model = GPT2.factory()
    model.transformer.h[0].attn.append_module = Doubled()
    assert told(model) != plain
    model = GPT2.factory().requires_grad_(False)
    assert told(model) != plain
