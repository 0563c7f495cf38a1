"""Worker processes: the same batches, whatever happens to them."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from gpumix.data.loader import Loader
from gpumix.data.order.global_order import GlobalOrder
from gpumix.data.workers import prefetcher, shared_memory
from gpumix.data.workers.fetch import DataChangedError
from gpumix.data.workers.fork_server import ForkServer, WorkerProcess
from gpumix.data.workers.prefetcher import MOST_AHEAD, UNKNOWN_BYTES
from gpumix.data.workers.worker_pool import ProcessWorkerPool
from gpumix.schema.errors import InputError, MachineError, TrainingError
from helpers.errors import raises
from helpers.extended import every_second, left_out
from helpers.processes import commands
from helpers.processes.commands import Done
from helpers.processes.waiting import wait_until
from helpers.samples.squares import N, Squares, alive, expected, pids, processes, take

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked")


READERS: list[dict[str, Any]] = [{"num_workers": 3}, {"kind": "threads"}, {}, {"prefetch": 1}]


@pytest.mark.parametrize("given", left_out(READERS, READERS[2:]))
def test_the_batches_are_those_of_one_thread(given):
    with processes(Squares(), **given) as loader:
        assert take(loader, 60) == expected(60)


@pytest.mark.extended
def test_a_dataset_need_not_be_one_that_can_be_pickled():
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        pickle.dumps(Squares())
    with processes(Squares()) as loader:
        assert take(loader, 4) == expected(4)
        assert loader.setting.kind == "processes"


def test_a_batch_that_is_kept_stays_as_it_is():
    """However many are: its memory is used again only when nobody has it."""
    with processes(Squares(), [64]) as loader:
        kept = [next(loader)["k"] for _ in range(60)]
    order = GlobalOrder(N, 0).span(0, 64 * 60)
    assert torch.equal(torch.cat(kept), torch.from_numpy(order))


KEPT = [("parts", 1), ("whole", 60), ("whole", 1), ("parts", 60)]


@pytest.mark.parametrize(("chunks", "kept"), left_out(KEPT, KEPT[1:]))
def test_memory_of_threads_is_used_again_when_nobody_has_the_batch(monkeypatch, kept, chunks):
    """Of large batches; of more than there is memory set aside for, some lie elsewhere."""
    monkeypatch.setattr(prefetcher, "LARGE_BYTES", 1)
    dataset = Squares()
    dataset.thread_safe = True
    with processes(dataset, [64], kind="threads", num_workers=3, prefetch=3) as loader:
        if chunks == "parts":
            loader._feed.set(replace(loader.setting, chunk=10))
        batches: list[dict[str, torch.Tensor]] = []
        places = set()
        for _ in range(60):
            batches = [*batches, next(loader)][-kept:]
            places.add(batches[-1]["k"].data_ptr())
            assert torch.equal(batches[-1]["square"][:, 0], batches[-1]["k"].float() ** 2)
    order = GlobalOrder(N, 0).span(64 * (60 - kept), 64 * 60)
    assert torch.cat([batch["k"] for batch in batches]).tolist() == order.tolist()
    assert len(places) <= 10 if kept == 1 else len(places) == 60


@pytest.mark.extended
def test_workers_end_with_the_loader_and_with_the_last_reference_to_it():
    loader = processes(Squares())
    next(loader)
    some = pids(loader)
    assert len(some) == 2 and all(map(alive, some))
    loader.close()
    assert not any(map(alive, some))
    loader = processes(Squares())
    next(loader)
    some = pids(loader)
    del loader
    gc.collect()
    wait_until(lambda: not any(map(alive, some)))


@pytest.mark.extended
def test_loaders_end_in_any_order():
    """A later one's workers must not keep an earlier one's connections open."""
    first, second = processes(Squares()), processes(Squares())
    next(first), next(second)
    some = [*pids(first), *pids(second)]
    first.close()
    assert not any(map(alive, some[:2])) and all(map(alive, some[2:]))
    second.close()


DYING = """
import os, signal
from gpumix.data.loader import Loader
loaders = [
    Loader([{"x": k} for k in range(10)], [2], 0, num_workers=2, kind="processes") for _ in range(2)
]
for loader in loaders:
    next(loader)
    print(*loader._feed._crew.pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def script(folder: Path, text: str) -> Done:
    """Run it in a process of its own."""
    (folder / "script.py").write_text(text)
    words = [sys.executable, folder / "script.py"]
    env = commands.environment(folder / "cache")
    return commands.run(words, folder=folder, env=env, timeout_s=120)


def test_workers_end_with_a_trainer_that_is_killed(tmp_path):
    done = script(tmp_path, DYING)
    assert done.code == -signal.SIGKILL
    some = [int(pid) for pid in done.out.split()]
    assert len(some) == 4
    wait_until(lambda: not any(map(alive, some)))


@pytest.mark.extended
def test_what_it_takes_to_hear_of_workers_is_known():
    with processes(Squares()) as loader:
        take(loader, 12)
        handed_s = loader._tuner._handed_s
    assert handed_s and all(0.0 < one < 1.0 for one in handed_s)


def test_a_worker_that_dies_is_replaced_and_its_samples_are_not_lost(caplog):
    with processes(Squares()) as loader:
        found = take(loader, 3)
        for number in range(2):
            caplog.clear()
            killed = pids(loader)[0]
            os.kill(killed, signal.SIGKILL)
            found += take(loader, 4)
            wait_until(lambda: loader.lost_workers == number + 1)  # noqa: B023
            wait_until(lambda: len(caplog.records) > 0)
            (told,) = caplog.records
            assert told.levelname == "WARNING"
            assert told.getMessage().startswith(f"worker {killed} of the data was lost at ")
            assert told.getMessage().endswith("another has its place: killed by SIGKILL")
            # Who is killed next may have those samples: they are not to be lost twice.
            wait_until(lambda: not loader._feed._crew._tries)
        assert found == expected(11)
        assert len(pids(loader)) == 2 and killed not in pids(loader)


@pytest.mark.extended
def test_the_sample_at_which_a_worker_died_is_told(caplog, tmp_path):
    """Also where it goes well the second time."""
    bad, once = expected(4)[-1], tmp_path / "once"

    def read(k: int) -> None:
        if k == bad and not once.exists():
            once.touch()
            os._exit(3)

    with processes(Squares(read=read)) as loader:
        assert take(loader, 6) == expected(6)
        assert loader.lost_workers == 1
    assert (
        f"was lost at sample {bad} of Squares, another has its place: it left with 3" in caplog.text
    )


@pytest.mark.extended
def test_a_sample_that_kills_its_worker_again_and_again_is_named(tmp_path):
    bad = expected(12)[-1]

    def read(k: int) -> None:
        if k == bad:
            os.kill(os.getpid(), signal.SIGKILL)

    with processes(Squares(read=read)) as loader:
        found = take(loader, 11)
        assert found == expected(11)
        with raises(TrainingError, code="data-worker-lost", what=bad) as caught:
            take(loader, 1)
        assert "killed by SIGKILL" in caught.value.what
        assert "too much memory" in caught.value.why
        assert loader.cursor.position == 11 * 8


def test_an_error_in_a_worker_names_the_sample_and_its_line():
    bad = expected(6)[-1]

    def read(k: int) -> None:
        if k == bad:
            raise ValueError("no such picture")

    with processes(Squares(read=read)) as loader:
        assert take(loader, 5) == expected(5)
        for _ in range(2):
            with pytest.raises(TrainingError) as caught:
                next(loader)
            assert caught.value.what == (
                f"sample {bad} of Squares cannot be read: ValueError: no such picture"
            )
            assert "test_workers.py" in caught.value.where and "in read" in caught.value.where
            assert "bad_samples" in caught.value.fix
            assert loader.cursor.position == 5 * 8


@pytest.mark.parametrize("kind", every_second(["threads", "processes"]))
def test_a_sample_that_leaves_the_program_is_named(kind):
    bad = expected(4)[-1]

    def read(k: int) -> None:
        if k == bad:
            sys.exit("no licence")

    with processes(Squares(read=read), kind=kind) as loader:
        assert take(loader, 3) == expected(3)
        with raises(TrainingError, code="sample-unreadable", what=(bad, "SystemExit: no licence")):
            next(loader)
    with processes(Squares(read=read), [N], kind=kind, bad_samples="skip") as loader:
        next(loader)
        assert [one.index for one in loader.skipped] == [bad]


@pytest.mark.extended
def test_where_no_worker_can_be_had_that_is_said_and_nothing_is_lost():
    """What starts them was killed, as the system does where memory runs out."""
    with processes(Squares()) as loader:
        found = take(loader, 3)
        crew = loader._feed._crew
        assert isinstance(crew, ProcessWorkerPool)
        some = pids(loader)
        os.kill(crew._nursery._pid, signal.SIGKILL)
        wait_until(lambda: not any(map(alive, some)))  # they end with it
        with raises(MachineError, code="fork-server-gone"):
            for _ in range(MOST_AHEAD + 1):
                found += take(loader, 1)
        found += take(loader, 5)
        assert found == expected(len(found) // 6)


def refusing(calls: int = 2**31) -> Callable[..., Any]:
    """What a system does that lets no more processes begin; after so many calls it does again."""
    left = iter(range(calls))
    real = ForkServer.fork

    def fork(nursery: ForkServer) -> WorkerProcess:
        if next(left, None) is None:
            return real(nursery)
        raise MachineError(
            "a worker process cannot be started",
            code="worker-not-started",
            why=os.strerror(errno.EAGAIN),
        )

    return fork


def spinning(k: int) -> None:
    end = time.thread_time() + 1e-3
    while time.thread_time() < end:
        pass


@pytest.mark.extended
def test_where_processes_turn_out_to_be_wanted_and_none_can_be_had_no_batch_is_lost(monkeypatch):
    """They are wanted once a thread has fetched the first batch."""
    with processes(Squares(read=spinning), num_workers="auto", kind="auto") as loader:
        monkeypatch.setattr(ForkServer, "fork", refusing())
        found = take(loader, 1)
        assert loader.setting.kind == "processes"
        for _ in range(2):
            with raises(MachineError, code="worker-not-started"):
                take(loader, 1)
        monkeypatch.undo()
        found += take(loader, 4)
        assert found == expected(5)


@pytest.mark.extended
def test_where_no_more_workers_can_be_had_those_that_are_there_go_on(monkeypatch, caplog):
    with processes(Squares()) as loader:
        found = take(loader, 3)
        monkeypatch.setattr(ForkServer, "fork", refusing())
        loader._feed.set(replace(loader.setting, workers=4))
        found += take(loader, 3)
        assert found == expected(6)
        assert len(pids(loader)) == 2
    assert "2 of 4 data workers" in caplog.text and "cannot be started" in caplog.text


REFUSED = """
from gpumix.data.loader import Loader
from gpumix.data.workers.fork_server import ForkServer
from gpumix.schema.errors import MachineError
real = ForkServer.fork
def fork(server):
    raise MachineError("no")
with Loader([{"x": k} for k in range(10)], [2], 0, num_workers=2, kind="processes") as loader:
    ForkServer.fork = fork
    try:
        next(loader)
    except MachineError:
        print("refused", flush=True)
    ForkServer.fork = real
    next(loader)
    print("went on", flush=True)
"""


@pytest.mark.extended
def test_after_workers_could_not_be_had_nothing_of_the_program_runs_twice(tmp_path):
    """What is left of those that were not to be must not let a forked process go astray."""
    done = script(tmp_path, REFUSED)
    assert (done.out, done.code) == ("refused\nwent on\n", 0), done.err


def test_files_that_were_opened_for_workers_are_closed_where_none_can_be_had(monkeypatch):
    monkeypatch.setattr(ForkServer, "fork", refusing())
    with processes(Squares()) as loader:
        with pytest.raises(MachineError):
            next(loader)
        gc.collect()
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(3):
            with pytest.raises(MachineError):
                next(loader)
        gc.collect()
        assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.extended
def test_as_many_workers_as_a_job_may_ask_for_can_be_had(monkeypatch):
    kept = []

    def fork(nursery: ForkServer) -> WorkerProcess:
        ours, theirs = socket.socketpair()
        kept.append(theirs)
        return WorkerProcess(0, Connection(ours.detach()), os.eventfd(0))

    monkeypatch.setattr(ForkServer, "fork", fork)
    with processes(Squares(), num_workers=300) as loader:
        loader._feed.want(0, partial(loader.course.part, 0))
        assert len(pids(loader)) == 300


def broken(bad: set[int]) -> Callable[[int], None]:
    def read(k: int) -> None:
        if k in bad:
            raise ValueError("no such picture")

    return read


PLANS = [(kind, cut) for kind in ("processes", "threads") for cut in ([3, 0, 5], [6, 2], [8])]


@pytest.mark.parametrize(("kind", "cut"), left_out(PLANS, [*PLANS[:4], PLANS[5]]))
def test_other_samples_take_the_places_of_bad_ones_in_every_plan(cut, kind):
    bad = {3, 50, 51, 120}
    ranks = []
    for rank in range(len(cut)):
        with processes(
            Squares(read=broken(bad)), cut, rank, kind=kind, bad_samples="skip"
        ) as loader:
            ranks.append([next(loader)["k"].tolist() for _ in range(25)])
            instead = {one.index: one.instead for one in loader.skipped}
            assert instead.keys() <= bad and not bad & set(instead.values())
            assert all(one.why == "ValueError: no such picture" for one in loader.skipped)
    steps = [[k for rank in step for k in rank] for step in zip(*ranks)]
    with Loader(Squares(read=broken(bad)), [8], 0, bad_samples="skip") as one:
        assert steps == [next(one)["k"].tolist() for _ in range(25)]
        whole = {skipped.index: skipped.instead for skipped in one.skipped}
    assert whole.keys() == bad
    found = [k for step in steps for k in step]
    assert found == [whole.get(k, k) for k in expected(25, stop=8)]


@pytest.mark.extended
def test_bad_samples_count_when_they_are_returned():
    with processes(Squares(read=broken({3, 50, 51, 120})), [N], bad_samples="skip") as loader:
        begin = loader.state_dict()
        for _ in range(2):
            next(loader)
            wait_until(lambda: loader._feed.is_ready(loader.cursor.position))
            assert {one.index for one in loader.skipped} == {3, 50, 51, 120}
            loader.load_state_dict(begin)
        assert len(loader.skipped) == 2 * 4


def test_a_dataset_of_bad_samples_stops_the_run():
    class Bad(Squares):
        def __getitem__(self, k: int) -> dict[str, Any]:
            if k:  # the first says what samples look like
                raise ValueError("nothing is here")
            return super().__getitem__(k)

    with (
        processes(Bad(), bad_samples="skip") as loader,
        raises(TrainingError, code="sample-irreplaceable", what=8),
    ):
        take(loader, 3)


@pytest.mark.extended
def test_samples_of_another_shape_are_named_or_skipped():
    class Ragged(Squares):
        def __getitem__(self, k: int) -> dict[str, Any]:
            return {"k": k, "square": torch.full((3 + (k == 7),), float(k * k))}

    with (
        processes(Ragged(), [N]) as loader,
        raises(InputError, code="sample-shape-differs", what=7),
    ):
        next(loader)
    with processes(Ragged(), [N], bad_samples="skip") as loader:
        next(loader)
        assert [one.index for one in loader.skipped] == [7]


EMPTY = [
    (kind, empty)
    for kind in ("processes", "threads")
    for empty in ({}, None, {"k": 7, "square": []})
]


@pytest.mark.parametrize(("kind", "empty"), left_out(EMPTY, EMPTY[:3]))
def test_samples_without_content_are_named_or_skipped(kind, empty):
    class Empty(Squares):
        def __getitem__(self, k: int) -> dict[str, Any]:
            return empty if k == 7 else super().__getitem__(k)

    code = "sample-shape-differs" if empty and "k" in empty else "sample-not-dict"
    with processes(Empty(), [N], kind=kind) as loader, raises(InputError, code=code, what=7):
        next(loader)
    with processes(Empty(), [N], kind=kind, bad_samples="skip") as loader:
        next(loader)
        assert [one.index for one in loader.skipped] == [7]


def test_a_dataset_that_changes_its_length_stops_the_run_also_where_bad_samples_are_skipped():
    class Growing(Squares):
        def __len__(self) -> int:
            return self.n + (getattr(self, "asked", 0) > 20)

        def __getitem__(self, k: int) -> dict[str, Any]:
            self.asked = getattr(self, "asked", 0) + 1
            return super().__getitem__(k)

    with (
        processes(Growing(), bad_samples="skip", num_workers=1) as loader,
        raises(DataChangedError, code="dataset-length-changed", what=(200, 201)),
    ):
        take(loader, 20)


@pytest.mark.extended
def test_a_dataset_that_is_shorter_than_a_batch_goes_round():
    with processes(Squares(5), [8]) as loader:
        order = GlobalOrder(5, 0).span(0, 24)
        assert take(loader, 3) == order.tolist()


# -- batches of one's own --------------------------------------------------------------------------


def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(s["tokens"]) for s in samples)
    tokens = torch.zeros(len(samples), longest, dtype=torch.int64)
    for row, sample in zip(tokens, samples):
        row[: len(sample["tokens"])] = torch.tensor(sample["tokens"])
    return {"tokens": tokens, "k": torch.tensor([s["k"] for s in samples])}


class Texts(Squares):
    def __getitem__(self, k: int) -> dict[str, Any]:
        self.read(k)
        return {"k": k, "tokens": [k] * (1 + k % 7), "name": str(k)}


@pytest.mark.parametrize("given", [{}, {"kind": "threads"}, {"num_workers": 0, "kind": "auto"}])
def test_batches_are_collated_in_the_worker(given):
    def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {**padded(samples), "pid": torch.full((len(samples),), os.getpid())}

    collating: set[int] = set()
    with processes(Texts(), collate=collate, **given) as loader:
        for step in range(30):
            batch = next(loader)
            wanted = expected(30)[6 * step : 6 * step + 6]
            like = padded([{"tokens": [k] * (1 + k % 7), "k": k} for k in wanted])
            assert batch.keys() == like.keys() | {"pid"}
            assert all(torch.equal(batch[key], like[key]) for key in like)
            (pid,) = set(batch["pid"].tolist())
            collating.add(pid)
        own = os.getpid()
        assert collating == {own} if loader.setting.kind == "threads" else own not in collating


@pytest.mark.extended
def test_a_batch_that_is_larger_than_any_before_comes_all_the_same():
    class Growing(Squares):
        def __getitem__(self, k: int) -> dict[str, Any]:
            return {"k": k, "tokens": [k] * (1 if k < 190 else 100_000)}

    with processes(Growing(), [4], collate=padded) as loader:
        found = [next(loader)["tokens"].shape[1] for _ in range(50)]
    assert sorted(set(found)) == [1, 100_000]


BAD = {
    "collate-not-dict": lambda samples: samples,
    "collate-rows-wrong": lambda samples: {"k": torch.zeros(3)},
}


@pytest.mark.parametrize("code", BAD)
def test_what_is_no_batch_is_refused(code):
    with raises(InputError, code=code):
        processes(Texts(), collate=BAD[code])


def test_a_bad_sample_of_a_collated_batch_is_skipped():
    with processes(Texts(read=broken({3, 77})), [N], collate=padded, bad_samples="skip") as loader:
        batch = next(loader)
        assert {one.index for one in loader.skipped} == {3, 77}
        assert not {3, 77} & set(batch["k"].tolist())


def test_nothing_is_taken_of_shared_memory_that_others_need():
    """It may be full: batches lie in memory without a name."""
    room = os.statvfs("/dev/shm")
    with processes({k: {"x": torch.zeros(2**20)} for k in range(8)}, [4]) as loader:
        kept = [next(loader) for _ in range(6)]
        taken_bytes = (room.f_bavail - os.statvfs("/dev/shm").f_bavail) * room.f_frsize
        assert taken_bytes < kept[0]["x"].nbytes / 4  # other processes take some, too
        assert kept[0]["x"].shape == (4, 2**20)


@pytest.mark.parametrize("slots", [8, 1, 0])
def test_where_less_can_be_shared_batches_come_all_the_same(monkeypatch, slots):
    """Through fewer slots, and through pipes; without any room that is said."""
    whole = mmap.mmap

    def limited(fileno: int, length: int, **given: Any) -> mmap.mmap:
        if length > slots * UNKNOWN_BYTES:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return whole(fileno, length, **given)

    monkeypatch.setattr(shared_memory.mmap, "mmap", limited)
    with processes(Squares(), prefetch=6) as loader:
        if slots:
            assert take(loader, 30) == expected(30)
            return
        with raises(MachineError, code="worker-memory-not-shared") as caught:
            next(loader)
    assert caught.value.why == "Cannot allocate memory"
