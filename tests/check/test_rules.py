"""What is wrong is found, with its fix, and nothing is found on a cluster that lacks nothing."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations

import pytest

from gpumix.check.facts.cluster import ClockOffset, FolderFacts, PairFacts, ProcessLimits, RankFacts
from gpumix.check.finding import Finding, Severity
from gpumix.check.judge import CHECKS, evaluate_survey
from gpumix.check.rules.links import check_links
from gpumix.check.rules.software import get_kernel_support
from gpumix.schema.cluster.network import Network, parse_link
from helpers.devices.healthy import (
    GIB,
    HEALTHY,
    HOST,
    HOSTS,
    JOB,
    emulated,
    only,
    pair_of,
    with_health,
    with_host,
    with_job,
    with_pairs,
    with_rank,
    with_software,
    with_speed,
    wrong,
)

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE
LOW = FolderFacts(role="output", path="/shared/run", free_bytes=30 * GIB)
SHUT = FolderFacts(role="output", path="/shared/run", refusal="Permission denied")
FULL = FolderFacts(role="cache", path="/root/.cache/gpumix", free_bytes=2**20)


def test_a_cluster_that_lacks_nothing_has_one_line_for_each_check():
    found = evaluate_survey(HEALTHY)
    assert {one.severity for one in found} == {Severity.OK}
    silent = {"settings"}  # nothing is set
    assert {one.check for one in found} == {check.name for check in CHECKS} - silent
    assert len(found) == len(CHECKS) - len(silent)


def test_numbers_stand_beside_what_is_fine():
    links = next(one for one in evaluate_survey(HEALTHY) if one.check == "links")
    assert links.measured["ranks 0 and 1 bytes_per_s"] == pytest.approx(20e9)
    assert links.what == (
        "2 pairs inside hosts, the slowest 20 GB/s and 0.02 ms; "
        "1 pair between hosts, the slowest 3 GB/s and 0.02 ms"
    )


def test_judging_does_not_import_torch():
    code = "import sys, gpumix.check.judge; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("survey", "check", "severity", "said", "fix"),
    [
        (with_rank(2, trouble="gone", fix="look there"), "ranks", ERROR, "gone", "look there"),
        (with_rank(2, job="other"), "ranks", ERROR, "its job is not that of host-a", "same job"),
        (with_software(torch="2.12.0"), "versions", ERROR, "torch is 2.12.0, on host-a 2.13.0",
         "pip install torch==2.13.0"),
        (with_rank(2, device="GPU-0"), "ranks", ERROR, "rank 2 has the device of rank 0",
         "one process per device"),
        (with_software(nccl="2.26.2"), "versions", ERROR, "nccl is 2.26.2", "wheel"),
        (with_software(transformers=""), "versions", WARNING, "not there", "transformers==5.1.0"),
        (with_software(python="3.11.9"), "versions", NOTE, "python is 3.11.9", "one version"),
        (with_software(driver="560.1"), "versions", ERROR, "has driver 560.1, on host-a 570",
         "install driver 570"),
        (with_software(driver_cuda="11.8"), "driver", ERROR, "CUDA 11.8 and older", "newer driver"),
        (with_health(uncorrected=2), "gpus", WARNING, "2 memory errors", "nvidia-smi -q -d ECC"),
        (with_health(pages_pending=True), "gpus", WARNING, "next reset", "nvidia-smi -r -i 1"),
        (with_health(remap_failed=True), "gpus", ERROR, "none left", "replaced"),
        (with_health(prohibited=True), "gpus", ERROR, "compute mode", "-i 1 -c DEFAULT"),
        (with_health(persistent=False), "gpus", NOTE, "unloads", "nvidia-smi -pm 1"),
        (with_health(power_watts=(250.0, 350.0)), "gpus", NOTE, "250 W, it came with 350 W",
         "-pl 350"),
        (with_health(used_bytes=9 * GIB, others=((77, 8 * GIB), (78, GIB))), "gpus", WARNING,
         "9.0 GiB of its 24.0 GiB are taken by processes 77 78", "kill 77 78"),
        (with_health(used_bytes=9 * GIB), "gpus", WARNING, "somebody else", "on the host"),
        (with_speed(flops_per_s=40e12), "speed", WARNING,
         "compute 40 TFLOP/s, others of its class 60 TFLOP/s", "CLOCK"),
        (with_speed(flops_per_s=40e12, reasons=0x20), "speed", WARNING, "too warm", "cooling"),
        (with_speed(memory_bytes_per_s=500e9), "speed", WARNING, "memory 500 GB/s", "nvidia-smi"),
        (with_speed(host_bytes_per_s=6e9), "speed", WARNING, "host link 6 GB/s", "slot"),
        (with_speed(reasons=0x80), "speed", WARNING, "throttled: an external power brake", "power"),
        (with_speed(link=(4, 4)), "speed", WARNING, "4 lanes, the card 16", "slot"),
        (with_speed(link=(4, 8)), "speed", NOTE, "8 lanes, the card 16", "BIOS"),
        (with_speed(link=(1, 16)), "speed", WARNING, "generation 1, card and slot could have 4",
         "BIOS"),
        (with_host(address="127.0.1.1"), "links", WARNING, "stands for 127.0.1.1", "/etc/hosts"),
        (with_host(settings={"NCCL_P2P_DISABLE": "1"}, address="10.0.0.2"), "settings", None, "",
         "unset NCCL_P2P_DISABLE"),
        (with_host(settings={"CUDA_LAUNCH_BLOCKING": "1"}), "settings", WARNING, "each kernel",
         "unset CUDA_LAUNCH_BLOCKING"),
        (with_host(settings={"GLOO_SOCKET_IFNAME": "eth7"}), "settings", ERROR,
         "GLOO_SOCKET_IFNAME=eth7 names no interface", "lo, eth0, ib0"),
        (with_host(settings={"NCCL_ALGO": "Ring"}), "settings", WARNING,
         "NCCL_ALGO is Ring, on host-a not set", "alike on all hosts"),
        (with_host(limits=ProcessLimits(open_files=1024, most_open_files=65536)), "limits", WARNING,
         "1024 files", "ulimit -n 65536"),
        (with_host(limits=ProcessLimits(open_files=1024, most_open_files=1024)), "limits", WARNING,
         "1024 files", "limits.conf"),
        (with_host(limits=ProcessLimits(processes=500)), "limits", WARNING,
         "500 processes", "ulimit -u"),
        (with_host(limits=ProcessLimits(locked_bytes=65536), rdma=("mlx5_0",)), "limits", WARNING,
         "mlx5_0", "memlock=-1"),
        (with_host(cores=1), "cores", WARNING, "1 cores for 2 processes", "--cpus"),
        (with_host(available_bytes=GIB), "memory", WARNING, "1.0 GiB of its memory", "--memory"),
        (with_host(available_bytes=8 * GIB), "memory", NOTE, "training waits", "save_steps"),
        (with_host(available_bytes=40 * GIB), "memory", NOTE, "its last checkpoint", "--memory"),
        (with_host(shm_free_bytes=2**26), "shared memory", WARNING, "64.0 MiB are free",
         "--shm-size="),
        (with_host(shm_free_bytes=GIB), "shared memory", NOTE, "copies of the state",
         "--shm-size="),
        (with_host(folders=(LOW,)), "disk", ERROR,
         "30.0 GiB are free for /shared/run, 3 checkpoints of 12.0 GiB take 36.0 GiB",
         "output_dir="),
        (with_host(folders=(SHUT,)), "disk", ERROR, "Permission denied", "write elsewhere"),
        (with_host(folders=(FULL,)), "disk", WARNING, "1.0 MiB are free", "XDG_CACHE_HOME"),
        (with_job(shared=False), "disk", ERROR, "does not see", "all hosts share"),
        (with_job(missing={"datasets": "pip install datasets"}), "packages", ERROR,
         "needs datasets", "pip install datasets"),
        (with_job(trouble={"data": ("no such file", "look")}), "data", ERROR, "no such file",
         "look"),
        (with_job(trouble={"model": ("too few positions", "raise them")}), "model", ERROR,
         "too few positions", "raise them"),
        (with_job(data="2 files, xyz"), "data", ERROR, "2 files, xyz, those of host-a 3 files, abc",
         "same data files"),
        (with_job(slow="no answer within 8 s"), "data", NOTE, "no answer within 8 s", "the disk"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_found_with_its_fix(survey, check, severity, said, fix):
    found = [one for one in wrong(survey) if one.check == check]
    assert any(
        said in one.what and fix in one.fix and severity in (None, one.severity) for one in found
    ), found
    # Nothing else is, but what the same number causes.
    assert {one.check for one in wrong(survey)} <= {check, "memory", "shared memory"}
    assert all(one.host in ("", "host-b") for one in found)


# -- what is not wrong -----------------------------------------------------------------------------


def test_drivers_may_differ_where_the_job_names_its_classes():
    survey = with_software(driver="560.1")
    survey = survey.model_copy(update={"job": JOB.model_copy(update={"named_cluster": True})})
    assert only(survey).severity is NOTE


def test_patches_of_python_and_a_newer_driver_are_fine():
    assert wrong(with_software(python="3.12.9")) == []
    assert wrong(with_software(driver_cuda="13.0")) == []
    assert wrong(with_software(driver_cuda="12.2")) == []  # one major version is enough


@pytest.mark.parametrize(
    ("arches", "capability", "how"),
    [
        (("sm_80", "sm_86"), "8.6", "own"),
        (("sm_80",), "8.9", "own"),  # of one major version kernels run from their minor on
        (("sm_89",), "8.6", "none"),
        (("sm_80", "compute_80"), "9.0", "made"),
        (("sm_80", "compute_80"), "7.5", "none"),
        (("sm_75", "sm_80"), "6.1", "none"),
        (("sm_90a",), "9.0", "own"),
        (("sm_100a",), "10.3", "none"),  # a letter: for just that one
        (("sm_120",), "12.0", "own"),
        (("compute_90a",), "12.0", "none"),
    ],
)
def test_which_cards_a_wheel_has_kernels_for(arches, capability, how):
    assert get_kernel_support(arches, capability) == how


def test_a_card_that_the_wheel_has_no_kernels_for():
    ranks = (*HEALTHY.ranks[:3], HEALTHY.ranks[3].model_copy(update={"capability": "6.1"}))
    found = only(HEALTHY.model_copy(update={"ranks": ranks}))
    assert (found.check, found.severity, found.device) == ("kernels", ERROR, "GPU-3")
    assert "compute capability 6.1, torch has sm_75 sm_80" in found.what


def test_a_wheel_without_cuda():
    hosts = {
        host: HOST.model_copy(
            update={"software": HOST.software.model_copy(update={"cuda": "", "arches": ()})}
        )
        for host in HOSTS
    }
    found = wrong(HEALTHY.model_copy(update={"hosts": hosts}))
    assert [one.check for one in found] == ["driver", "driver"]
    assert "has no CUDA built in" in found[0].what


def test_a_card_alone_is_held_against_its_datasheet():
    ranks = (HEALTHY.ranks[0].model_copy(update={"speed": with_speed().ranks[3].speed}),)
    alone = HEALTHY.model_copy(
        update={"ranks": ranks, "hosts": {"host-a": HOST}, "pairs": (), "clocks": ()}
    )
    assert wrong(alone) == []
    assert ranks[0].speed is not None
    slow = ranks[0].speed.model_copy(update={"memory_bytes_per_s": 300e9})
    found = only(alone.model_copy(update={"ranks": (ranks[0].model_copy(update={"speed": slow}),)}))
    assert "memory 300 GB/s, its datasheet says 936 GB/s" in found.what


def test_unlike_classes_are_not_compared():
    slow = with_speed(flops_per_s=10e12, memory_bytes_per_s=300e9).ranks[3].speed
    other = {"device_class": "p40", "product": "", "speed": slow}
    assert wrong(with_rank(3, **other)) == []


def test_clocks_that_differ_by_less_than_is_known_do_not_count():
    def with_clock(ahead_s: float, sure_s: float):
        clock = ClockOffset(host="host-b", ahead_s=ahead_s, give_or_take_s=sure_s)
        return HEALTHY.model_copy(update={"clocks": (clock,)})

    assert wrong(with_clock(1.2, 0.5)) == []
    found = only(with_clock(-7.0, 0.002))
    assert found.severity is WARNING
    assert "7.0 s behind that of host-a, give or take 2.00 ms" in found.what
    assert "set-ntp" in found.fix


def test_what_is_of_gpus_is_not_said_of_emulated_devices():
    """Nor what hosts that are one machine share."""
    hosts = dict.fromkeys(HOSTS, HOST.model_copy(update={"cores": 1, "address": "127.0.1.1"}))
    survey = HEALTHY.model_copy(
        update={"ranks": tuple(map(emulated, range(4))), "hosts": hosts, "clocks": ()}
    )
    found = evaluate_survey(survey)
    assert {one.severity for one in found} == {Severity.OK}
    assert not {"driver", "kernels", "gpus", "speed", "cores", "clocks"} & {f.check for f in found}


def test_what_is_emulated_is_said_to_be_on_this_machine_with_its_hosts():
    def told(*ranks: RankFacts) -> dict[str, str]:
        survey = HEALTHY.model_copy(update={"ranks": ranks, "clocks": ()})
        return {one.check: one.what for one in evaluate_survey(survey)}

    there = tuple(map(emulated, range(4)))
    every = told(*there)
    assert every["ranks"] == "4 x small answer, emulated on this machine, as if on 2 hosts"
    assert every["links"] == "3 pairs inside this machine, the slowest 3 GB/s and 0.02 ms"
    some = told(there[0].model_copy(update={"emulated": False}), *there[1:])
    assert "answer, 3 of them emulated on this machine" in some["ranks"]


def test_emulated_devices_fit_into_this_machine_together():
    def found(gib: float) -> list[Finding]:
        ranks = [emulated(n).model_copy(update={"memory_bytes": int(gib * GIB)}) for n in range(4)]
        return wrong(HEALTHY.model_copy(update={"ranks": tuple(ranks), "clocks": ()}))

    free = HOST.available_bytes / GIB
    assert not [one for one in found(free / 4) if one.check == "memory"]
    (one,) = (one for one in found(free / 2) if one.check == "memory")
    assert one.severity is WARNING
    assert f"may take {2 * free:.1f} GiB together, {free:.1f} GiB of this machine's" in one.what


def test_checkpoints_that_are_there_are_counted():
    survey = with_host(folders=(LOW,))
    assert only(survey).check == "disk"
    job = JOB.model_copy(update={"saved_bytes": 12 * GIB})
    assert wrong(survey.model_copy(update={"job": job})) == []


# -- links -----------------------------------------------------------------------------------------


def test_a_pair_of_hosts_that_does_not_meet_is_named():
    found = only(with_pairs(pair_of(0, 1), pair_of(2, 3), pair_of(0, 2, trouble="timed out")))
    assert found.severity is ERROR
    assert found.what == (
        "rank 0 on host-a and rank 2 on host-b: they do not reach each other (timed out)"
    )
    assert "open all ports" in found.fix and "NCCL_SOCKET_IFNAME=eth0" in found.fix


def test_who_hangs_is_named_in_its_pair():
    hung = pair_of(0, 1, trouble="no answer within 8 s", silent=(1,))
    found = only(with_pairs(hung, pair_of(1, 2), pair_of(2, 3)))
    assert "rank 1 does not answer (no answer within 8 s)" in found.what


def test_a_rank_that_nobody_reaches_is_told_once():
    failed = [pair_of(a, b, trouble="timed out") for a, b in ((0, 3), (1, 3), (2, 3))]
    found = only(with_pairs(pair_of(0, 1), pair_of(1, 2), *failed))
    assert (found.device, found.host, found.severity) == ("GPU-3", "host-b", ERROR)
    assert "does not reach any other" in found.what


def test_where_nobody_reaches_anybody_each_pair_is_named():
    pairs = [pair_of(0, 1, trouble="timed out"), pair_of(2, 3, trouble="timed out")]
    assert len(wrong(with_pairs(*pairs))) == 2


def test_a_link_is_held_against_what_the_cluster_file_says():
    network = Network(between=parse_link("100GbE"))
    assert wrong(HEALTHY) == []
    found = only(with_pairs(pair_of(0, 2, message_s=2**26 / 3e9), network=network))
    assert found.severity is WARNING
    assert "move 3 GB/s, 100GbE should give 10.6 GB/s" in found.what
    assert "ethtool" in found.fix
    assert found.measured["bytes_per_s"] == pytest.approx(3e9)
    slower = Network(between=parse_link("25GbE"))
    assert wrong(with_pairs(pair_of(0, 2, message_s=2**26 / 3e9), network=slower)) == []


def test_a_link_inside_a_host_is_held_against_the_datasheet():
    found = only(with_pairs(pair_of(0, 1, message_s=2**26 / 3e9)))
    assert "PCIe 4.0 x16 should give 23.6 GB/s" in found.what and "topo -m" in found.fix


def test_a_link_is_held_against_its_like():
    rates = (9e9, 9e9, 3e9)
    pairs = [
        pair_of(a, b, message_s=2**26 / rate)
        for (a, b), rate in zip(((0, 2), (0, 3), (1, 2)), rates)
    ]
    found = only(with_pairs(*pairs))
    assert "rank 1 on host-a and rank 2 on host-b move 3 GB/s" in found.what
    assert "pairs of the same classes 9 GB/s" in found.what


def test_pairs_that_time_was_too_short_for_are_told():
    found = only(HEALTHY.model_copy(update={"untried": 5}))
    assert found.severity is NOTE and found.what.startswith("5 of 8 pairs were not tried")


def test_two_ranks_that_reach_nobody_are_both_named_and_no_gpu_is_blamed():
    """The pair of the two is a trouble of both; a busy host of CPUs has no nvidia-smi."""
    lost = {0, 1}
    pairs = tuple(
        PairFacts(
            ranks=pair,
            trouble="no answer within 3 s" if lost & set(pair) else "",
            silent=tuple(lost & set(pair)),
        )
        for pair in combinations(range(len(HEALTHY.ranks)), 2)
    )
    cpus = tuple(rank.model_copy(update={"accelerator": "cpu"}) for rank in HEALTHY.ranks)
    for ranks, said in ((HEALTHY.ranks, "nvidia-smi"), (cpus, "busy")):
        found = list(check_links(HEALTHY.model_copy(update={"pairs": pairs, "ranks": ranks})))
        wrong = [one for one in found if one.severity is ERROR]
        assert [one.device for one in wrong] == [HEALTHY.ranks[rank].device for rank in lost]
        assert all(said in one.fix for one in wrong)
