"""A cluster of SLURM for tests: a controller and nodes, all of them on loopback of this machine.

Nobody proves who he is, so only what runs here may reach it; nodes have GPUs in name only.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from helpers.processes.ports import free_port

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
CONFIGURATION = """
ClusterName=tiny
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1
ReturnToService=2
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
GresTypes=gpu
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class NotHere(Exception):
    """There is no SLURM, or it does not start."""


@dataclass(frozen=True)
class Cluster:
    """`configuration` is what its commands go by."""

    configuration: Path

    def run(self, *words: str | Path, folder: Path, timeout_s: float = 90) -> str:
        """What a command of SLURM says; it must succeed."""
        done = subprocess.run(
            [str(word) for word in words],
            cwd=folder,
            env=os.environ | {"SLURM_CONF": str(self.configuration), "PATH": PATH},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr


@contextmanager
def cluster(folder: Path, nodes: Sequence[str]) -> Iterator[Cluster]:
    """Nodes that each have the GPUs of such words: `a100:8`, or `a100:3,t4:1`.

    Raises:
        NotHere: it is not installed, or does not start.
    """
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        raise NotHere(f"there is no {missing[0]}: apt-get install slurmctld slurmd slurm-client")
    if os.geteuid() != 0:
        raise NotHere("nodes of SLURM are for root")
    made = Cluster(_configure(folder, nodes))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        commands = [["slurmctld", "-D", "-c"]]
        commands += [["slurmd", "-D", "-N", f"n{number}"] for number in range(len(nodes))]
        for number, words in enumerate(commands):
            processes.append(
                subprocess.Popen(
                    words,
                    env=os.environ | {"SLURM_CONF": str(made.configuration), "PATH": PATH},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=(folder / f"said-{number}").open("w"),
                    start_new_session=True,
                )
            )
        _wait(made, folder, len(nodes))
        yield made
    finally:
        for process in reversed(processes):
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _configure(folder: Path, nodes: Sequence[str]) -> Path:
    (folder / "state").mkdir()
    host = socket.gethostname().partition(".")[0]
    text = CONFIGURATION.format(host=host, user="root", port=free_port(), folder=folder)
    gpus = []
    for number, words in enumerate(nodes):
        (folder / f"spool-n{number}").mkdir()
        kinds = [word.split(":") for word in words.split(",")]
        for kind, count in kinds:
            for gpu in range(int(count)):
                (folder / f"n{number}-{kind}{gpu}").touch()
            files = f"{folder}/n{number}-{kind}[0-{int(count) - 1}]"
            gpus.append(f"NodeName=n{number} Name=gpu Type={kind} File={files}")
        text += (
            f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} "
            f"CPUs=64 Gres={','.join(f'gpu:{kind}:{count}' for kind, count in kinds)}\n"
        )
    (folder / "gres.conf").write_text("\n".join(gpus) + "\n", encoding="utf-8")
    path = folder / "slurm.conf"
    path.write_text(text, encoding="utf-8")
    return path


def _wait(made: Cluster, folder: Path, nodes: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with suppress(AssertionError, subprocess.TimeoutExpired):
            told = made.run("sinfo", "-h", "-N", "-o", "%N %T", folder=folder, timeout_s=5)
            if told.count(" idle") == nodes:
                return
        time.sleep(0.2)
    said = "".join(path.read_text() for path in sorted(folder.glob("said-*")))
    raise NotHere(f"SLURM does not start here: {said[-500:]}")
