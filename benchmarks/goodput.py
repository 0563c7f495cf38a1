"""How much of its time a run keeps that is killed again and again.

Three ranks train a small model whose step takes 0.4 s and a little, as on a device: the host has
little to do. Every 20 s on average (an exponential distribution) SIGKILL ends a random rank, or the
server that ranks are forked from. What such a run comes on in a window of time is divided by what
one does that nothing happens to, in a window just before. torchft, if it is given, trains the same
model with the same samples in a step and the same kills, in three replica groups that talk by gloo;
each is started again as soon as it has died. Its steps go on without a replica that is away, so of
both batches count, by their samples.

    python benchmarks/goodput.py [--json] [--minutes 10] [--seed 0] [--torchft FOLDER]

`--torchft`: a folder with torchft and what it needs beside torch; without it its figures are left
out. Nothing is fetched. `--minutes` are those of each kind of run: three, with torchft five.

Figures: `kept`, `kept_without_server` (where the server is killed), `step_s` (undisturbed),
`kills`, `kills_of_server`, `steps_repeated_worst`, `recovery_median_s` (from a kill to the end of
the first step after it), `recovery_worst_s`, `recovery_without_server_median_s`, `kept_torchft`,
`kept_torchft_in_steps` (whatever samples they had), `step_torchft_s`, `kills_torchft`,
`recovery_torchft_median_s` (until the replica takes part again), `load` (of this host, on average);
and `in_use`, `in_use_without_server`, `in_use_torchft`: batches that count times the median step of
the same window, over its time, which says about the same where the load of the host changes from
window to window.
Limits: `kept` is 0.95 at least, and more than `kept_torchft`.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, Protocol

import yaml

from common import BENCHMARKS, TRAIN, Figures, environment, make_parser, print_figures

RANKS, SAMPLES = 3, 16  # of each rank in a step
BETWEEN_S = 20.0
WINDOW_S = 90.0
WARM_STEPS, PATIENCE_S = 5, 300.0
LOOK_S = 0.02
KEPT = 0.95
# The best of those that were tried: a replica that is away is noticed sooner than by default (5 s).
HEARTBEAT_TIMEOUT_MS, JOIN_TIMEOUT_MS = 1000, 1000
ENV = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "GLOO_SOCKET_IFNAME": "lo"}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of each kind of run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--torchft", type=Path, help="a folder with torchft")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # no process is left behind then
    chance = random.Random(arguments.seed)
    rounds = math.ceil(60 * arguments.minutes / WINDOW_S)
    window_s = 60 * arguments.minutes / rounds
    found: dict[str, list[Window]] = {}
    loads: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        for number in range(rounds):
            kills = _kills(chance, window_s)
            for kind in KINDS if arguments.torchft else KINDS[:3]:
                folder = Path(name) / f"{kind}-{number}"
                folder.mkdir()
                system: System
                if kind.startswith("torchft"):
                    system = Torchft(folder, arguments.torchft.resolve())
                else:
                    system = Gpumix(folder, Path(name) / "profiles", of_server=kind == "server")
                window = _watched(system, folder, kills if kind in KILLED else (), window_s, chance)
                found.setdefault(kind, []).append(window)
                loads.append(os.getloadavg()[0])
                _report(kind, window)
    figures = _figures(found) | {"load": round(fmean(loads), 1)}
    if not arguments.torchft:
        print("torchft is left out: --torchft FOLDER says where it is")
    print_figures(figures, as_json=arguments.json)
    missed = float(figures["kept"] or 0) < max(KEPT, float(figures.get("kept_torchft") or 0))
    if missed:
        print(f"kept is less than {KEPT}, or than torchft's", file=sys.stderr)
    sys.exit(missed)


KINDS = ("undisturbed", "killed", "server", "torchft", "torchft-killed")
KILLED = ("killed", "server", "torchft-killed")


def _kills(chance: random.Random, window_s: float) -> list[float]:
    """When in a window, in seconds."""
    at, kills = chance.expovariate(1 / BETWEEN_S), []
    while at < window_s:
        kills.append(at)
        at += chance.expovariate(1 / BETWEEN_S)
    return kills


# -- what is killed --------------------------------------------------------------------------------


class System(Protocol):
    """A run. `tend` is called all the time; `kill` says whether there was somebody to kill."""

    def start(self) -> None: ...

    def tend(self) -> None: ...

    def kill(self, chance: random.Random) -> bool: ...

    def stop(self) -> None: ...


class Gpumix:
    """
    Args:
        profiles: a folder for what is measured, once for all runs.
        of_server: the server that ranks are forked from is killed, instead of a rank.
    """

    def __init__(self, folder: Path, profiles: Path, *, of_server: bool) -> None:
        self._folder, self._profiles, self._of_server = folder, profiles, of_server
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        (self._folder / "job.yaml").write_text(yaml.safe_dump(self._job()), encoding="utf-8")
        with (self._folder / "said").open("w") as said:
            self._process = subprocess.Popen(
                [*TRAIN, "--allow", "kept"],
                cwd=self._folder,
                env=environment() | ENV,
                stdout=said,
                stderr=said,
            )

    def tend(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            raise SystemExit(f"the run ended:\n{(self._folder / 'said').read_text()[-3000:]}")

    def kill(self, chance: random.Random) -> bool:
        rank, server = _numbers(self._folder / f"pid-{chance.randrange(RANKS)}")
        with suppress(ProcessLookupError):
            os.kill(rank, 0)  # of a rank that is gone the server may be too
            os.kill(server if self._of_server else rank, signal.SIGKILL)
            return True
        return False

    def stop(self) -> None:
        """It saves, and so leaves nothing in memory."""
        process = self._process
        assert process is not None, "it is started"
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60.0)
        process.kill()
        process.wait()

    def _job(self) -> dict[str, Any]:
        return {
            "model": {"factory": "kept.paced:model"},
            "data": {
                "factory": "kept.paced:samples",
                "arguments": {"folder": str(self._folder)},
                "validation_split": 0.0,
            },
            "sequence_length": 8,
            "global_batch_size": RANKS * SAMPLES,
            "max_steps": 1_000_000,
            "optimizer": {"lr": 1e-3},
            "cluster": [
                {"class": "cpu", "accelerator": "cpu", "memory": "512 MiB", "count": RANKS}
            ],
            "advanced": {
                "profile_cache": str(self._profiles),
                "rebalance": False,
                "timeout": 30,
                "max_restarts": 10,
            },
            "strategy": "even",
            "memory_save_steps": 1,
            "techniques": {
                "max_pipeline_stages": 1,
                "tensor_parallel_size": [1],
                "leave_out": False,
            },
            "output_dir": "run",
        }


class Torchft:
    """
    Args:
        path: where torchft is.
    """

    def __init__(self, folder: Path, path: Path) -> None:
        self._folder = folder
        self._env = environment(path) | ENV
        self._replicas: list[subprocess.Popen[bytes]] = []
        self._lighthouse: subprocess.Popen[bytes] | None = None
        self._address = ""

    def start(self) -> None:
        words = ["lighthouse", HEARTBEAT_TIMEOUT_MS, JOIN_TIMEOUT_MS]
        self._lighthouse = self._begin(words, stdout=subprocess.PIPE)
        assert self._lighthouse.stdout is not None, "it is a pipe"
        self._address = self._lighthouse.stdout.readline().decode().strip()
        self._replicas = [self._replica(number) for number in range(RANKS)]

    def tend(self) -> None:
        """As a runner of replicas does: each is started again when it has ended."""
        for number, replica in enumerate(self._replicas):
            if replica.poll() is not None:
                self._replicas[number] = self._replica(number)

    def kill(self, chance: random.Random) -> bool:
        number = chance.randrange(RANKS)
        there, _ = _numbers(self._folder / f"pid-{number}")
        if there != self._replicas[number].pid:  # it is only starting
            return False
        self._replicas[number].kill()
        return True

    def stop(self) -> None:
        for process in (*self._replicas, self._lighthouse):
            if process is not None:
                process.kill()
                process.wait()

    def _replica(self, number: int) -> subprocess.Popen[bytes]:
        return self._begin([number, RANKS, SAMPLES, self._folder, self._address])

    def _begin(self, words: Sequence[object], stdout: int | None = None) -> subprocess.Popen[bytes]:
        script = str(BENCHMARKS / "kept" / "replica.py")
        with (self._folder / "said").open("a") as said:
            return subprocess.Popen(
                [sys.executable, script, *map(str, words)],
                env=self._env,
                stdout=said if stdout is None else stdout,
                stderr=said,
            )


def _numbers(file: Path) -> tuple[int, int]:
    one, other = file.read_text().split()
    return int(one), int(other)


# -- windows ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    """A step that a process did, and how many batches count since the run began."""

    at: float
    pid: int
    step: int
    batches: float


@dataclass(frozen=True)
class Window:
    """What a run has done in `window_s`: steps and batches that count, and the median time of a
    step; and of each kill, how long it took until a process was back that was not there before, and
    how many steps were repeated."""

    window_s: float
    steps: float
    batches: float
    step_s: float
    recoveries_s: list[float] = field(default_factory=list)
    repeated: list[int] = field(default_factory=list)
    kills: int = 0


def _watched(
    system: System, folder: Path, kills: Sequence[float], window_s: float, chance: random.Random
) -> Window:
    """
    Args:
        kills: when, in seconds from the begin of the window.
    """

    def wait(over: Callable[[], bool]) -> None:
        while not over():
            system.tend()
            time.sleep(LOOK_S)

    killed = []
    try:
        system.start()
        gives_up = time.time() + PATIENCE_S
        warm = folder / "done-0.jsonl"
        wait(lambda: _lines(warm) >= WARM_STEPS or time.time() > gives_up)
        if time.time() > gives_up:
            raise SystemExit(f"no step was done:\n{(folder / 'said').read_text()[-3000:]}")
        began = time.time()
        for after in kills:
            wait(lambda: time.time() >= began + after)  # noqa: B023
            wait(lambda: system.kill(chance) or time.time() >= began + window_s)
            killed.append(time.time())
        wait(lambda: time.time() >= began + window_s)
    finally:
        system.stop()
    killed = [at for at in killed if at < began + window_s]
    return _window(_done_in(folder), began, window_s, killed)


def _lines(file: Path) -> int:
    with suppress(OSError):
        return file.read_text().count("\n")
    return 0


def _done_in(folder: Path) -> list[Done]:
    found = []
    for file in folder.glob("done-*.jsonl"):
        for line in file.read_text().splitlines():
            with suppress(ValueError):  # cut short when its process was killed
                found.append(Done(**json.loads(line)))
    return sorted(found, key=lambda one: one.at)


def _window(done: list[Done], began: float, window_s: float, killed: list[float]) -> Window:
    ended = began + window_s
    first, last = ([one for one in done if one.at <= at][-1] for at in (began, ended))
    recoveries_s, repeated = [], []
    for at in killed:
        before = [one for one in done if one.at <= at]
        there = {one.pid for one in before}
        back = next((one for one in done if one.at > at and one.pid not in there), None)
        if back is not None:
            recoveries_s.append(back.at - at)
            reached = max(one.step for one in done if one.at < back.at)
            repeated.append(reached - back.step + 1)
    steps, batches = last.step - first.step, last.batches - first.batches
    step_s = median(_step_times([one for one in done if began <= one.at <= ended]))
    return Window(window_s, steps, batches, step_s, recoveries_s, repeated, len(killed))


def _step_times(done: list[Done]) -> Iterator[float]:
    of: dict[int, list[float]] = {}
    for one in done:
        of.setdefault(one.pid, []).append(one.at)
    for times in of.values():
        yield from (b - a for a, b in pairwise(times))


# -- what came out ---------------------------------------------------------------------------------


def _report(kind: str, window: Window) -> None:
    took = ", ".join(f"{s:.2f} s" for s in window.recoveries_s)
    done = f"{window.batches:.1f} batches in {window.window_s:.0f} s"
    done += f" of {window.step_s:.3f} s"
    print(f"{kind:14} {done}, {window.kills} kills; back after: {took or '-'}", flush=True)


def _figures(found: dict[str, list[Window]]) -> Figures:
    def kept(kind: str, of: str, what: Callable[[Window], float]) -> float:
        return round(sum(map(what, found[kind])) / sum(map(what, found[of])), 4)

    def step_s(kind: str) -> float:
        return round(sum(w.window_s for w in found[kind]) / sum(w.steps for w in found[kind]), 3)

    def in_use(kind: str) -> float:
        used_s = sum(w.batches * w.step_s for w in found[kind])
        return round(used_s / sum(w.window_s for w in found[kind]), 4)

    def recoveries(kind: str) -> list[float]:
        return [s for window in found[kind] for s in window.recoveries_s] or [0.0]

    def kills(kind: str) -> int:
        return sum(window.kills for window in found[kind])

    def batches(window: Window) -> float:
        return window.batches

    repeated = [n for kind in ("killed", "server") for w in found[kind] for n in w.repeated]
    figures: Figures = {
        "kept": kept("killed", "undisturbed", batches),
        "kept_without_server": kept("server", "undisturbed", batches),
        "in_use": in_use("killed"),
        "in_use_without_server": in_use("server"),
        "step_s": step_s("undisturbed"),
        "kills": kills("killed"),
        "kills_of_server": kills("server"),
        "steps_repeated_worst": max(repeated, default=0),
        "recovery_median_s": round(median(recoveries("killed")), 2),
        "recovery_worst_s": round(max(recoveries("killed")), 2),
        "recovery_without_server_median_s": round(median(recoveries("server")), 2),
    }
    if "torchft" in found:
        figures |= {
            "kept_torchft": kept("torchft-killed", "torchft", batches),
            "kept_torchft_in_steps": kept("torchft-killed", "torchft", lambda w: w.steps),
            "in_use_torchft": in_use("torchft-killed"),
            "step_torchft_s": step_s("torchft"),
            "kills_torchft": kills("torchft-killed"),
            "recovery_torchft_median_s": round(median(recoveries("torchft-killed")), 2),
        }
    return figures


if __name__ == "__main__":
    main()
