"""Under torchrun a process is a rank: the same losses, also with hosts of unequal size."""

from __future__ import annotations

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpumix.schema.errors import RankLost
from gpumix.schema.plan.plan import Plan
from gpumix.schema.profile.profile import Profile
from helpers.extended import every_second, left_out
from helpers.processes.commands import Done
from helpers.processes.ports import free_port
from helpers.runs.jobs import (
    CLUSTER,
    OWN_PROFILES,
    checkpoints,
    gpumix,
    metrics,
    plan_for,
    run,
    toy,
    train,
    write_job,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
GPUMIX_TRAIN = ["-m", "gpumix", "train", "job.yaml"]
# Each process imports torch anew: two are enough where their number proves nothing.
PAIR = [one | {"count": 1} for one in CLUSTER]
FIRST_RANKS_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
HALVES = {"samples": (4, 4), "shares": (0.5, 0.5)}


def torchrun(folder, *arguments: str, **settings: str) -> Done:
    return run([*TORCHRUN, *arguments], folder, {"OMP_NUM_THREADS": "1"} | settings, timeout_s=120)


def standalone(folder, processes: int, *arguments: str, restarts: int = 0, **settings: str) -> Done:
    mine = [
        "--standalone", "--nproc-per-node", str(processes), "--max-restarts", str(restarts),
        *GPUMIX_TRAIN,
    ]  # fmt: skip
    return torchrun(folder, *mine, *arguments, **settings)


def losses_by(plan: Plan, job, tmp_path) -> list[float]:
    """Without torchrun."""
    return train(job, f"output_dir={tmp_path / 'alone'}", plan=plan).losses


def test_torchrun_measures_plans_and_trains(tmp_path):
    job = write_job(tmp_path, cluster=PAIR, max_steps=4, **OWN_PROFILES)
    done = standalone(tmp_path, 2, "--json")
    assert done.code == 0, done.err
    summary = done.json()
    # One process speaks for all.
    assert done.err.count("torchrun's agents listen on all addresses of their hosts") == 1
    assert done.err.count("Plan (optimal).") == 1
    assert done.err.count("step 4/4") == 1
    plan = Plan.load(tmp_path / "run" / "plan.json")
    assert len(Profile.load(tmp_path / "run" / "profile.json").classes) == 2
    assert summary["losses"] == losses_by(plan, job, tmp_path)
    assert [r["loss"] for r in metrics(tmp_path / "run")] == summary["losses"]


# Hosts meet by gpumix's own way in `test_elastic_hosts` and `test_two_hosts` too.
MEETINGS = [(["gpumix"], (1, 2)), (["c10d", "--local-addr", "127.0.0.1"], (1, 1))]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("own", "processes"),
    left_out(MEETINGS, MEETINGS[:1]),
    ids=["gpumix", "c10d"],
)
def test_hosts_may_differ_in_devices_and_in_what_they_have_measured(tmp_path, own, processes):
    cluster = CLUSTER if sum(processes) > 2 else PAIR
    job = write_job(tmp_path, cluster=cluster, max_steps=4, **OWN_PROFILES)
    train(job, "max_steps=1", f"output_dir={tmp_path / 'first'}")
    meeting = ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-backend", *own]

    def host(processes: int, cache: str) -> Done:
        return torchrun(
            tmp_path, "--nnodes", "2", "--nproc-per-node", str(processes), *meeting,
            *GPUMIX_TRAIN, "--set", f"advanced.profile_cache={cache}",
        )  # fmt: skip

    said: list[bool] = []
    with ThreadPoolExecutor(2) as hosts:
        for done in hosts.map(host, processes, ("profiles", "nothing")):
            assert done.code == 0, done.err
            said.append("--rdzv-backend gpumix" in done.err)
    assert any(said) is (own != ["gpumix"])
    plan = Plan.load(tmp_path / "run" / "plan.json")
    assert [r["loss"] for r in metrics(tmp_path / "run")] == losses_by(plan, job, tmp_path)


@pytest.mark.extended
def test_the_first_rank_may_have_the_store_itself(tmp_path):
    """Then it is there until all others have told their errors. That runs end well by it too is
    shown below."""
    write_job(tmp_path, cluster=PAIR, model=toy(fault="raise", rank=0), **OWN_PROFILES)
    done = standalone(tmp_path, 2, **FIRST_RANKS_STORE)
    assert done.code == 1
    assert "no such token" in done.err
    assert "is gone" not in done.err


@pytest.mark.extended
def test_there_must_be_a_process_for_every_device(tmp_path):
    write_job(tmp_path, cluster=CLUSTER)
    done = standalone(tmp_path, 2)
    assert done.code != 0
    assert "the cluster has 3 devices, torchrun started 2 processes" in done.err
    assert "exitcode  : 2" in done.err  # torchrun's report of ours
    assert not (tmp_path / "run").exists()


@pytest.mark.extended  # without torchrun: `test_lost_ranks`
def test_a_stopped_rank_is_found_and_started_again_long_before_the_timeout(tmp_path):
    """The agents see only processes that end."""
    changes = {"cluster": PAIR, "max_steps": 8, "memory_save_steps": 1}
    sound = write_job(tmp_path / "sound", **changes)
    plan = plan_for(sound, **HALVES)
    expected = train(sound, plan=plan).losses
    harmed = toy(fault="stop", rank=1, at=4, once=str(tmp_path / "stopped"))
    write_job(tmp_path, model=harmed, timeout=3600, **changes)
    plan.save(tmp_path / "plan.json")
    done = torchrun(
        tmp_path, "--standalone", "--nproc-per-node", "2", "--max-restarts", "2", *GPUMIX_TRAIN,
        "--plan", "plan.json",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "rank 1 (device 'small-0' on " in done.err
    assert "its process was stopped (SIGSTOP)" in done.err
    run = tmp_path / "run"
    assert [one["loss"] for one in metrics(run)] == pytest.approx(expected, rel=1e-6)
    assert [one["resumed_from"] in (2, 3) for one in metrics(run, "restart")] == [True]


@pytest.mark.extended  # without torchrun: `test_recovery`
@pytest.mark.parametrize("resume", [True, False])
def test_what_a_killed_run_left_in_memory_is_of_the_run_that_is_resumed(tmp_path, resume):
    """Not of one that begins anew in its place; also if a rank is lost before there is more."""
    changes = {"cluster": PAIR, "max_steps": 8, "memory_save_steps": 1}
    sound = write_job(tmp_path / "sound", **changes)
    plan = plan_for(sound, **HALVES)
    expected = train(sound, plan=plan).losses
    once = tmp_path / "killed"
    once.touch()
    changes["data"] = {
        "factory": "toys:deadly_tokens",
        "arguments": {"once": str(once)},
        "validation_split": 0.1,
    }
    killed = write_job(tmp_path, model=toy(fault="kill", rank=1, at=6), **changes)
    with pytest.raises(RankLost):
        train(killed, plan=plan)
    run = tmp_path / "run"
    if not resume:
        shutil.rmtree(run)
    once.unlink()
    write_job(tmp_path, **changes)
    plan.save(tmp_path / "plan.json")
    wanted = ["--resume"] if resume else []
    done = standalone(tmp_path, 2, "--plan", "plan.json", *wanted, restarts=1)
    assert done.code == 0, done.err
    (restart,) = metrics(run, "restart")
    assert restart["why"] and restart["decided"]
    assert restart["kept_in"] == ("memory" if resume else "")
    assert restart["resumed_from"] in ((4, 5) if resume else (0,))
    assert [one["loss"] for one in metrics(run)] == pytest.approx(expected, rel=1e-6)


def test_a_run_is_begun_anew_by_who_starts_it_from_the_same_process(tmp_path):
    """Ranks that a shell, or a job of a cluster, gives their places have no agent: what the same
    one starts next is another run, which does not go on unasked from what is there."""
    job = write_job(tmp_path, cluster=CLUSTER[:1], max_steps=2)
    plan_for(job, (8,), (1.0,)).save(tmp_path / "plan.json")
    place = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }

    def start() -> Done:
        return gpumix("train", "job.yaml", "--plan", "plan.json", folder=tmp_path, env=place)

    first = start()
    assert first.code == 0, first.err
    again = start()
    assert again.code == 2
    assert "the output folder holds the checkpoints of an earlier run" in again.err


WIDE = {"model": toy(width=256), "optimizer": {"lr": 1e-4}, "max_steps": 6}


@pytest.fixture(scope="module")
def roomy(tmp_path_factory) -> list[float]:
    """The losses of wide models that have memory enough."""
    job = write_job(tmp_path_factory.mktemp("roomy"), cluster=PAIR, **WIDE)
    return train(job, plan=plan_for(job, **HALVES)).losses


@pytest.mark.extended
@pytest.mark.parametrize("store", every_second(["of the agent", "of the first rank"]))
def test_ranks_that_are_out_of_memory_begin_anew(roomy, tmp_path, store):
    """torchrun, which was told of no restarts, takes no notice; no step is lost."""
    big, small = PAIR
    cluster = [big, small | {"memory": "6 MiB"}]
    job = write_job(tmp_path, cluster=cluster, max_restarts=3, **WIDE)
    plan_for(job, (4, 4), (0.2, 0.8)).save(tmp_path / "tight.json")
    own = {} if store == "of the agent" else FIRST_RANKS_STORE
    done = standalone(tmp_path, 2, "--plan", "tight.json", **own)
    assert done.code == 0, done.err
    assert "planning again, with" in done.err
    run = tmp_path / "run"
    assert [one["loss"] for one in metrics(run)] == pytest.approx(roomy, rel=1e-6)
    assert [one["why"] for one in metrics(run, "restart")] == ["out of memory"]
    assert Plan.load(run / "plan.json").stages != Plan.load(tmp_path / "tight.json").stages


@pytest.mark.extended
def test_ranks_that_begin_anew_after_they_were_asked_to_stop_save_and_end(roomy, tmp_path):
    fault = toy(width=256, fault="terminate-and-oom", rank=0, at=3, once=str(tmp_path / "once"))
    job = write_job(tmp_path, cluster=PAIR, max_restarts=3, **WIDE | {"model": fault})
    plan_for(job, **HALVES).save(tmp_path / "plan.json")
    done = standalone(tmp_path, 2, "--plan", "plan.json")
    assert "planning again, with" in done.err, done.err
    assert "stopped after step" in done.err
    losses = [one["loss"] for one in metrics(tmp_path / "run")]
    assert len(losses) in (3, 4) and losses == pytest.approx(roomy[: len(losses)], rel=1e-6)
    assert checkpoints(tmp_path / "run") == [f"step-{len(losses):08d}"]


@pytest.mark.extended
def test_a_device_whose_rank_is_lost_again_and_again_is_left_out(tmp_path):
    """Its process, which has spoken for all and has their store, waits for the others."""
    changes = {"strategy": "even", "max_steps": 6, "optimizer": {"lr": 1e-4}, "max_restarts": 3}
    sound = write_job(tmp_path / "sound", **changes)
    plan = plan_for(sound)
    expected = train(sound, plan=plan).losses
    write_job(tmp_path, model=toy(fault="kill", place=0, at=1), **changes)
    plan.save(tmp_path / "plan.json")
    done = standalone(tmp_path, 3, "--plan", "plan.json", "--json", restarts=2, **FIRST_RANKS_STORE)
    assert done.code == 0, done.err
    assert json.loads(done.out.splitlines()[-1])["steps"] == 6
    assert done.err.count("left out: big-0; their ranks wait for the end") == 1
    run = tmp_path / "run"
    assert [one["step"] for one in metrics(run)] == list(range(1, 7))
    assert [one["loss"] for one in metrics(run)] == pytest.approx(expected, rel=1e-4)
    workers = Plan.load(run / "plan.json").workers
    assert [worker.device for worker in workers] == ["small-0", "small-1"]
    told = "device 'big-0' is left out: its rank was lost 2 times in a row"
    assert metrics(run, "restart")[-1]["decided"] == told
