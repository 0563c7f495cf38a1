"""Probe of a host, run before anything else by any interpreter found: prints facts.

`PYTHON - QUESTIONS < probe.py`. Uses only the standard library of Python 3.6, except for questions
only gpumix itself can answer.
"""

import hashlib
import json
import random
import socket
import sys
from pathlib import Path
from typing import Any

FACTS_PREFIX = "gpumix-facts: "
# Below the ports of outgoing connections: until it is used, a port found here stays free.
PORTS = range(20000, 30000)
TRIES = 20
# Libraries of scripts, in equal versions on all hosts.
LIBRARIES = ("transformers", "datasets", "accelerate", "trl", "peft", "lightning")


def get_version(name: str) -> "str | None":
    """Return the version of a package without an import."""
    try:
        from importlib.metadata import version

        return version(name)
    except Exception:
        return None


def hash_file(path: str) -> "str | None":
    """Return the digest of a file; None if missing or unreadable."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None


def get_package_digest() -> "tuple[str | None, str | None]":
    """Return version and code digest of gpumix; None if missing."""
    try:
        import gpumix
    except Exception:
        return None, None
    whole = hashlib.sha256()
    for file in sorted(Path(gpumix.__file__).parent.rglob("*.*")):
        if file.suffix in (".py", ".cpp"):
            whole.update(file.read_bytes())
    return gpumix.__version__, whole.hexdigest()


def count_devices() -> "int | str":
    """Return the number of devices, or the reason why unknown."""
    try:
        from gpumix.hardware.discovery.discover import discover_cluster

        return len(discover_cluster().devices)
    except Exception as error:
        return str(error)


def find_free_port(address: str, port: int) -> "dict[str, object]":
    """Return a free port at an address of this host, or `port` if free, or the error."""
    found = {}  # type: dict[str, object]
    for number in [port] if port else [*random.sample(PORTS, TRIES), 0]:
        try:
            family, _, _, _, place = socket.getaddrinfo(address, number, 0, socket.SOCK_STREAM)[0]
            with socket.socket(family, socket.SOCK_STREAM) as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.bind(place)
                return {"ip": place[0], "port": server.getsockname()[1]}
        except OSError as error:
            found = {"error": error.strerror or str(error)}
    return found


def gather_facts(files: "list[str]") -> "dict[str, Any]":
    """Return the facts of this process, without devices and a port."""
    version, digest = get_package_digest()
    return {
        "host": socket.gethostname(),
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "gpumix": version,
        "digest": digest,
        "torch": get_version("torch"),
        "libraries": {name: get_version(name) for name in LIBRARIES},
        "devices": 0,
        "files": {name: hash_file(name) for name in files},
        "listening": None,
    }


def main() -> None:
    asked = json.loads(sys.argv[1])
    facts = gather_facts(asked["files"])
    if facts["gpumix"]:
        facts["devices"] = count_devices()
    if "address" in asked:
        facts["listening"] = find_free_port(asked["address"], asked["port"])
    sys.stdout.write(FACTS_PREFIX + json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
