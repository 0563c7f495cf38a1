"""Disks that are full, folders that cannot be written, ranks that die: one error, nothing lost."""

from __future__ import annotations

import errno
import os
import resource
import signal
from pathlib import Path

import pytest
from torch.distributed.checkpoint import filesystem

from gpumix.engine.comm.communicator import CommunicationError
from gpumix.schema.errors import GpumixError, MachineError
from gpumix.train.checkpoint import checkpoint_folder
from gpumix.train.checkpoint.checkpoint_folder import check_visible
from gpumix.train.checkpoint.manifest import SavedFile
from helpers.errors import raises
from helpers.extended import every_third
from helpers.processes.harness import run_ranks
from helpers.training.checkpoints import ALONE, UNEVEN, adamw, blank, checkpointer, odd, trained
from helpers.training.reference import engine_for


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def _outcome(save):
    try:
        save()
    except GpumixError as error:
        return type(error), str(error)
    return None


def _save_with_full_disk(folder, where, on_rank):
    """Save well, then with a disk that is full on one rank, then well again; the error of the
    second and what it left."""
    engine, optimizer = trained(UNEVEN)
    saver = checkpointer(folder)
    saver.save(1, engine, optimizer, cursor={})
    make_room = FULL[where]() if engine.comm.rank == on_rank else lambda: None
    outcome = _outcome(lambda: saver.save(2, engine, optimizer, cursor={}))
    left = names(folder) if engine.comm.rank == 0 else None
    make_room()
    saver.save(3, engine, optimizer, cursor={})
    return outcome, left


def _full_for_tensors():
    class Stream:
        def __init__(self, stream):
            self.stream, self.left = stream, 3000

        def write(self, data):
            self.left -= len(data)
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.stream.write(data)

        def __getattr__(self, name):
            return getattr(self.stream, name)

    original = filesystem.FileSystem.create_stream

    @filesystem.contextmanager
    def create_stream(self, path, mode):
        with original(self, path, mode) as stream:
            yield Stream(stream)

    filesystem.FileSystem.create_stream = create_stream
    return lambda: setattr(filesystem.FileSystem, "create_stream", original)


def _full_for_descriptions():
    original = checkpoint_folder.write_durably

    def write(file, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    checkpoint_folder.write_durably = write
    return lambda: setattr(checkpoint_folder, "write_durably", original)


def _limited():
    """Not simulated: no file of more than 20 kB can be written."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)


FULL = {"tensors": _full_for_tensors, "description": _full_for_descriptions, "limit": _limited}


@pytest.mark.parametrize(
    ("where", "on_rank", "why"),
    every_third(
        [
            ("tensors", 2, "No space left on device"),
            ("description", 0, "No space left on device"),
            ("limit", 3, "File too large"),
        ]
    ),
)
def test_full_disk_on_one_rank_is_one_error_on_all(tmp_path, where, on_rank, why):
    results = run_ranks(_save_with_full_disk, 4, tmp_path, where, on_rank)
    kind, text = results[0][0]
    assert {outcome for outcome, _ in results} == {(kind, text)}
    assert kind is MachineError
    assert f"rank {on_rank} could not" in text and str(tmp_path) in text and why in text
    assert results[0][1] == ["step-00000001"]
    engine, optimizer = blank(ALONE)
    assert checkpointer(tmp_path).load(engine, optimizer).step == 3


def _save_as_nobody(folder):
    engine = engine_for(odd, ALONE)
    if os.geteuid() == 0:
        os.seteuid(65534)
    else:
        folder.chmod(0o500)
    saver = checkpointer(folder / "checkpoints")
    return _outcome(lambda: saver.save(1, engine, adamw(engine.parameters()), cursor={}))


@pytest.mark.parametrize("name", ["__0_0.distcp", "index.json"])
def test_a_bit_that_flips_while_it_is_written(tmp_path, monkeypatch, name):
    """Between the moment that it is handed over and the end of the save; what was sealed before
    stays."""
    engine, optimizer = trained(ALONE)
    saver = checkpointer(tmp_path)
    saver.save(1, engine, optimizer, cursor={})
    sync = os.fsync

    def flip(descriptor):
        sync(descriptor)
        file = Path(f"/proc/self/fd/{descriptor}").readlink()
        is_index = file.suffix == ".part" and file.read_bytes().startswith(b'{"tensors":')
        if name == ("index.json" if is_index else file.name):
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)

    monkeypatch.setattr(os, "fsync", flip)
    with raises(MachineError, code="checkpoint-read-back-differs") as caught:
        saver.save(2, engine, optimizer, cursor={})
    assert name in caught.value.where
    monkeypatch.undo()
    assert names(tmp_path) == ["step-00000001"]
    saver.save(3, engine, optimizer, cursor={})


def test_read_only_folder(tmp_path):
    kind, text = run_ranks(_save_as_nobody, 1, tmp_path)[0]
    assert kind is MachineError
    assert "rank 0 could not" in text and "Permission denied" in text and str(tmp_path) in text
    assert "choose another `output_dir`" in text


def _lose_a_rank(folder):
    engine, optimizer = trained(UNEVEN[:2])
    saver = checkpointer(folder, timeout_s=5.0)
    saver.save(1, engine, optimizer, cursor={})
    if engine.comm.rank == 1:
        os._exit(1)
    return _outcome(lambda: saver.save(2, engine, optimizer, cursor={}))


def test_a_rank_that_dies_is_an_error_not_a_hang(tmp_path):
    outcome = run_ranks(_lose_a_rank, 2, tmp_path, mortal=[1])[0]
    assert outcome[0] is CommunicationError
    assert names(tmp_path) == ["step-00000001"]


def test_hosts_that_do_not_share_the_folder(tmp_path):
    with raises(MachineError, code="folder-not-shared"):
        check_visible(tmp_path, {"__1_0.distcp": SavedFile(bytes=3, sha256="")})
