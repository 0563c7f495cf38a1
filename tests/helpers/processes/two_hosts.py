"""Two hosts in network namespaces, joined by a third one that can cut, throttle and delay.

Each host has a name of its own and finds the other by it, as on two machines. What they send each
other passes a router: one that forwards nothing is a cable that is pulled, for no error comes back.
Kernels may lack `netem`, so what is to be late is held back by a small program between two of the
router's interfaces.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from helpers.processes import late_packets
from helpers.processes.commands import begin
from helpers.processes.hosts import Host
from helpers.processes.warm_commands import Command

HOSTS = ("gpx-a", "gpx-b")
ADDRESSES = {"gpx-a": "10.77.1.2", "gpx-b": "10.77.2.2"}
SUBNETS = {"gpx-a": "10.77.1", "gpx-b": "10.77.2"}
_ROUND_TRIP = """
import socket, sys, time
begun = time.monotonic()
try:
    socket.create_connection((sys.argv[1], 1), 10)
except ConnectionRefusedError:
    print(time.monotonic() - begun)
"""


class NotAllowed(Exception):
    """This system lets nobody make namespaces, or nobody throttle or hold back what passes them; or
    this user not."""


class Wire:
    """What joins the hosts. Made by `wire`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._late: subprocess.Popen[bytes] | None = None

    def namespace(self, host: str) -> str:
        return f"{self._name}-{host}"

    @property
    def router(self) -> str:
        return f"{self._name}-router"

    def on(self, host: str) -> list[str]:
        """What to write before a command, so that it runs on a host."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host]
        return ["ip", "netns", "exec", self.namespace(host), *named]

    def start(
        self, host: str, command: Sequence[str], folder: Path, env: Mapping[str, str], said: Path
    ) -> Command:
        """Run a command on a host, in a session of its own; `said` gets what it says."""
        enters = Host(host, self.namespace(host)).enter
        return begin(command, folder=folder, env=env, said=said, enters=enters)

    def cut(self) -> None:
        """Nothing passes any more."""
        self._forward(False)

    def mend(self) -> None:
        self._forward(True)

    def _forward(self, on: bool) -> None:
        _ip("netns", "exec", self.router, "sysctl", "-qw", f"net.ipv4.ip_forward={int(on)}")

    def throttle(self, bits_per_s: float) -> None:
        """In each direction.

        Raises:
            NotAllowed: the kernel cannot do that.
        """
        for host in HOSTS:
            rate = ["rate", f"{int(bits_per_s)}bit", "burst", "64kb", "latency", "200ms"]
            place = ["dev", _port(host), "root", "tbf"]
            _ip("netns", "exec", self.router, "tc", "qdisc", "replace", *place, *rate)

    def free(self) -> None:
        """As fast as it was before it was throttled."""
        for host in HOSTS:
            place = ["dev", _port(host), "root"]
            _ip("netns", "exec", self.router, "tc", "qdisc", "delete", *place)

    def bits_per_s(self, seconds: float) -> float:
        """What arrives at a host in so long a time from now on, the larger one of both, as the
        router's interfaces count it."""
        begun = time.monotonic()
        before = [self._sent_to(host) for host in HOSTS]
        time.sleep(seconds)
        sent = [self._sent_to(host) - had for host, had in zip(HOSTS, before)]
        return 8 * max(sent) / (time.monotonic() - begun)

    def _sent_to(self, host: str) -> int:
        """Bytes, so far."""
        (told,) = json.loads(_ip("-n", self.router, "-s", "-j", "link", "show", _port(host)))
        return int(told["stats64"]["tx"]["bytes"])

    def round_trip_s(self) -> float:
        """From the first host to the second and back: it refuses a connection."""
        there = ADDRESSES[HOSTS[1]]
        at = ["ip", "netns", "exec", self.namespace(HOSTS[0]), sys.executable, "-c", _ROUND_TRIP]
        told = subprocess.run([*at, there], capture_output=True, text=True, check=True)
        return float(told.stdout)

    def delay(self, seconds: float) -> None:
        """All packets, in each direction.

        Raises:
            NotAllowed: the kernel gives no interface to a program.
        """
        there = ["ip", "netns", "exec", self.router]
        self._late = subprocess.Popen(
            [*there, sys.executable, late_packets.__file__, str(seconds)], stdout=subprocess.PIPE
        )
        assert self._late.stdout is not None
        said = self._late.stdout.readline().decode().rstrip()
        if said.startswith(late_packets.NONE):
            raise NotAllowed(said)
        assert said == late_packets.READY
        for number, host in enumerate(HOSTS):
            table = str(100 + number)
            device = late_packets.held(number)
            _ip("-n", self.router, "link", "set", device, "up")
            _ip("-n", self.router, "route", "add", "default", "dev", device, "table", table)
            _ip("-n", self.router, "rule", "add", "iif", _port(host), "lookup", table)

    def close(self) -> None:
        if self._late is not None:
            self._late.kill()
            self._late.wait()
        for name in (*map(self.namespace, HOSTS), self.router):
            with suppress(NotAllowed):
                _ip("netns", "delete", name)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def _port(host: str) -> str:
    return f"to-{host}"


@contextmanager
def wire() -> Iterator[Wire]:
    """The hosts, joined, until the end.

    Raises:
        NotAllowed: here they cannot be made.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise NotAllowed("network namespaces are for root, with iproute2")
    made = Wire(f"gpx{os.getpid()}")
    try:
        _ip("netns", "add", made.router)
        for host in HOSTS:
            _join(made, host)
        made.mend()
        yield made
    finally:
        made.close()


def _join(made: Wire, host: str) -> None:
    space, subnet = made.namespace(host), SUBNETS[host]
    _ip("netns", "add", space)
    hosts = Path("/etc/netns") / space / "hosts"  # its /etc/hosts
    hosts.parent.mkdir(parents=True, exist_ok=True)
    known = "".join(f"{address} {name}\n" for name, address in ADDRESSES.items())
    hosts.write_text(f"127.0.0.1 localhost\n{known}")
    port = {"name": _port(host), "netns": made.router}
    peer = [word for item in port.items() for word in item]
    _ip("-n", space, "link", "add", "wire", "type", "veth", "peer", *peer)
    _ip("-n", space, "addr", "add", f"{ADDRESSES[host]}/24", "dev", "wire")
    _ip("-n", made.router, "addr", "add", f"{subnet}.1/24", "dev", _port(host))
    for name, device in ((space, "lo"), (space, "wire"), (made.router, _port(host))):
        _ip("-n", name, "link", "set", device, "up")
    _ip("-n", space, "route", "add", "default", "via", f"{subnet}.1")


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise NotAllowed(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def end(process: Command) -> None:
    """With all of its session."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
