"""Runs on a host before anything else does, by whatever interpreter is there: says what it is.

`PYTHON - QUESTIONS < probe.py`. The standard library only, and nothing newer than Python 3.6, but
for the questions that only gpumix itself can answer.
"""

import hashlib
import json
import random
import socket
import sys
from pathlib import Path

MARK = "gpumix-facts: "
# Outgoing connections get their ports from above these: until it is used, nobody takes one of them.
PORTS = range(20000, 30000)
TRIES = 20
# Libraries of scripts, which must be alike on all hosts.
LIBRARIES = ("transformers", "datasets", "accelerate", "trl", "peft", "lightning")


def version_of(name: str) -> "str | None":
    """Of a package, which is not imported."""
    try:
        from importlib.metadata import version

        return version(name)
    except Exception:
        return None


def digest_of(path: str) -> "str | None":
    """Of a file; None if there is none that can be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None


def package() -> "tuple[str | None, str | None]":
    """Version of gpumix, and a digest of its code; None if it is not there."""
    try:
        import gpumix
    except Exception:
        return None, None
    whole = hashlib.sha256()
    for file in sorted(Path(gpumix.__file__).parent.rglob("*.*")):
        if file.suffix in (".py", ".cpp"):
            whole.update(file.read_bytes())
    return gpumix.__version__, whole.hexdigest()


def devices() -> "int | str":
    """How many there are, or why that is not known."""
    try:
        from gpumix.hardware.discover import discover

        return len(discover().devices)
    except Exception as error:
        return str(error)


def listening(address: str, port: int) -> "dict[str, object]":
    """A free port at an address of this host, or whether this one is; or why there is none."""
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


def main() -> None:
    asked = json.loads(sys.argv[1])
    version, digest = package()
    facts = {
        "host": socket.gethostname(),
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "gpumix": version,
        "digest": digest,
        "torch": version_of("torch"),
        "libraries": {name: version_of(name) for name in LIBRARIES},
        "devices": devices() if version else 0,
        "files": {name: digest_of(name) for name in asked["files"]},
        "listening": listening(asked["address"], asked["port"]) if "address" in asked else None,
    }
    sys.stdout.write(MARK + json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
