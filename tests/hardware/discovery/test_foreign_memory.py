"""A GPU that another program fills is told with its process, and planned with less or refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
import test_gpu_health as nvidia

from gpumix.hardware.discovery.foreign_memory import (
    OccupiedGpu,
    find_occupied_gpus,
    reserve_foreign_memory,
)
from gpumix.schema.cluster.cluster import Cluster, Device, DeviceClass
from gpumix.schema.errors import MachineError
from helpers.errors import raises
from helpers.plans.profiles import Card, profile, steady

GIB = 2**30


def cluster(**changes):
    kind = DeviceClass(
        **{"name": "rtx", "accelerator": "cuda", "memory_bytes": 24 * GIB, **changes}
    )
    devices = [Device(id=f"GPU-{n}", device_class="rtx", ordinal=n) for n in range(2)]
    return Cluster(classes=(kind,), devices=tuple(devices))


@pytest.fixture
def taken(monkeypatch):
    """Sets what another process holds of GPU-1; nobody uses GPU-0."""

    def hold(used, *processes):
        def memory(handle):
            return nvidia.SimpleNamespace(
                total=24 * GIB, used=used if handle == "GPU-1" else GIB // 2
            )

        def running(handle):
            found = [nvidia.SimpleNamespace(pid=pid, usedGpuMemory=held) for pid, held in processes]
            return found if handle == "GPU-1" else []

        fake = nvidia.fake(
            nvmlDeviceGetMemoryInfo=memory, nvmlDeviceGetComputeRunningProcesses=running
        )
        monkeypatch.setitem(sys.modules, "pynvml", fake)

    return hold


def test_a_card_that_nobody_uses(taken):
    taken(GIB // 2)
    assert find_occupied_gpus(cluster()) == ()


def test_less_is_planned_beside_a_program_and_it_is_named(taken):
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdin.write(b"begun\n")
        other.stdin.flush()
        other.stdout.readline()  # it has its own name by now
        try:
            taken(9 * GIB, (other.pid, 9 * GIB - GIB // 5))
            (found,) = find_occupied_gpus(cluster())
        finally:
            other.kill()
    told = f"9.0 GiB of the 24.0 GiB of rtx 1 are taken by process {other.pid} (cat, 8.8 GiB)"
    assert str(found) == told
    assert (found.device.id, found.taken_bytes) == ("GPU-1", 9 * GIB)


def test_a_card_that_is_full_is_refused(taken):
    taken(20 * GIB, (999_999_999, 20 * GIB))
    with raises(MachineError, code="gpu-filled-by-others") as raised:
        find_occupied_gpus(cluster())
    assert "999999999 (of another container, 20.0 GiB)" in str(raised.value)
    assert "kill 999999999" in raised.value.fix and "CUDA_VISIBLE_DEVICES" in raised.value.fix


def test_a_class_that_is_to_use_less_than_the_card_has_room_beside_others(taken):
    taken(16 * GIB, (999_999_999, 16 * GIB))
    (found,) = find_occupied_gpus(cluster(memory_bytes=6 * GIB))
    assert found.left_bytes == 8 * GIB
    own = profile([Card("rtx", 2, 6 * GIB, steady(1.0), framework=GIB)])
    assert reserve_foreign_memory(own, (found,)) == own
    taken(20 * GIB, (999_999_999, 20 * GIB))
    (found,) = find_occupied_gpus(cluster(memory_bytes=6 * GIB))
    assert reserve_foreign_memory(own, (found,)).of_class("rtx").framework_bytes == 3 * GIB
    taken(22 * GIB, (999_999_999, 22 * GIB))
    with raises(MachineError, code="gpu-filled-by-others"):
        find_occupied_gpus(cluster(memory_bytes=6 * GIB))


def test_only_gpus_of_this_host_are_asked(taken, monkeypatch):
    taken(20 * GIB, (7, 20 * GIB))
    elsewhere = [d.model_copy(update={"host": "elsewhere"}) for d in cluster().devices]
    assert find_occupied_gpus(cluster().model_copy(update={"devices": tuple(elsewhere)})) == ()
    monkeypatch.setitem(sys.modules, "pynvml", None)  # to ask it would fail
    assert find_occupied_gpus(cluster(accelerator="cpu", emulate_flops_per_s=1e9)) == ()
    assert find_occupied_gpus(cluster(accelerator="xpu")) == ()


def test_amds_are_asked_by_amdsmi(monkeypatch):
    import test_amd_health as amd

    monkeypatch.setitem(sys.modules, "amdsmi", amd.fake())
    kinds = {"memory_bytes": 192 * GIB, "gfx_target": "gfx942"}
    first, second = find_occupied_gpus(cluster(**kinds))  # both hold 20 GiB there
    assert first.taken_bytes == second.taken_bytes == 20 * GIB
    pids = [int(name.split()[0]) for name in first.holders]
    assert pids == [7, 8], "this process is none of them"


def test_a_profile_leaves_what_others_hold():
    found = profile([Card("rtx", 2, 24 * GIB, steady(1.0), framework=GIB)])
    device = Device(id="GPU-1", device_class="rtx")
    held = OccupiedGpu(device, 24 * GIB, 9 * GIB, ())
    assert reserve_foreign_memory(found, (held,)).of_class("rtx").framework_bytes == 10 * GIB
    beside = found.model_copy(
        update={"classes": (found.classes[0].model_copy(update={"framework_bytes": 10 * GIB}),)}
    )
    assert reserve_foreign_memory(beside, (held,)) == beside, "measured beside it: it is counted"
    assert reserve_foreign_memory(found, ()) is found
