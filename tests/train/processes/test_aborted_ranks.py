"""Whose fault it is that a rank was aborted, by what the ranks told last: NCCL's watchdog ends the
one that waits."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGABRT

import torch.distributed as dist

from gpumix.data.core.read_policy import NOTHING_READ
from gpumix.engine.comm.hang_attribution import AwaitedCollective, RankProgress
from gpumix.engine.comm.heartbeat import format_heartbeat
from gpumix.schema.cluster.cluster import Device
from gpumix.schema.errors import RankLost
from gpumix.train.processes.local_launcher import RankAddress, _RankMonitor, _RankProcess

ALL = "all"


@dataclass
class Process:
    """What is asked of a rank's process; that of this test runs."""

    exitcode: int | None = None
    pid: int = field(default_factory=os.getpid)


def found(note: Path, stands: list[RankProgress]) -> RankLost:
    """What is said once rank 0 was aborted, where ranks stood so."""
    note.write_bytes(NOTHING_READ)
    store = dist.HashStore()
    children = []
    for rank, stand in enumerate(stands):
        store.set(f"beat/{rank}", format_heartbeat(7, stand))
        store.set(f"stands/{rank}", f"driver.py:{rank} in wait")
        device = Device(id=f"gpu-{rank}", device_class=f"class-{rank}")
        children.append(
            _RankProcess(RankAddress(rank, len(stands), device, 0), Process(), None, note)
        )
    child = children[0]
    child.ended = True
    child.process.exitcode = -SIGABRT
    child.error = child._died(-SIGABRT)
    assert child.aborted
    _RankMonitor(children, store, 60.0).find_fault(child)
    assert isinstance(child.error, RankLost)
    return child.error


def on_nccl(number: int) -> RankProgress:
    """Its host runs ahead of its device, and so it waits for all that it has begun."""
    return RankProgress({ALL: number}, (AwaitedCollective(ALL, number),))


def test_the_rank_that_it_waited_for(tmp_path):
    on_gloo = RankProgress({ALL: 9}, (AwaitedCollective(ALL, 9),), "in the reduction of a unit")
    for stand in (on_nccl(9), on_gloo):
        error = found(tmp_path / "note", [stand, on_nccl(4), on_nccl(9)])
        assert (error.device, error.device_class) == ("gpu-1", "class-1")
        assert error.what.startswith("rank 1 (device 'gpu-1', ")
        assert error.what.endswith(" did not take part")
        assert error.why.startswith("rank 0 (device 'gpu-0', ")
        assert stand.activity in error.why
        assert error.why.endswith("; rank 1 stood at driver.py:1 in wait")


def test_of_several_no_device_is_at_fault(tmp_path):
    error = found(tmp_path / "note", [on_nccl(9), on_nccl(4), on_nccl(4)])
    assert error.device == ""
    assert "rank 1 " in error.what and "rank 2 " in error.what


def test_where_all_have_come_as_far_no_device_is_at_fault(tmp_path):
    """One of the devices hangs in its own work, or the link between them does."""
    error = found(tmp_path / "note", [on_nccl(9), on_nccl(9), on_nccl(9)])
    assert error.device == ""
    assert "was aborted while it waited" in error.what


def test_a_rank_that_is_itself_behind(tmp_path):
    error = found(tmp_path / "note", [on_nccl(4), on_nccl(9)])
    assert error.device == "gpu-0"
    assert "was killed by signal 6 (SIGABRT)" in error.what


def test_a_rank_that_waited_for_nobody(tmp_path):
    """On the CPU it waits, and says so, or it does not."""
    error = found(tmp_path / "note", [RankProgress({ALL: 9}), RankProgress({ALL: 9})])
    assert error.device == "gpu-0"
    assert "was killed by signal 6 (SIGABRT)" in error.what
