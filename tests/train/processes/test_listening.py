"""What the processes of a run listen at while it trains, as the kernel tells it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import pytest

from helpers.extended import left_out
from helpers.processes.commands import begin
from helpers.processes.hosts import Host
from helpers.processes.ports import free_port
from helpers.processes.warm_commands import Command
from helpers.runs.jobs import PAIR, environment, metrics, plan_for, toy, write_job

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="names of hosts are for root")

SETTINGS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LISTENS = "0A"  # TCP_LISTEN of the kernel
GPUMIX = ("-m", "gpumix", "train", "job.yaml", "--plan", "plan.json")
STARTS = {
    "gpumix": GPUMIX,
    "torchrun": (
        "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2",
        "--rdzv-backend", "gpumix", "--rdzv-id", "listening", "--rdzv-conf", "is_host=true",
        "--rdzv-endpoint", "127.0.0.1:{port}",
        *GPUMIX,
    ),
}  # fmt: skip


@pytest.mark.parametrize("start", left_out(STARTS, ("torchrun",)))
def test_a_run_on_one_host_listens_on_loopback_alone(tmp_path, start):
    """Nothing in its environment says so, and its host's name stands for an address outside."""
    outside = own_address()
    if outside is None:
        pytest.skip("this host has no address but loopback")
    job = write_job(tmp_path, cluster=PAIR, model=toy(rank=0, sample_s=0.05))
    plan_for(job, (4, 4), (0.5, 0.5)).save(tmp_path / "plan.json")
    port = free_port()
    words = [sys.executable, *(word.format(port=port) for word in STARTS[start])]
    env = {k: v for k, v in environment(tmp_path).items() if k not in SETTINGS}
    command = begin(
        words,
        folder=tmp_path,
        env=env | {"OMP_NUM_THREADS": "1"},
        said=tmp_path / "said",
        enters=Host(outside).enter,
    )
    seen: set[tuple[int, IPv4Address | IPv6Address]] = set()
    try:
        while command.poll() is None:
            seen |= set(listening(command))
            time.sleep(0.1)
    finally:
        command.send_signal(signal.SIGTERM)
        command.wait(60)
    said = (tmp_path / "said").read_text()
    assert command.poll() == 0 and len(metrics(tmp_path / "run")) == 6, said
    assert len({process for process, _ in seen}) >= 2  # the ranks, of gloo
    assert all(address.is_loopback for _, address in seen), seen


def own_address() -> str | None:
    """This host's, as others know it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line, suppress(OSError):
        line.connect(("192.0.2.1", 9))  # sends nothing
        return str(line.getsockname()[0])
    return None


def listening(command: Command) -> Iterator[tuple[int, IPv4Address | IPv6Address]]:
    """The addresses that a command and all that it began listen at, with the process of each."""
    addresses = dict(listened_at())
    processes = [command.pid]
    for process in processes:
        with suppress(OSError):  # it ends just then
            for task in Path(f"/proc/{process}/task").iterdir():
                processes += map(int, (task / "children").read_text(encoding="ascii").split())
            for open_file in Path(f"/proc/{process}/fd").iterdir():
                with suppress(OSError):
                    inode = str(open_file.readlink()).removeprefix("socket:[").removesuffix("]")
                    if inode in addresses:
                        yield process, addresses[inode]


def listened_at() -> Iterator[tuple[str, IPv4Address | IPv6Address]]:
    """The inode of each socket of this host that listens, and where it does."""
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            row = line.split()
            if row[3] != LISTENS:
                continue
            words = bytes.fromhex(row[1].partition(":")[0])  # of four bytes, each the wrong way
            turned = b"".join(words[n : n + 4][::-1] for n in range(0, len(words), 4))
            address = ip_address(turned)
            mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
            yield row[9], mapped or address
