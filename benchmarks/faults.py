"""Kills ranks of runs again and again, and compares what comes out with an undisturbed run.

Each run trains a small GPT on four emulated devices, and meets a number of faults: random ranks are
killed (SIGKILL), stopped for good (SIGSTOP) or asked to end (SIGTERM), while they open their data,
in the forward pass, the backward pass, a reduction, the optimizer, a copy into memory, or while a
checkpoint is written, or hang in one of the others with a heart that beats; a third of the signals
come from outside at a random moment. The runs go on by themselves. In the end each must have the
undisturbed run's losses, and each step its samples. Of four kinds of runs one has dropout, whose
masks must be the same again, and leaves the split of samples as planned, on which masks depend; one
splits its samples anew by measured times. These copy their state into memory as often as `auto`
finds cheap: steps are short, so that is every few. One whose state is divided, and one in stages,
copy it after each step. Some faults harm two ranks at once, or while they restore.

    python benchmarks/faults.py [--json] [--kills 200] [--seed 0]

Figures: `kills` (by signals), `kills_forward` and so on of each place, `kills_outside`, `hangs`,
`runs`, `worst_relative_error` (of the final loss), `samples_lost`, `samples_repeated`,
`median_recovery_s`, `worst_recovery_s` (from the signal to the end of the first step after it),
`median_killed_s`, `median_stopped_s` and `median_hung_s` (with the timeout of 5 s),
`median_asked_s`, `worst_steps_repeated`, `worst_steps_repeated_each` (of runs that copy after each
step), `most_steps_between_copies` (as `auto` had it), `double_kills`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from common import TRAIN, environment, make_parser, print_figures, records, small_gpt2
from faulted.places import BEFORE_STEPS, HANG, ONCE, PLACES
from faulted.used import Done, done_in, lost_and_repeated

STEPS = 60
KILLS_A_RUN = 10
TIMEOUT_S = 5
RANKS = 4
# Ones that last are rarer: each takes its timeout.
SIGNALS = (signal.SIGKILL,) * 6 + (signal.SIGTERM,) * 3 + (signal.SIGSTOP,) * 1
# A hang while a checkpoint is written is that of a disk, with which a run ends, as it says.
FAULTS = {place: SIGNALS if place == "save" else (*SIGNALS, HANG) for place in PLACES}
NAMES = {
    signal.SIGKILL: "killed",
    signal.SIGSTOP: "stopped",
    signal.SIGTERM: "asked",
    HANG: "hung",
}
OUTSIDE = "outside"  # beside the places of traps: wherever a rank is at a random moment
# Of the faults, those that harm a second rank too; they are that if they come within this time.
DOUBLE, AT_ONCE_S = 0.15, 0.5


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        truths = {kind: _run(folder / kind.value, kind, 0, chance, plan=None) for kind in _Kind}
        found: list[tuple[_Kind, _Outcome]] = []
        while (done := sum(len(one.kills) for _, one in found)) < arguments.kills:
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
    DIVIDED = "divided"
    STAGED = "staged"

    @property
    def copies_each(self) -> bool:
        """Whether the state is copied into memory after each step."""
        return self in (_Kind.DIVIDED, _Kind.STAGED)

    @property
    def places(self) -> tuple[str, ...]:
        """Where it comes to harm. A device whose rank is lost again before it has done a step is
        left out: without it masks are others, and there may be no plan in stages."""
        same = self in (_Kind.REBALANCED, _Kind.DIVIDED)
        return PLACES if same else tuple(place for place in PLACES if place not in BEFORE_STEPS)


_ONLY: dict[_Kind, dict[str, Any]] = {
    _Kind.DIVIDED: {"max_pipeline_stages": 1, "zero_stages": [3]},
    _Kind.STAGED: {"min_pipeline_stages": 2},
}


@dataclass(frozen=True)
class _Fault:
    signal: int
    place: str
    at: float


@dataclass(frozen=True)
class _Outcome:
    losses: dict[int, float]
    done: list[Done]
    faults: list[_Fault]
    copied_every: int

    @property
    def kills(self) -> list[_Fault]:
        """What a signal did."""
        return [fault for fault in self.faults if fault.signal != HANG]

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
    _set_traps(folder, kind, faults - outside, chance)
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
    told = records(folder / "run", "copies")
    every = max((one["every_steps"] for one in told), default=1)
    return _Outcome(losses, done_in(folder), met + _gone_off(folder), every)


def _job(folder: Path, kind: _Kind) -> dict[str, Any]:
    dropout = 0.1 if kind is _Kind.DROPOUT else 0.0
    return {
        "model": {"config": small_gpt2(64, positions=32, dropout=dropout)},
        "data": {
            "factory": "faulted.traps:samples",
            "arguments": {"folder": str(folder), "length": 32},
            "validation_split": 0.0,
        },
        "sequence_length": 32,
        "global_batch_size": 16,
        "max_steps": STEPS,
        "optimizer": {"lr": 1e-3},
        "cluster": [
            {"class": "fast", "emulate": "20 GFLOP/s", "memory": "512 MiB", "count": 2},
            {"class": "slow", "emulate": "10 GFLOP/s", "memory": "512 MiB", "count": 2},
        ],
        "advanced": {
            "rebalance": kind is _Kind.REBALANCED,
            "timeout": TIMEOUT_S,
            "max_restarts": 10,
        },
        "save_steps": 10,
        "memory_save_steps": 1 if kind.copies_each else "auto",
        "strategy": "staged" if kind is _Kind.STAGED else "optimal",
        "techniques": {
            "tensor_parallel_size": [1],
            "leave_out": False,
            **_ONLY.get(kind, {"max_pipeline_stages": 1}),
        },
        "output_dir": "run",
    }


def _set_traps(folder: Path, kind: _Kind, number: int, chance: random.Random) -> None:
    traps: list[dict[str, Any]] = []
    while len(traps) < number:
        place = chance.choice(kind.places)
        trap = {
            "step": chance.randint(2, 4),
            "place": place,
            "after": 0 if place in ONCE else chance.randrange(3),
            "signal": int(chance.choice(FAULTS[place])),
        }
        ranks = 2 if chance.random() < DOUBLE else 1
        traps += [{"rank": rank, **trap} for rank in chance.sample(range(RANKS), ranks)]
    for n, trap in enumerate(traps[:number]):
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
            yield _Fault(int(number), OUTSIDE, at)


# -- what came out ---------------------------------------------------------------------------------


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
        of_run = lost_and_repeated(outcome.done, truths[kind].done)
        lost, repeated = lost + of_run[0], repeated + of_run[1]
        errors.append(abs(outcome.losses[STEPS] / truths[kind].losses[STEPS] - 1))
    outcomes = [outcome for _, outcome in found]
    at = Counter(fault.place for one in outcomes for fault in one.kills)
    by_signal: dict[int, list[float]] = {}
    for outcome in outcomes:
        for fault in outcome.faults:
            if (seconds := outcome.recovery_s(fault)) is not None:
                by_signal.setdefault(fault.signal, []).append(seconds)
    every = [s for of_signal in by_signal.values() for s in of_signal]
    return {
        "kills": sum(at.values()),
        **{f"kills_{place}": at[place] for place in (*PLACES, OUTSIDE)},
        "hangs": sum(len(one.faults) for one in outcomes) - sum(at.values()),
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
        "worst_steps_repeated": _most_repeated(outcomes),
        "worst_steps_repeated_each": _most_repeated(o for kind, o in found if kind.copies_each),
        "most_steps_between_copies": max(one.copied_every for one in outcomes),
        "double_kills": sum(map(_double, outcomes)),
    }


def _most_repeated(outcomes: Iterable[_Outcome]) -> int:
    return max((n for one in outcomes for n in one.repeated()), default=0)


def _double(outcome: _Outcome) -> int:
    at = sorted(fault.at for fault in outcome.faults)
    return sum(b - a < AT_ONCE_S for a, b in pairwise(at))


if __name__ == "__main__":
    main()
