"""How long a program's process group waits is how long gpumix waits for its ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gpumix
from gpumix.engine.rank_group import RankGroup
from gpumix.integrations.common.saver import Saver
from gpumix.profiler import api
from helpers.processes.harness import run_ranks

WAIT_S = 77.0


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().sum(), torch.tensor(x.numel())


def waits(timeout_s: float | None) -> tuple[list[float], float]:
    """Of a profile, and of the group for saving."""
    waited: list[float] = []

    class Noted(RankGroup):
        def __init__(self, *args, **settings):
            waited.append(settings["timeout_s"])
            super().__init__(*args, **settings)

    api.RankGroup = Noted
    device_class = gpumix.DeviceClass(
        name="d", accelerator="cpu", memory_bytes=300 * 2**20, emulate_flops_per_s=1e12
    )
    devices = [gpumix.Device(id=f"d{n}", device_class="d") for n in range(2)]
    gpumix.profile(
        Regression,
        lambda samples: {"x": torch.randn(samples, 4, 8)},
        sequence_length=4,
        global_batch_size=2,
        cluster=gpumix.Cluster(classes=[device_class], devices=devices),
        units=["Linear"],
        budget_s=1.0,
        progress=lambda line: None,
        **({} if timeout_s is None else {"timeout_s": timeout_s}),
    )
    group = Saver(None, {}, ranks_here=2)._group  # nothing is saved
    options = group._get_backend(torch.device("cpu")).options
    return waited, options._timeout.total_seconds()


def test_profiles_and_saving_wait_as_long_as_the_group():
    for rank in run_ranks(waits, 2, None, group_timeout_s=WAIT_S):
        assert rank == ([WAIT_S], WAIT_S)


@pytest.mark.extended
def test_a_profile_waits_as_long_as_it_is_told():
    for rank in run_ranks(waits, 2, 55.0, group_timeout_s=WAIT_S):
        assert rank == ([55.0], WAIT_S)
