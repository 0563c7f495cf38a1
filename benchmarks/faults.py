"""Kills ranks of runs again and again, and compares what comes out with an undisturbed run.

Each run trains a small GPT on four emulated devices, and meets a number of faults: random ranks are
killed (SIGKILL), stopped for good (SIGSTOP), asked to end (SIGTERM), or hang with a heart that
beats, in the forward pass, the backward pass, a reduction, the optimizer, a copy into memory, or
while a checkpoint is written; a third of the signals from outside at a random moment. The runs go
on by themselves. In the end each must have the undisturbed run's losses, and each step its samples.
Every other run has dropout, whose masks must be the same again, and leaves the split of samples as
planned, on which masks depend; the others split their samples anew by measured times.

    python benchmarks/faults.py [--json] [--kills 200] [--seed 0]

Figures: `kills`, `runs`, `worst_relative_error` (of the final loss), `samples_lost`,
`samples_repeated`, `median_recovery_s`, `worst_recovery_s` (from the signal to the end of the first
step after it), `median_killed_s`, `median_stopped_s` and `median_hung_s` (with the timeout of 5 s),
`median_asked_s`, `worst_steps_repeated`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from common import TRAIN, environment, print_figures, records, small_gpt2
from faulted.places import HANG, PLACES

STEPS = 60
KILLS_A_RUN = 10
TIMEOUT_S = 5
RANKS = 4
# Ones that last are rarer: each takes its timeout.
SIGNALS = (signal.SIGKILL,) * 6 + (signal.SIGTERM,) * 3 + (signal.SIGSTOP,) * 1
FAULTS = (*SIGNALS, HANG)
NAMES = {
    signal.SIGKILL: "killed",
    signal.SIGSTOP: "stopped",
    signal.SIGTERM: "asked",
    HANG: "hung",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        truths = {kind: _run(folder / kind.value, kind, 0, chance, plan=None) for kind in _Kind}
        found: list[tuple[_Kind, _Outcome]] = []
        while (done := sum(len(one.faults) for _, one in found)) < arguments.kills:
            wanted = min(KILLS_A_RUN, arguments.kills - done)
            kind = list(_Kind)[len(found) % len(_Kind)]
            plan = folder / kind.value / "run" / "plan.json"
            found.append(
                (kind, _run(folder / f"run-{len(found)}", kind, wanted, chance, plan=plan))
            )
            _report(found[-1][1])
    print_figures(_figures(found, truths), as_json=arguments.json)


# -- one run ---------------------------------------------------------------------------------------


class _Kind(Enum):
    DROPOUT = "dropout"
    REBALANCED = "rebalanced"


@dataclass(frozen=True)
class _Fault:
    signal: int
    place: str
    at: float


@dataclass(frozen=True)
class _Done:
    """A step that a rank did: in which start of the run, until when, and with which samples."""

    start: int
    step: int
    rank: int
    at: float
    samples: tuple[int, ...]


@dataclass(frozen=True)
class _Outcome:
    losses: dict[int, float]
    done: list[_Done]
    faults: list[_Fault]

    def samples(self) -> dict[int, Counter[int]]:
        """By step; of one that was done again the last time counts, for the run went on from it."""
        last: dict[int, int] = {}
        for one in self.done:
            last[one.step] = max(last.get(one.step, 0), one.start)
        found: dict[int, Counter[int]] = {step: Counter() for step in last}
        for one in self.done:
            if one.start == last[one.step]:
                found[one.step].update(one.samples)
        return found

    def recovery_s(self, fault: _Fault) -> float | None:
        """From a signal to the end of the first step of the next start; None if none was needed: it
        came in the last step, say."""
        start = max((one.start for one in self.done if one.at < fault.at), default=0)
        later = [one.at for one in self.done if one.start > start]
        return min(later) - fault.at if later else None

    def repeated(self) -> list[int]:
        """How many steps were done again, of each start."""
        steps: dict[int, list[int]] = {}
        for one in self.done:
            steps.setdefault(one.start, []).append(one.step)
        starts = sorted(steps)
        return [max(steps[a]) - min(steps[b]) + 1 for a, b in pairwise(starts)]


def _run(
    folder: Path, kind: _Kind, faults: int, chance: random.Random, *, plan: Path | None
) -> _Outcome:
    folder.mkdir()
    (folder / "job.yaml").write_text(yaml.safe_dump(_job(folder, kind)), encoding="utf-8")
    outside = sum(chance.random() < 1 / 3 for _ in range(faults))
    _set_traps(folder, faults - outside, chance)
    command = [*TRAIN, "--allow", "faulted", *([] if plan is None else ["--plan", str(plan)])]
    unbuffered = environment() | {"PYTHONUNBUFFERED": "1"}
    met: list[_Fault] = []
    with (folder / "said").open("w") as said:
        process = subprocess.Popen(
            command, cwd=folder, env=unbuffered, stdout=said, stderr=subprocess.STDOUT
        )
        try:
            for _ in range(outside):
                met += _harm_someone(process, folder, chance)
            code = process.wait(timeout=600)
        finally:
            process.kill()
            process.wait()
    if code:
        raise SystemExit(f"a run failed:\n{(folder / 'said').read_text()}")
    losses = {one["step"]: one["loss"] for one in records(folder / "run", "step")}
    return _Outcome(losses, _done(folder), met + _gone_off(folder))


def _job(folder: Path, kind: _Kind) -> dict[str, Any]:
    dropout = 0.1 if kind is _Kind.DROPOUT else 0.0
    return {
        "model": {"config": small_gpt2(64, positions=32, dropout=dropout)},
        "data": {
            "factory": "faulted.traps:samples",
            "arguments": {"folder": str(folder), "length": 32},
            "held_out": 0.0,
        },
        "sequence_length": 32,
        "global_batch": 16,
        "steps": STEPS,
        "optimizer": {"lr": 1e-3},
        "cluster": [
            {"class": "fast", "emulate": "20 GFLOP/s", "memory": "512 MiB", "count": 2},
            {"class": "slow", "emulate": "10 GFLOP/s", "memory": "512 MiB", "count": 2},
        ],
        "rebalance": kind is _Kind.REBALANCED,
        "checkpoint": {"every_steps": 10},
        "techniques": {"most_stages": 1, "tensor": [1], "leave_out": False},
        "timeout": TIMEOUT_S,
        "output": "run",
        "restarts": 10,
    }


def _set_traps(folder: Path, number: int, chance: random.Random) -> None:
    for n in range(number):
        trap = {
            "rank": chance.randrange(RANKS),
            "step": chance.randint(2, 4),
            "place": chance.choice(PLACES),
            "after": chance.randrange(3),
            "signal": int(chance.choice(FAULTS)),
        }
        (folder / f"trap-{n}.json").write_text(json.dumps(trap))


def _gone_off(folder: Path) -> list[_Fault]:
    return [_Fault(**json.loads(file.read_text())) for file in folder.glob("trap-*.gone")]


def _harm_someone(
    process: subprocess.Popen[bytes], folder: Path, chance: random.Random
) -> Iterator[_Fault]:
    """From outside, at some moment while it trains."""
    before = len(records(folder / "run", "step"))
    while process.poll() is None and len(records(folder / "run", "step")) < before + 2:
        time.sleep(0.05)
    time.sleep(chance.uniform(0.0, 0.5))
    with contextlib.suppress(OSError, ValueError):  # it ends just then
        number = chance.choice(SIGNALS)
        pid = int((folder / f"pid-{chance.randrange(RANKS)}").read_text())
        if len(records(folder / "run", "step")) < STEPS - 5:
            at = time.time()
            os.kill(pid, number)
            yield _Fault(int(number), "outside", at)


# -- what came out ---------------------------------------------------------------------------------


def _done(folder: Path) -> list[_Done]:
    found = []
    for file in folder.glob("used-*.jsonl"):
        for line in file.read_text().splitlines():
            with contextlib.suppress(ValueError):  # cut short when its rank was killed
                told = json.loads(line)
                found.append(_Done(**told | {"samples": tuple(told["samples"])}))
    return found


def _report(outcome: _Outcome) -> None:
    for fault in sorted(outcome.faults, key=lambda one: one.at):
        seconds = outcome.recovery_s(fault)
        took = "went on" if seconds is None else f"{seconds:6.2f} s"
        print(f"{NAMES[fault.signal]:8} {fault.place:10} {took}", flush=True)
    print(f"steps done again: {outcome.repeated()}", flush=True)


def _figures(found: list[tuple[_Kind, _Outcome]], truths: dict[_Kind, _Outcome]) -> dict[str, Any]:
    lost = repeated = 0
    errors = []
    for kind, outcome in found:
        used = outcome.samples()
        for step, wanted in truths[kind].samples().items():
            own = used.get(step, Counter())
            lost += sum((wanted - own).values())
            repeated += sum((own - wanted).values())
        errors.append(abs(outcome.losses[STEPS] / truths[kind].losses[STEPS] - 1))
    outcomes = [outcome for _, outcome in found]
    by_signal: dict[int, list[float]] = {}
    for outcome in outcomes:
        for fault in outcome.faults:
            if (seconds := outcome.recovery_s(fault)) is not None:
                by_signal.setdefault(fault.signal, []).append(seconds)
    every = [s for of_signal in by_signal.values() for s in of_signal]
    return {
        "kills": sum(len(one.faults) for one in outcomes),
        "runs": len(found),
        "worst_relative_error": max(errors),
        "samples_lost": lost,
        "samples_repeated": repeated,
        "median_recovery_s": round(median(every or [0.0]), 2),  # none where it was in a last step
        "worst_recovery_s": round(max(every, default=0.0), 2),
        **{
            f"median_{name}_s": round(median(by_signal[number]), 2)
            for number, name in NAMES.items()
            if number in by_signal
        },
        "worst_steps_repeated": max((n for one in outcomes for n in one.repeated()), default=0),
    }


if __name__ == "__main__":
    main()
