"""Ranks of unlike versions do not train together, whoever started them."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
import torch

import gpumix
from gpumix.engine.comm.version_check import check_equal_versions, own_versions
from gpumix.schema.errors import InputError
from helpers.errors import raises
from helpers.processes.harness import run_ranks
from helpers.training.models import WIDTH, Block, Regression
from helpers.training.reference import Share, plan_for

OTHER = "9.9"


def network() -> Regression:
    torch.manual_seed(0)
    return Regression([Block() for _ in range(2)])


def some_batch(samples: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(samples, 4, WIDTH), "target": torch.randn(samples, 4, 4)}


def _meeting(how: str) -> tuple[InputError | None, list[str]]:
    """What a rank is told, and what was measured before."""
    if torch.distributed.get_rank() == 1:
        gpumix.__version__ = OTHER
        socket.gethostname = lambda: "elsewhere"
    measured: list[str] = []
    device_class = gpumix.DeviceClass(name="d", accelerator="cpu", memory_bytes=96 * 2**20)
    devices = [gpumix.Device(id=f"d-{n}", device_class="d") for n in range(2)]
    settings: dict[str, Any] = {"sequence_length": 4, "global_batch_size": 2, "budget_s": 1.0}
    try:
        if how == "profile":
            cluster = gpumix.Cluster(classes=[device_class], devices=devices)
            gpumix.profile(
                network, some_batch, cluster=cluster, progress=measured.append, **settings
            )
        else:
            gpumix.prepare(network(), plan_for(network(), [Share(1, 1, 1), Share(1, 1, 1)]))
    except InputError as error:
        return error, measured
    return None, measured


@pytest.mark.parametrize("how", ["profile", "prepare"])
def test_all_ranks_are_told_who_runs_what_before_anything_is_measured(how):
    told = run_ranks(_meeting, 2, how)
    for said, measured in told:
        assert not measured
        assert said.code == "versions-differ"
        for named in ("gpumix", gpumix.__version__, "rank 0", OTHER, "elsewhere", "rank 1"):
            assert named in said.what


@pytest.mark.parametrize(
    ("version", "refused"), [("2.0.0+cpu", False), ("2.0.0+cu128", False), ("2.0.1+cpu", True)]
)
def test_builds_of_one_torch_go_together(version, refused, monkeypatch):
    told = []
    for one in ("2.0.0+cpu", version):
        monkeypatch.setattr(torch, "__version__", one)
        told.append(own_versions())
    if refused:
        with raises(InputError, code="versions-differ", what=("2.0.0", "2.0.1")):
            check_equal_versions(told)
    else:
        check_equal_versions(told)
        assert json.loads(told[0])["host"] == socket.gethostname()
