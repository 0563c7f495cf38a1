"""Limits of control groups, as the kernel's files say them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpumix.hardware.host import cgroups
from gpumix.hardware.host.cgroups import read_core_quotas, read_memory_groups
from gpumix.hardware.host.environment import available_host_bytes, host_memory_bytes

OF_SLURM = "0::/system.slice/slurmstepd.scope/job_7/step_0\n"
OF_DOCKER = "5:cpu,cpuacct:/docker/7f\n4:memory:/docker/7f\n0::/docker/7f\n"
SHOWN_LESS = "0::/../../job_7\n"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Writes what the kernel would say: the groups of this process, and files by their paths."""

    def write(own: str, files: dict[str, str]) -> None:
        (tmp_path / "own").write_text(own)
        for name, content in files.items():
            file = tmp_path / "root" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)

    monkeypatch.setattr(cgroups, "_OWN_GROUPS_FILE", tmp_path / "own")
    monkeypatch.setattr(cgroups, "_ROOT", tmp_path / "root")
    return write


JOB = "system.slice/slurmstepd.scope/job_7"


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "50000 100000\n"}, [0.5]),
        ("0::/\n", {"cpu.max": "max 100000\n"}, []),
        ("0::/\n", {}, []),
        (OF_SLURM, {f"{JOB}/cpu.max": "200000 100000\n", f"{JOB}/step_0/cpu.max": "max 1\n"}, [2]),
        (OF_SLURM, {f"{JOB}/cpu.max": "4 1\n", f"{JOB}/step_0/cpu.max": "3 1\n"}, [4, 3]),
        (SHOWN_LESS, {"cpu.max": "50000 100000\n"}, [0.5]),
        *(
            (
                OF_DOCKER,
                {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": "100000\n"},
                found,
            )
            for folder in ("cpu", "cpu,cpuacct/docker", "cpu/docker/7f")
            for quota, found in (("50000\n", [0.5]), ("-1\n", []))
        ),
    ],
)
def test_quotas_of_all_groups_count(machine, own, files, cores):
    """-1 and "max" are none."""
    machine(own, files)
    assert read_core_quotas() == cores


@pytest.mark.parametrize(
    ("own", "folder", "names"),
    [
        ("0::/\n", "", ("memory.max", "memory.current", "")),
        (OF_SLURM, f"{JOB}/", ("memory.high", "memory.current", "")),
        (OF_DOCKER, "memory/", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")),
        (OF_DOCKER, "memory/docker/7f/", ("memory.limit_in_bytes", "memory.usage_in_bytes", "")),
    ],
)
def test_memory_that_keeps_files_is_free(machine, own, folder, names):
    """As the kernel counts what is available of a whole host."""
    most, used, total = names
    kept = f"{total}inactive_file {2**20}\n{total}active_file {3 * 2**20}\nanon 7\n"
    shadowed = f"inactive_file {2**30}\n" if total else ""  # of that group alone
    machine(
        own,
        {
            f"{folder}{most}": f"{16 * 2**20}\n",
            f"{folder}{used}": f"{10 * 2**20}\n",
            f"{folder}memory.stat": shadowed + kept,
        },
    )
    (group,) = read_memory_groups()
    assert (group.limit_bytes, group.used_bytes) == (16 * 2**20, 6 * 2**20)
    assert host_memory_bytes() == 16 * 2**20 and available_host_bytes() == 10 * 2**20


def test_without_limits_there_is_the_whole_host(machine):
    machine("0::/a/b\n", {"a/memory.max": "max\n", "a/b/memory.current": "4096\n"})
    assert read_memory_groups() == [] and host_memory_bytes() > 2**20
    machine("", {})
    assert read_core_quotas() == []


def test_the_kernels_own_files_are_read():
    """Whatever this machine has: limits are positive, and no more than the version allows."""
    if not Path("/proc/self/cgroup").exists():
        pytest.skip("there are no control groups here")
    assert all(group.limit_bytes > 0 and group.used_bytes >= 0 for group in read_memory_groups())
    assert all(cores > 0 for cores in read_core_quotas())
