"""Which collectives the ranks of a process group have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from gpumix.engine.comm import process_groups
from gpumix.engine.comm.communicator import Communicator
from gpumix.engine.comm.host_staged import StagedCommunicator
from gpumix.engine.rank_group import RankGroup
from gpumix.schema.errors import MachineError
from helpers.errors import raises


def group_of(backends: dict[str, str]) -> SimpleNamespace:
    """A stand-in for torch.distributed with a default group of two, which has these backends."""

    def backend(device):
        return SimpleNamespace(name=lambda: backends[device.type])

    return SimpleNamespace(
        is_initialized=lambda: True,
        get_rank=lambda: 1,
        get_world_size=lambda: 2,
        get_backend_config=lambda: ",".join(f"{d}:{b}" for d, b in backends.items()),
        group=SimpleNamespace(WORLD=SimpleNamespace(_get_backend=backend)),
    )


@pytest.mark.parametrize(
    ("backends", "device", "kind"),
    [
        ({"cpu": "gloo", "cuda": "gloo"}, "cpu", Communicator),
        ({"cpu": "gloo", "cuda": "gloo"}, "cuda:0", StagedCommunicator),
        ({"cpu": "gloo", "cuda": "nccl"}, "cuda:0", Communicator),
    ],
)
def test_gpus_without_nccl_go_through_the_host(monkeypatch, backends, device, kind):
    monkeypatch.setattr(process_groups, "dist", group_of(backends))
    monkeypatch.setattr(
        "gpumix.engine.comm.communicator.WaitClock", lambda device: None
    )  # needs the device
    comm = process_groups.make_communicator(torch.device(device))
    assert type(comm) is kind
    assert (comm.rank, comm.world, comm.device) == (1, 2, torch.device(device))


def test_a_single_process_needs_no_group():
    comm = process_groups.make_communicator(torch.device("cpu"))
    assert (comm.rank, comm.world, comm.group) == (0, 1, None)


def test_a_torch_without_the_backend_of_its_gpus_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "is_backend_available", lambda backend: False)
    ranks = RankGroup.__new__(RankGroup)
    ranks.device = torch.device("xpu", 0)
    with raises(MachineError, code="backend-missing"):
        ranks._connect(None)
