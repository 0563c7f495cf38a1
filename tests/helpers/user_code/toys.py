"""What tiny jobs train: a small model and its data, found by name as a user's own factory is.

The model can misbehave in one of its forward passes on one rank, in all the ways that a process
can come to harm.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from gpumix.train import trainer
from gpumix.train.checkpoint import checkpointer
from gpumix.train.monitor import step_timer

VOCABULARY = 32
NOBODY = -2  # among ranks
FOREVER_S = 60
LOCKED_S = 6
SLOW_READ_S = 0.02
ANSWER_S = 0.02  # a step waits for longer than a busy machine holds one up


class Block(nn.Module):
    harm: Callable[[], None] | None = None  # what happens in each pass

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.into = nn.Linear(width, 2 * width)
        self.out = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.harm is not None:
            self.harm()
        return x + self.out(F.gelu(self.into(self.norm(x))))


class Toy(nn.Module):
    """Guesses each token from itself; returns (summed loss, count).

    Args:
        fault: a name in `FAULTS` or `GRADIENTS`, or none; "wrong" lasts.
        rank, at: where it happens (-1: everywhere), and in which training forward pass, from 1.
        after: a path that is there before it happens.
        once: a path that it leaves when it happens; it does not if that is there.
        sample_s: how long that rank sleeps over each sample, from that pass on.
        until: a path; once it is there nobody sleeps any more.
        block: where it happens, instead of at the loss; then passes of this block count, those that
            are done again for the backward too.
        watchdog_s: who waits for so long between two passes is aborted, as by that of NCCL; not
            that rank.
        among: it happens at the loss where so many ranks are, or more.
        log: a path; each pass outside of training adds a line.
    """

    def __init__(
        self,
        width: int,
        blocks: int,
        fault: str = "",
        rank: int = 0,
        at: int = 0,
        after: str = "",
        once: str = "",
        sample_s: float = 0.0,
        block: int | None = None,
        watchdog_s: float = 0.0,
        among: int = 1,
        until: str = "",
        log: str = "",
    ) -> None:
        super().__init__()
        self.log = log
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        if fault and block is not None and _rank() == rank:
            self.blocks[block].harm = _Harm(fault, at, once)
            fault = ""
        self.head = nn.Linear(width, VOCABULARY)
        self.fault, self.rank, self.at, self.after = fault, rank, at, after
        self.once, self.sample_s, self.among, self.until = once, sample_s, among, until
        self.passes = 0
        if watchdog_s and _rank() != rank:
            threading.Thread(target=self._watch, args=(watchdog_s,), daemon=True).start()

    def _watch(self, patience_s: float) -> None:
        passes, since = 0, time.monotonic()
        while not passes or time.monotonic() - since < patience_s:
            if passes != self.passes:
                passes, since = self.passes, time.monotonic()
            time.sleep(0.1)
        os.abort()

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        self.passes += self.training
        if self.log and not self.training:
            with Path(self.log).open("a") as log:
                log.write(f"{_rank()}\n")
        slow = self.sample_s and _rank() == self.rank and self.passes >= self.at
        if slow and not (self.until and Path(self.until).exists()):
            time.sleep(self.sample_s * len(input_ids))
        here = self.rank in (-1, _rank()) and _world() >= self.among
        strike = self.fault and self.training and self.passes == self.at and here
        if strike and self.once:
            strike = not Path(self.once).exists()
            Path(self.once).touch()
        while strike and self.after and not Path(self.after).exists():
            time.sleep(0.01)  # its rank is ended if that never comes
        x = self.embedding(input_ids)
        wrong = self.fault == "wrong" and self.passes >= self.at and _rank() == self.rank
        if (strike or wrong) and self.fault in GRADIENTS:
            x = _TimesGradient.apply(x, GRADIENTS[self.fault])
        for block in self.blocks:
            x = block(x)
        logits = self.head(x).flatten(0, 1).float()
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum")
        if strike and self.fault in FAULTS:
            loss = loss * FAULTS[self.fault]()
        return loss, torch.tensor(labels.numel())


class _Harm:
    """A fault, in the n-th time that it is asked."""

    def __init__(self, fault: str, at: int, once: str) -> None:
        self.fault, self.left, self.once = fault, at, once

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0 and not (self.once and Path(self.once).exists()):
            if self.once:
                Path(self.once).touch()
            FAULTS[self.fault]()


class Selective(Toy):
    """Calls some of its blocks, in the order of `calls`; if `by_size` only a batch of one sample
    goes that way, and others through all, as do so many passes before."""

    def __init__(self, blocks: int, calls: Sequence[int], by_size: bool, before: int) -> None:
        super().__init__(16, blocks)
        self.calls, self.by_size, self.before = tuple(calls), by_size, before

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(input_ids)
        every = (self.by_size and len(input_ids) > 1) or self.before > 0
        self.before -= 1
        for number in range(len(self.blocks)) if every else self.calls:
            x = self.blocks[number](x)
        logits = self.head(x).flatten(0, 1).float()
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum")
        return loss, torch.tensor(labels.numel())


# What they multiply the gradient of the embedding with.
GRADIENTS = {"nan-gradient": float("nan"), "large-gradient": 1e4, "wrong": 1.5}


class _TimesGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def model(
    width: int = 16,
    blocks: int = 2,
    fault: str = "",
    rank: int = 0,
    at: int = 3,
    after: str = "",
    once: str = "",
    sample_s: float = 0.0,
    block: int | None = None,
    watchdog_s: float = 0.0,
    among: int = 1,
    place: int | None = None,
    until: str = "",
    log: str = "",
) -> nn.Module:
    """
    Args:
        place: the rank that torchrun gave the process that comes to harm, instead of `rank`.
    """
    if place is not None:
        rank = _rank() if os.environ.get("RANK") == str(place) else NOBODY
    harm = (fault, rank, at, after, once, sample_s, block, watchdog_s, among, until)
    return Toy(width, blocks, *harm, log=log)


def selective(
    calls: Sequence[int], blocks: int = 3, by_size: bool = False, before: int = 0
) -> nn.Module:
    return Selective(blocks, calls, by_size, before)


class _Large(list):
    """Samples that hold memory."""

    def __init__(self, mib: int) -> None:
        super().__init__(tokens())
        self.room = torch.ones(mib, 2**20, dtype=torch.uint8)


def large_tokens(mib: int) -> list[dict[str, Tensor]]:
    return _Large(mib)


def tokens(samples: int = 64, length: int = 8, per_rank: int = 0) -> list[dict[str, Tensor]]:
    """Random samples, always the same; with `per_rank`, so many more on each next rank."""
    generator = torch.Generator().manual_seed(11)
    made = []
    for _ in range(samples + per_rank * _rank()):
        ids = torch.randint(0, VOCABULARY, (length,), generator=generator)
        made.append({"input_ids": ids, "labels": ids.clone()})
    return made


class _Slow(list):
    """Samples that take longer than what is done with them: at least three times as long as passes
    between one and the next. One thread reads them."""

    read_s = 0.0

    def __getitem__(self, index):
        between_s = time.perf_counter() - (self.read_s or time.perf_counter())
        time.sleep(max(SLOW_READ_S, min(1.0, 3 * between_s)))
        self.read_s = time.perf_counter()
        return super().__getitem__(index)


class _Costly(list):
    """Samples that take a core to make."""

    def __init__(self, samples: list[dict[str, Tensor]], cpu_s: float) -> None:
        super().__init__(samples)
        self.cpu_s = cpu_s

    def __getitem__(self, index):
        until_s = time.thread_time() + self.cpu_s
        while time.thread_time() < until_s:
            pass
        return super().__getitem__(index)


class _Killing(_Costly):
    """The first process that reads it beside the one that trains is killed at sample `at`."""

    def __init__(self, once: Path, at: int, **costly) -> None:
        super().__init__(**costly)
        self.once, self.at, self.trains = once, at, os.getpid()

    def __getitem__(self, index):
        if index == self.at and os.getpid() != self.trains and not self.once.exists():
            self.once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class _Damaged(list):
    """Each tenth sample cannot be read."""

    first = 9

    def __getitem__(self, index):
        if index % 10 == self.first:
            raise OSError("a bad sector")
        return super().__getitem__(index)


class _Absent(list):
    """Samples from `first` on never come."""

    first = 0

    def __getitem__(self, index):
        if index >= self.first:
            time.sleep(FOREVER_S)
        return super().__getitem__(index)


class _Leaving(list):
    """Samples that end the process which reads them."""

    killed: bool

    def __getitem__(self, index):
        if self.killed:
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(7)


class _Remote(list):
    """Samples that come over a network: many can be under way at once."""

    def __getitem__(self, index):
        time.sleep(ANSWER_S)
        return super().__getitem__(index)


def remote_tokens() -> list[dict[str, Tensor]]:
    return _Remote(tokens())


def killing_tokens(once: str, at: int, cpu_s: float) -> list[dict[str, Tensor]]:
    return _Killing(Path(once), at, samples=tokens(), cpu_s=cpu_s)


def costly_tokens(cpu_s: float) -> list[dict[str, Tensor]]:
    return _Costly(tokens(), cpu_s)


def damaged_tokens(first: int = 9) -> list[dict[str, Tensor]]:
    made = _Damaged(tokens())
    made.first = first
    return made


def locked_tokens() -> list[dict[str, Tensor]]:
    """Samples that are guarded by a semaphore, and unfit."""
    made = _Slow([{"input_ids": torch.zeros(3)}] * 8)
    made.guard = multiprocessing.Lock()
    return made


def masked_tokens() -> list[dict[str, Tensor]]:
    return [{**one, "labels": torch.full_like(one["labels"], -100)} for one in tokens()]


def leaving_tokens(killed: bool) -> list[dict[str, Tensor]]:
    made = _Leaving(tokens())
    made.killed = killed
    return made


def deadly_tokens(once: str) -> list[dict[str, Tensor]]:
    """The first rank that opens them is killed, and leaves this path."""
    try:
        Path(once).touch(exist_ok=False)
    except FileExistsError:
        return tokens()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it lives")


def absent_tokens(first: int) -> list[dict[str, Tensor]]:
    made = _Absent(tokens())
    made.first = first
    return made


def tokens_on_slow_disk(sync_s: float, stall_s: float = 5.0) -> list[dict[str, Tensor]]:
    """Whoever reads them has a disk that takes so long to sync a file, and steps wait for a
    checkpoint no longer than `stall_s`."""
    quick, trainer.MOST_STALL_S = os.fsync, stall_s

    def sync(file: int) -> None:
        time.sleep(sync_s)
        quick(file)

    os.fsync = sync
    return tokens()


def tokens_without_room() -> list[dict[str, Tensor]]:
    """Whoever reads them has no memory for a copy of what it saves."""
    checkpointer.has_room_for = lambda size, ranks: False
    return tokens()


def slow_tokens(window_steps: int = step_timer.WINDOW_STEPS) -> list[dict[str, Tensor]]:
    """Whoever reads them looks after so many steps whether it waits for them."""
    step_timer.WINDOW_STEPS = window_steps
    return _Slow(tokens())


class _Stream(IterableDataset):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(tokens(self.samples))


def token_stream(samples: int = 64) -> Iterator[dict[str, Tensor]]:
    """A generator."""
    yield from tokens(samples)


def text_stream(lines: list[str]) -> Iterator[dict[str, str]]:
    yield from ({"text": line} for line in lines)


def token_passes(samples: int = 64) -> Callable[[int], Iterator[dict[str, Tensor]]]:
    """What makes a generator for each pass."""
    return lambda number: token_stream(samples)


def token_iterable(samples: int = 64) -> IterableDataset:
    return _Stream(samples)


def no_module() -> str:
    return "a model"


def broken() -> nn.Module:
    raise ValueError("this factory is broken")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


# -- faults; each returns what the loss is multiplied with -----------------------------------------


def _signal(number: signal.Signals) -> Callable[[], float]:
    def send() -> float:
        os.kill(os.getpid(), number)
        return 1.0

    return send


def _raise() -> float:
    raise ValueError("no such token\nin any vocabulary")


def _multiply_wrongly() -> float:
    return float((torch.ones(2, 3) @ torch.ones(2, 3)).sum())


def _to_launcher(number: signal.Signals) -> Callable[[], float]:
    def send() -> float:
        launcher = multiprocessing.parent_process()
        assert launcher is not None
        os.kill(launcher.pid, number)
        return 1.0

    return send


def _to_group(number: signal.Signals) -> Callable[[], float]:
    """As the terminal does, or a service manager: to launcher and ranks alike, and what else runs
    for them."""

    def send() -> float:
        os.killpg(0, number)
        return 1.0

    return send


def _twice(send: Callable[[], float]) -> float:
    send()
    time.sleep(0.5)  # two signals at once would be one
    return send()


def _interrupt_launcher_twice() -> float:
    _twice(_to_launcher(signal.SIGINT))
    return _hang()


def _kill_launcher_and_hold_lock() -> float:
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    held = ctypes.PyDLL(None)
    held.kill(launcher.pid, int(signal.SIGKILL))
    held.sleep(FOREVER_S)
    return 1.0


def _kill_parent() -> float:
    """That which ranks are forked from."""
    os.kill(os.getppid(), signal.SIGKILL)
    return _hang()


def _interrupt_and_die() -> float:
    """The launcher is told, and passes it on; before the ranks can answer this one is lost."""
    _to_launcher(signal.SIGINT)()
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def _terminate_and_run_out() -> float:
    os.kill(os.getpid(), signal.SIGTERM)
    raise torch.OutOfMemoryError("all of it is taken")


def _notice(send: Callable[[], float]) -> Callable[[], float]:
    """In a step that does not end."""

    def send_and_hang() -> float:
        send()
        return _hang()

    return send_and_hang


def _small_disk() -> float:
    """No file may grow beyond this: what a full disk comes to."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
    return 1.0


def _stuck_disk() -> float:
    """What is written does not come to an end, as on a server that does not answer."""
    os.fsync = lambda file: time.sleep(FOREVER_S)
    return 1.0


def _hold_lock() -> float:
    """A call that keeps Python's lock: no other thread of the process runs, its heart neither."""
    ctypes.PyDLL(None).sleep(LOCKED_S)
    return 1.0


def _hang() -> float:
    time.sleep(FOREVER_S)
    return 1.0


FAULTS: dict[str, Callable[[], float]] = {
    "interrupt-and-die": _interrupt_and_die,
    "terminate-and-oom": _terminate_and_run_out,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "raise": _raise,
    "multiply-wrongly": _multiply_wrongly,
    "kill": _signal(signal.SIGKILL),
    "stop": _signal(signal.SIGSTOP),
    "terminate": _signal(signal.SIGTERM),
    "terminate-launcher": _to_launcher(signal.SIGTERM),
    "notice": _notice(_to_launcher(signal.SIGTERM)),
    "notice-to-one": _notice(_signal(signal.SIGTERM)),
    "terminate-launcher-twice": lambda: _twice(_to_launcher(signal.SIGTERM)),
    "kill-launcher": _to_launcher(signal.SIGKILL),
    "kill-launcher-and-hold-lock": _kill_launcher_and_hold_lock,
    "kill-parent": _kill_parent,
    "hang-up-launcher": _to_launcher(signal.SIGHUP),
    "interrupt-launcher": _to_launcher(signal.SIGINT),
    "interrupt-launcher-twice": _interrupt_launcher_twice,
    "ctrl-c": _to_group(signal.SIGINT),
    "terminate-group": _to_group(signal.SIGTERM),
    "hang-up-group": _to_group(signal.SIGHUP),
    "small-disk": _small_disk,
    "hang": _hang,
    "hold-lock": _hold_lock,
    "stuck-disk": _stuck_disk,
}
