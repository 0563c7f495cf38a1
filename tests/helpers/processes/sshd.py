"""Hosts for tests: a server of ssh on loopback, with keys that are thrown away.

Nothing of the user's own is read or written: the client has a configuration of its own, and what is
connected is known by it alone.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from helpers.processes.ports import free_port
from helpers.processes.two_hosts import HOSTS, Wire

# Both are addresses of loopback. The last two are no hosts: nobody listens, nobody answers.
ADDRESSES = {"gpx-a": "127.0.0.1", "gpx-b": "127.0.0.2"}
CLOSED, SILENT, STRANGE, LOCKED = "gpx-closed", "gpx-silent", "gpx-strange", "gpx-locked"

PORT = 2222  # of hosts that are apart
ALONE = " GlobalKnownHostsFile none\n IdentitiesOnly yes\n IdentityAgent none\n"


class NotHere(Exception):
    """There is no sshd."""


@dataclass(frozen=True)
class Hosts:
    """`config` is that of the client."""

    config: Path

    @property
    def ssh(self) -> str:
        return f"ssh -F {self.config}"


@contextmanager
def hosts(folder: Path) -> Iterator[Hosts]:
    """The names in `ADDRESSES`, all of them this machine, and those that do not work.

    Raises:
        NotHere: there is no sshd, or it does not start.
    """
    program = _made_ready(folder)
    port = free_port()
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # takes connections, and says nothing
        config = _client(folder, port, silent.getsockname()[1])
        command = [program, "-D", "-e", "-f", _server(folder, port, ADDRESSES.values())]
        with _serving(command, folder / "said") as server:
            _wait(server, port, folder / "said")
            yield Hosts(config)


@contextmanager
def hosts_apart(folder: Path, wire: Wire) -> Iterator[Hosts]:
    """The hosts of a wire, each by its own name.

    Raises:
        NotHere: there is no sshd.
    """
    program = _made_ready(folder)
    public = (folder / "host.pub").read_text(encoding="utf-8")
    known = "".join(f"[{name}]:{PORT} {public}" for name in HOSTS)
    (folder / "known").write_text(known, encoding="utf-8")
    config = folder / "config"
    config.write_text(
        f"Host *\n Port {PORT}\n User {getpass.getuser()}\n"
        f" UserKnownHostsFile {folder / 'known'}\n IdentityFile {folder / 'user'}\n{ALONE}",
        encoding="utf-8",
    )
    with ExitStack() as servers:
        for name in HOSTS:
            command = [program, "-D", "-e", "-f", _server(folder, PORT)]
            servers.enter_context(_serving([*wire.on(name), *command], folder / f"said-{name}"))
        yield Hosts(config)


def _made_ready(folder: Path) -> str:
    """Makes the keys; the program of the server."""
    program = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if program is None or shutil.which("ssh-keygen") is None:
        raise NotHere("there is no sshd: apt-get install openssh-server")
    for key in ("host", "user", "other"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(words, check=True)
    folder.chmod(0o700)
    return program


@contextmanager
def _serving(command: Sequence[str | Path], said: Path) -> Iterator[subprocess.Popen[bytes]]:
    with said.open("w") as file:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=file)
    try:
        yield server
    finally:
        for process in [*_children(server.pid), server.pid]:  # whose client may be out of reach
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)
        server.wait()


def _children(parent: int) -> list[int]:
    tasks = Path(f"/proc/{parent}/task/{parent}/children")
    return [int(word) for word in tasks.read_text().split()] if tasks.exists() else []


def _server(folder: Path, port: int, addresses: Iterable[str] = ()) -> Path:
    shutil.copy(folder / "user.pub", folder / "authorized_keys")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where it separates privileges
    lines = [
        f"Port {port}",
        *(f"ListenAddress {address}" for address in addresses),
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
    path = folder / "config"
    path.write_text(f"{text}Host *\n{ALONE}", encoding="utf-8")
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
