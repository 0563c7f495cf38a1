"""Hosts for tests: a server of ssh on loopback, with keys that are thrown away.

Nothing of the user's own is read or written: the client has a configuration of its own, and what is
connected is known by it alone.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# Both are addresses of loopback. The last two are no hosts: nobody listens, nobody answers.
ADDRESSES = {"gpx-a": "127.0.0.1", "gpx-b": "127.0.0.2"}
CLOSED, SILENT, STRANGE, LOCKED = "gpx-closed", "gpx-silent", "gpx-strange", "gpx-locked"


class NotHere(Exception):
    """There is no sshd."""


@dataclass(frozen=True)
class Hosts:
    """`config` is that of the client; `pid` the server's process."""

    config: Path
    pid: int

    @property
    def ssh(self) -> str:
        return f"ssh -F {self.config}"

    def connections(self) -> set[int]:
        """Processes of the server that serve somebody."""
        listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True)
        pairs = [map(int, line.split()) for line in listed.stdout.splitlines()]
        return {pid for pid, parent in pairs if parent == self.pid}


@contextmanager
def hosts(folder: Path) -> Iterator[Hosts]:
    """The server, until the end.

    Raises:
        NotHere: it is not installed, or does not start.
    """
    program = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if program is None or shutil.which("ssh-keygen") is None:
        raise NotHere("there is no sshd: apt-get install openssh-server")
    for key in ("host", "user", "other"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(words, check=True)
    folder.chmod(0o700)
    with socket.create_server(("127.0.0.1", 0)) as free, socket.socket() as silent:
        port = free.getsockname()[1]
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # takes connections, and says nothing
        free.close()
        config = _client(folder, port, silent.getsockname()[1])
        server = subprocess.Popen(
            [program, "-D", "-e", "-f", _server(folder, port)],
            stdin=subprocess.DEVNULL,
            stderr=(folder / "said").open("w"),
        )
        try:
            _wait(server, port, folder / "said")
            yield Hosts(config, server.pid)
        finally:
            server.terminate()
            server.wait()


def _server(folder: Path, port: int) -> Path:
    shutil.copy(folder / "user.pub", folder / "authorized_keys")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where it separates privileges
    lines = [
        f"Port {port}",
        *(f"ListenAddress {address}" for address in ADDRESSES.values()),
        f"HostKey {folder / 'host'}",
        f"AuthorizedKeysFile {folder / 'authorized_keys'}",
        "PidFile none",
        "StrictModes no",
        "UsePAM no",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PermitRootLogin prohibit-password",
        "MaxStartups 100",
    ]
    path = folder / "sshd_config"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _client(folder: Path, port: int, silent: int) -> Path:
    public = (folder / "host.pub").read_text(encoding="utf-8")
    known = "".join(f"[{address}]:{port} {public}" for address in ADDRESSES.values())
    (folder / "known").write_text(known, encoding="utf-8")
    places = {name: (address, port, "known", "user") for name, address in ADDRESSES.items()} | {
        CLOSED: ("127.0.0.3", port, "known", "user"),
        SILENT: ("127.0.0.1", silent, "known", "user"),
        STRANGE: ("127.0.0.1", port, "nobody-known", "user"),
        LOCKED: ("127.0.0.1", port, "known", "other"),
    }
    text = "".join(
        f"Host {name}\n HostName {address}\n Port {at}\n User {getpass.getuser()}\n"
        f" UserKnownHostsFile {folder / known}\n IdentityFile {folder / key}\n"
        for name, (address, at, known, key) in places.items()
    )
    alone = "Host *\n GlobalKnownHostsFile none\n IdentitiesOnly yes\n IdentityAgent none\n"
    path = folder / "config"
    path.write_text(text + alone, encoding="utf-8")
    return path


def _wait(server: subprocess.Popen[bytes], port: int, said: Path) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and server.poll() is None:
        try:
            socket.create_connection((ADDRESSES["gpx-b"], port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise NotHere(f"sshd does not start: {said.read_text(encoding='utf-8')}")
