"""Trains under memory limits that are tightened at random: each run ends, or is refused.

Each run trains a small GPT on two classes of emulated devices, of which each has some amount of
memory between what is far too little and plenty. In some of the runs a device loses a part of its
memory to somebody else while it trains. A run must train to its end, or say with exit code 4 that
there is too little memory; anything else counts as `died`.

    python benchmarks/memory_pressure.py [--json] [--runs 50] [--seed 0]

Figures: `runs`, `died`, `trained`, `refused`, `robbed` (runs of which a device lost memory),
`robbed_trained`, `planned_again` (restarts for lack of memory), `median_trained_s`,
`worst_relative_error` (of the final loss of those that trained, to the run with the most memory).
"""

from __future__ import annotations

import math
import random
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from common import TRAIN, Figures, environment, make_parser, print_figures, records, small_gpt2

STEPS = 12
LENGTH = 32
LIMIT_S = 300
REFUSED = 4  # the exit code of plans that do not fit
# Its state takes 4 MiB, divided or not.
GPT = small_gpt2(64, positions=LENGTH)
LEAST_MIB, MOST_MIB = 1.0, 16.0
# A part of the runs has less than the state takes on any division of it: those are to be refused.
HOPELESS, HOPELESS_MIB = 0.2, 0.5
ROBBED = 0.4  # of the runs
COUNTS = (("fast", 1), ("slow", 2))


@dataclass(frozen=True)
class _Case:
    memory_mib: dict[str, float]
    rank: int = 0
    step: int = 0
    taken_mib: float = 0.0


@dataclass(frozen=True)
class _Outcome:
    case: _Case
    code: int
    seconds: float
    losses: list[float]
    planned_again: int
    said: str

    @property
    def name(self) -> str:
        return {0: "trained", REFUSED: "refused"}.get(self.code, "died")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plenty = _run(folder / "plenty", _Case(dict.fromkeys(dict(COUNTS), 512.0)))
        if plenty.code:
            raise SystemExit(f"with plenty of memory a run failed:\n{plenty.said}")
        found = []
        for number in range(arguments.runs):
            found.append(_run(folder / f"run-{number}", _drawn(chance)))
            _report(found[-1])
    print_figures(_figures(found, plenty), as_json=arguments.json)


def _drawn(chance: random.Random) -> _Case:
    ends = math.log(LEAST_MIB), math.log(MOST_MIB)
    memory = {name: round(math.exp(chance.uniform(*ends)), 2) for name, _ in COUNTS}
    if chance.random() < HOPELESS:
        part = HOPELESS_MIB / MOST_MIB
        return _Case({name: max(0.1, round(mib * part, 2)) for name, mib in memory.items()})
    if chance.random() >= ROBBED:
        return _Case(memory)
    rank = chance.randrange(sum(count for _, count in COUNTS))
    of_rank = [memory[name] for name, count in COUNTS for _ in range(count)][rank]
    taken = round(of_rank * chance.uniform(0.05, 0.4), 2)
    return _Case(memory, rank, chance.randint(1, 2 * STEPS), taken)


def _run(folder: Path, case: _Case) -> _Outcome:
    folder.mkdir()
    (folder / "job.yaml").write_text(yaml.safe_dump(_job(folder, case)), encoding="utf-8")
    begun = time.monotonic()
    try:
        done = subprocess.run(
            [*TRAIN, "--allow", "faulted"],
            cwd=folder,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        code, said = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        code, said = -1, f"it hung: {error}"
    losses = [one["loss"] for one in records(folder / "run", "step")]
    again = sum(one["why"] == "out of memory" for one in records(folder / "run", "restart"))
    if code == 0 and len(losses) != STEPS:
        code, said = -1, f"it did {len(losses)} of {STEPS} steps:\n{said}"
    return _Outcome(case, code, time.monotonic() - begun, losses, again, said)


def _job(folder: Path, case: _Case) -> dict[str, Any]:
    speeds = {"fast": "20 GFLOP/s", "slow": "10 GFLOP/s"}
    return {
        "model": {"config": GPT},
        "data": {
            "factory": "faulted.hog:samples",
            "arguments": {
                "folder": str(folder),
                "length": LENGTH,
                "rank": case.rank,
                "step": case.step,
                "taken_bytes": int(case.taken_mib * 2**20),
            },
            "validation_split": 0.0,
        },
        "sequence_length": LENGTH,
        "global_batch_size": 16,
        "max_steps": STEPS,
        "optimizer": {"lr": 1e-3},
        "cluster": [
            {
                "class": name,
                "emulate": speeds[name],
                "memory": f"{case.memory_mib[name]:.2f} MiB",
                "count": count,
            }
            for name, count in COUNTS
        ],
        "advanced": {"timeout": 20},
        "output_dir": "run",
    }


def _report(outcome: _Outcome) -> None:
    case = outcome.case
    robbed = f", rank {case.rank} loses {case.taken_mib} MiB" if case.taken_mib else ""
    memory = ", ".join(f"{name} {mib} MiB" for name, mib in case.memory_mib.items())
    again = f", planned again {outcome.planned_again} times" if outcome.planned_again else ""
    print(f"{outcome.name} after {outcome.seconds:.1f} s: {memory}{robbed}{again}", flush=True)
    if outcome.name == "died":
        print(outcome.said, flush=True)


def _figures(found: list[_Outcome], plenty: _Outcome) -> Figures:
    trained = [one for one in found if one.name == "trained"]
    robbed = [one for one in found if one.case.taken_mib]
    return {
        "runs": len(found),
        "died": sum(one.name == "died" for one in found),
        "trained": len(trained),
        "refused": sum(one.name == "refused" for one in found),
        "robbed": len(robbed),
        "robbed_trained": sum(one.name == "trained" for one in robbed),
        "planned_again": sum(one.planned_again for one in found),
        "median_trained_s": round(median(one.seconds for one in trained), 1) if trained else 0.0,
        "worst_relative_error": max(
            (abs(one.losses[-1] / plenty.losses[-1] - 1) for one in trained), default=0.0
        ),
    }


if __name__ == "__main__":
    main()
