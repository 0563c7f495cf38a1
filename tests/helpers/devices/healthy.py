"""A cluster that lacks nothing, made by hand, and ways to spoil it: two hosts of two RTX 3090."""

from __future__ import annotations

from typing import Any

from gpumix.check.facts.cluster import (
    ClockOffset,
    FolderFacts,
    GpuSpeed,
    HostFacts,
    JobFacts,
    JobHostFacts,
    PairFacts,
    ProcessLimits,
    RankFacts,
    Software,
    Survey,
)
from gpumix.check.finding import Finding, Severity
from gpumix.check.judge import evaluate_survey
from gpumix.hardware.discovery.gpu_health import GpuHealth

GIB = 2**30
HOSTS = ("host-a", "host-b")
SOFTWARE = Software(
    gpumix="0.1.0",
    torch="2.13.0+cu128",
    python="3.12.3",
    cuda="12.8",
    nccl="2.27.3",
    transformers="5.1.0",
    driver="570.86.10",
    driver_cuda="12.8",
    arches=("sm_75", "sm_80", "sm_86", "sm_90", "compute_90"),
)
HOST = HostFacts(
    software=SOFTWARE,
    memory_bytes=128 * GIB,
    available_bytes=100 * GIB,
    cores=16,
    shm_free_bytes=60 * GIB,
    limits=ProcessLimits(open_files=65536, most_open_files=65536, processes=100_000),
    rdma=(),
    interfaces=("lo", "eth0", "ib0"),
    address="10.0.0.1",
    folders=(
        FolderFacts(role="output", path="/shared/run", free_bytes=100 * GIB),
        FolderFacts(role="cache", path="/root/.cache/gpumix", free_bytes=100 * GIB),
    ),
)
HEALTH = GpuHealth(
    index=0,
    memory_bytes=24 * GIB,
    used_bytes=2**24,
    most_link=(4, 16),
    uncorrected=0,
    pages_pending=False,
    remap_failed=False,
    persistent=True,
    power_watts=(350.0, 350.0),
)
SPEED = GpuSpeed(
    dtype="bfloat16",
    flops_per_s=60e12,
    memory_bytes_per_s=830e9,
    link=(4, 16),
    host_bytes_per_s=25e9,
)


def rank_of(number: int, **changes: Any) -> RankFacts:
    values = {
        "rank": number,
        "host": HOSTS[number // 2],
        "device": f"GPU-{number}",
        "device_class": "rtx-3090",
        "accelerator": "cuda",
        "product": "NVIDIA GeForce RTX 3090",
        "capability": "8.6",
        "job": "one",
        "health": HEALTH.model_copy(update={"index": number % 2}),
        "speed": SPEED,
    }
    return RankFacts(**values | changes)


def pair_of(one: int, other: int, **changes: Any) -> PairFacts:
    values = {"latency_s": 2e-5, "message_bytes": 2**26, "message_s": 2**26 / 20e9}
    return PairFacts(ranks=(one, other), **values | changes)


def emulated(number: int) -> RankFacts:
    return rank_of(
        number,
        device=f"small-{number}",
        device_class="small",
        accelerator="cpu",
        product="",
        capability="",
        emulated=True,
        health=None,
        speed=None,
    )


PAIRS = (pair_of(0, 1), pair_of(2, 3), pair_of(0, 2, message_s=2**26 / 3e9))
JOB = JobFacts(
    checkpoint_bytes=12 * GIB,
    checkpoints=3,
    copies=4,
    on_hosts={host: JobHostFacts(data="3 files, abc", shared=True) for host in HOSTS},
)
HEALTHY = Survey(
    ranks=tuple(rank_of(number) for number in range(4)),
    hosts=dict.fromkeys(HOSTS, HOST),
    pairs=PAIRS,
    clocks=(ClockOffset(host="host-b", ahead_s=0.002, give_or_take_s=0.001),),
    job=JOB,
)


def with_host(**changes: Any) -> Survey:
    """The second host is different."""
    return HEALTHY.model_copy(
        update={"hosts": {"host-a": HOST, "host-b": HOST.model_copy(update=changes)}}
    )


def with_software(**changes: Any) -> Survey:
    return with_host(software=SOFTWARE.model_copy(update=changes))


def with_rank(number: int, **changes: Any) -> Survey:
    ranks = list(HEALTHY.ranks)
    ranks[number] = ranks[number].model_copy(update=changes)
    return HEALTHY.model_copy(update={"ranks": tuple(ranks)})


def with_health(**changes: Any) -> Survey:
    health = HEALTHY.ranks[3].health
    assert health is not None
    return with_rank(3, health=health.model_copy(update=changes))


def with_speed(**changes: Any) -> Survey:
    return with_rank(3, speed=SPEED.model_copy(update=changes))


def with_pairs(*pairs: PairFacts, **changes: Any) -> Survey:
    return HEALTHY.model_copy(update={"pairs": pairs, **changes})


def with_job(**changes: Any) -> Survey:
    """What the second host has of the job is different."""
    on_hosts = {
        "host-a": JOB.on_hosts["host-a"],
        "host-b": JOB.on_hosts["host-b"].model_copy(update=changes),
    }
    return HEALTHY.model_copy(update={"job": JOB.model_copy(update={"on_hosts": on_hosts})})


def wrong(survey: Survey) -> list[Finding]:
    """What is found beside what is fine."""
    return [one for one in evaluate_survey(survey) if one.severity is not Severity.OK]


def only(survey: Survey) -> Finding:
    """The one thing that is wrong; it has a fix."""
    (found,) = wrong(survey)
    assert found.fix
    return found
