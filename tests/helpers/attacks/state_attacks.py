"""Attacks by checkpoints of a stranger, and by who reaches the ports of a run."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import pickle
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from helpers.attacks.attacked import PWNED, Attack, Place, gpumix
from helpers.attacks.strangers import give_away

FILES = ("checkpoint.json", "index.json", "__0_0.distcp", ".metadata")


@cache
def whole() -> Path:
    """A checkpoint of a small model, in a folder of its own."""
    from gpumix.train.checkpoint.checkpointer import Checkpointer
    from helpers.training.checkpoints import ALONE, adamw, odd
    from helpers.training.reference import engine_for

    folder = Path(tempfile.mkdtemp(prefix="whole-checkpoint-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    engine = engine_for(odd, ALONE)
    saver = Checkpointer(folder, keep=1, group=None, ranks_here=1, patience_s=60.0)
    saver.save(1, engine, adamw(engine.parameters()), cursor={})
    return next(folder.glob("step-*"))


def copied(place: Place) -> Path:
    folder = place.run / "checkpoints" / "step-00000001"
    shutil.copytree(whole(), folder)
    give_away(folder)
    return folder


def read(place: Place) -> str:
    """All that reads a checkpoint without a model."""
    export = gpumix(place, "export", place.run, "--to", place.root / "exported")
    return gpumix(place, "inspect", place.run) + export


def spoilt(name: str, how: str, place: Place) -> str:
    path = copied(place) / name
    if how == "size":
        with path.open("r+b") as file:
            file.truncate(2 * 10**12)
    elif how == "pickle":
        path.write_bytes(pickle.dumps(_Harm(str(place.root / PWNED))))
    else:
        path.unlink()
        if how == "pipe":
            os.mkfifo(path)
        else:
            targets = {"device": "/dev/zero", "kernel": "/proc/kmsg", "secret": place.secret}
            path.symlink_to(targets[how])
            give_away(path)
    return read(place)


class _Harm:
    """What runs code when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (self.path,))


def forged(place: Place, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> str:
    """A checkpoint with another index and another manifest, sealed as gpumix seals them."""
    from gpumix.train.checkpoint.manifest import Manifest

    folder = copied(place)
    index = json.loads((folder / "index.json").read_text())
    manifest = json.loads((folder / "checkpoint.json").read_text())["checkpoint"]
    change(index, manifest)
    content = json.dumps(index).encode()
    (folder / "index.json").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    manifest["files"]["index.json"] = {"bytes": len(content), "sha256": digest}
    try:
        sealed = Manifest.model_validate(manifest).sealed()
    except ValueError:
        sealed = json.dumps({"kind": "checkpoint", "schema_version": 1, "digest": "0" * 12,
                             "checkpoint": manifest})  # fmt: skip
    (folder / "checkpoint.json").write_text(sealed)
    return read(place)


def of_shape(shape: list[int], index: dict[str, Any], manifest: dict[str, Any]) -> None:
    index["tensors"]["model.extra"] = {"dtype": "float32", "shape": shape, "boxes": []}


def many(count: int, index: dict[str, Any], manifest: dict[str, Any]) -> None:
    one = {"dtype": "float32", "shape": [0], "boxes": []}
    index["tensors"] |= {f"model.empty.{number}": one for number in range(count)}


def file_named(name: str, index: dict[str, Any], manifest: dict[str, Any]) -> None:
    manifest["files"][name] = {"bytes": 1, "sha256": ""}
    for tensor in index["tensors"].values():
        for box in tensor["boxes"]:
            box["file"] = name


def extra(value: Any, index: dict[str, Any], manifest: dict[str, Any]) -> None:
    manifest["extra"] |= value


def moved(place: Place) -> str:
    """The user's own checkpoint on another disk, linked back: it is kept, and the next save goes
    on."""
    from gpumix.train.checkpoint import checkpoint_folder

    folder = place.root / "own"
    for step in range(1, 4):
        shutil.copytree(whole(), folder / f"step-{step:08d}")
    elsewhere = place.root / "elsewhere"
    (folder / "step-00000001").rename(elsewhere)
    (folder / "step-00000001").symlink_to(elsewhere)
    checkpoint_folder.prune(folder, 1)
    checkpoint_folder.begin_part(folder, 9)
    assert (elsewhere / "checkpoint.json").exists(), "what was moved is gone"
    return ""


# -- ports -----------------------------------------------------------------------------------------

GARBAGE = {
    "nothing": b"",
    "noise": bytes(range(256)) * 64,
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": b"\0" * 65536,
    "lengths": struct.pack("<Q", 2**62) * 8,
    "endless line": b"x" * 2**20,
    "pickle": pickle.dumps(_Harm(PWNED)),
    "half": b"\x01",
}


def throw(port: int, content: bytes) -> None:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2) as client:
        client.settimeout(1)
        client.sendall(content)
        client.recv(16)


def slowly(port: int, done: threading.Event) -> None:
    """Clients that hold connections and say a byte now and then."""
    clients = []
    for _ in range(64):
        with suppress(OSError):
            clients.append(socket.create_connection(("127.0.0.1", port), timeout=2))
    while not done.wait(0.1):
        for client in clients:
            with suppress(OSError):
                client.send(b"x")
    for client in clients:
        client.close()


def on_store(what: str, place: Place) -> str:
    """The store of a run: those who belong to it are served meanwhile."""
    import torch.distributed as dist

    from gpumix.train.processes.local_launcher import loopback_store

    done = threading.Event()
    with loopback_store() as (store, port):
        attackers = []
        if what == "slow":
            attackers.append(threading.Thread(target=slowly, args=(port, done), daemon=True))
        else:
            attackers += [
                threading.Thread(target=throw, args=(port, GARBAGE[what]), daemon=True)
                for _ in range(8)
            ]
        for one in attackers:
            one.start()
        time.sleep(0.2)
        store.set("key", "value")
        client = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        assert client.get("key") == b"value", "the store does not answer any more"
        done.set()
    assert not Path(PWNED).exists()
    return ""


def on_prometheus(what: str, place: Place) -> str:
    from prometheus_client import CollectorRegistry, start_http_server

    done = threading.Event()
    server, _ = start_http_server(0, addr="127.0.0.1", registry=CollectorRegistry())
    port = server.server_address[1]
    if what == "slow":
        threading.Thread(target=slowly, args=(port, done), daemon=True).start()
        time.sleep(0.2)
    else:
        throw(port, GARBAGE[what])
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert client.recv(64).startswith(b"HTTP/1.0 200"), "the endpoint does not answer"
    done.set()
    return ""


def every() -> Iterator[Attack]:
    for name in FILES:
        for how in ("size", "pickle", "pipe", "device", "kernel", "secret"):
            yield Attack("checkpoints", f"{name}, {how}", partial(spoilt, name, how))
    shapes = ([0, 2**62], [2**62, 0], [2**63], [-1], [2**31, 2**31, 0], [1] * 70, [0] * 3)
    changes: dict[str, Callable[[dict[str, Any], dict[str, Any]], None]] = {
        **{f"shape {shape[:4]}": partial(of_shape, shape) for shape in shapes},
        "300,000 empty tensors": partial(many, 300_000),
        "file above": partial(file_named, "../../home/thesis"),
        "file of root": partial(file_named, "/etc/passwd"),
        "tokenizer": partial(extra, {"job": {"tokenizer": "/etc/shadow", "data": {}}}),
        "configuration": partial(extra, {"model_config": {"auto_map": {"AutoModel": "x.y"}}}),
        "huge step": lambda index, manifest: manifest.update(step=10**400),
        "an order": lambda index, manifest: manifest.update(gpumix="\x1b]0;x\x07"),
    }
    for name, change in changes.items():
        yield Attack("checkpoints", f"forged, {name}", partial(forged, change=change))
    yield Attack("checkpoints", "moved and linked back", moved)
    for what in (*GARBAGE, "slow"):
        yield Attack("ports", f"store, {what}", partial(on_store, what))
        yield Attack("ports", f"prometheus, {what}", partial(on_prometheus, what))
