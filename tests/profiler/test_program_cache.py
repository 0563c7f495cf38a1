"""What was measured of a program's model before is not measured again, unless something changed."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

import gpumix
from gpumix.integrations.hosted import without_weights
from gpumix.profiler.program_cache import work_of
from harness import run_ranks
from models import ARCHITECTURES, LENGTH

GPT2 = ARCHITECTURES["gpt2"]


def batch(samples: int) -> dict[str, torch.Tensor]:
    return GPT2.batch(samples, torch.Generator().manual_seed(0))


def cluster() -> gpumix.Cluster:
    device_class = gpumix.DeviceClass(
        name="d", accelerator="cpu", memory_bytes=2**28, emulate_flops_per_s=2e10
    )
    devices = (gpumix.Device(id="d-0", device_class="d"), gpumix.Device(id="d-1", device_class="d"))
    return gpumix.Cluster(classes=(device_class,), devices=devices)


def test_it_is_measured_once(tmp_path):
    for first, again, changed in run_ranks(_measured, 2, tmp_path):
        assert first == again != changed
    kept = sorted(path.name.split("-")[0] for path in (tmp_path / "gpumix/profiles").iterdir())
    assert kept == ["class", "class", "links", "links"]


def _measured(folder: Path) -> list[str]:
    os.environ["XDG_CACHE_HOME"] = str(folder)
    found = []
    for told in ("one", "one", "another"):
        profile = gpumix.profile(
            GPT2.factory,
            batch,
            sequence_length=LENGTH,
            global_batch=4,
            cluster=cluster(),
            space=gpumix.Space(tensor=(1,)),
            budget_s=2.0,
            same_as=told,
        )
        found.append(profile.model_dump_json())
    return found


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_what_changes_the_work_is_told():
    def told(model: nn.Module, samples: int = 1, more: str = "") -> object:
        return work_of(model, batch(samples), more)

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
