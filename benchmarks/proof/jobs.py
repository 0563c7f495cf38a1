"""Jobs and commands of gpumix itself, as stages start them: in the stage's own process group."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from common import environment, records
from proof.bench import Bench
from proof.models import Llama

LIBRARY = Path(sysconfig.get_path("stdlib"))
TEXTS = ("asyncio", "email", "http", "json", "multiprocessing", "unittest", "xml")
GPUMIX = (sys.executable, "-m", "gpumix")
FEW_TEXTS = 1  # of them, in a rehearsal
LOOK_S = 0.02
ENDS_S = 2.0  # of a stage's time, to tell of a command that does not end


@dataclass(frozen=True)
class Done:
    """A command that has ended.

    Attributes:
        out, err: what it wrote.
    """

    code: int
    out: str
    err: str
    seconds: float

    @property
    def json(self) -> Any:
        """The one document that it printed; nothing where it printed none."""
        try:
            return json.loads(self.out)
        except ValueError:
            return {}


class Command:
    """`gpumix ...` under way, in a folder."""

    def __init__(self, bench: Bench, *words: str, allow: Sequence[str] = ()) -> None:
        self.begun, self._words = time.time(), " ".join(words)
        self._bench = bench
        self._clock = time.monotonic()
        self._files = [bench.folder / f"said-{time.time_ns()}-{name}" for name in ("out", "err")]
        permits = [part for module in allow for part in ("--allow", module)]
        with self._files[0].open("wb") as out, self._files[1].open("wb") as err:
            self.process = subprocess.Popen(
                [*GPUMIX, *words, *permits],
                cwd=bench.folder,
                env=environment(bench.folder) | surroundings(bench),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )

    def wait(self) -> Done:
        """Wait until it has ended.

        Raises:
            RuntimeError: it has not when the stage is about to end; with the end of what it said.
        """
        try:
            code = self.process.wait(max(1.0, self._bench.left_s - ENDS_S))
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = None
        out, err = (file.read_text(encoding="utf-8", errors="replace") for file in self._files)
        took_s = time.monotonic() - self._clock
        print(f"{err[-4000:]}\n{self._words}: {took_s:.1f} s", file=sys.stderr, flush=True)
        if code is None:
            raise RuntimeError(f"{self._words} did not end in {took_s:.0f} s:\n{err[-3000:]}")
        return Done(code, out, err, took_s)


def surroundings(bench: Bench) -> dict[str, str]:
    """Variables of commands: what is measured in one stage, others need not measure again."""
    cache = bench.folder.parent / "cache"
    found = {"XDG_CACHE_HOME": str(cache), "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "160"}
    return found | ({"GPU_PROOF_TINY": "1"} if bench.rehearses else {})


def gpumix(bench: Bench, *words: str, allow: Sequence[str] = ()) -> Done:
    """Run `gpumix ...` to its end."""
    return Command(bench, *words, allow=allow).wait()


def well(done: Done, what: str) -> Done:
    """The command, if it ended with 0.

    Raises:
        RuntimeError: it did not; with the end of what it said.
    """
    if done.code != 0:
        raise RuntimeError(f"{what} ended with exit code {done.code}:\n{done.err[-3000:]}")
    return done


def write_job(
    bench: Bench,
    name: str,
    spec: Llama,
    *,
    advanced: Mapping[str, Any] = MappingProxyType({}),
    **keys: Any,
) -> Path:
    """A job's file: text that every Python brings along as bytes, on the devices that are found."""
    job = {
        "model": {"config": spec.configuration},
        "data": {"text": texts(bench), "pattern": "*.py", "validation_split": 0.0},
        "sequence_length": spec.sequence,
        "optimizer": {"lr": 4e-4, "betas": [0.9, 0.95], "weight_decay": 0.1},
        "precision": "fp32" if bench.rehearses else "bf16",
        "cluster": "auto",
        "advanced": {"profile_budget": 1 if bench.rehearses else 15, **advanced},
        "output_dir": str(bench.folder / name),
        "logging_steps": 1,
        **keys,
    }
    file = bench.folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(job, sort_keys=False), encoding="utf-8")
    return file


def texts(bench: Bench) -> list[str]:
    """Folders of the standard library."""
    found = [str(LIBRARY / name) for name in TEXTS if (LIBRARY / name).is_dir()]
    return found[:FEW_TEXTS] if bench.rehearses else found


def losses(run: Path) -> dict[int, float]:
    """By step; of a step that was done again the last one."""
    return {one["step"]: one["loss"] for one in records(run, "step")}


def worst_difference(
    found: Mapping[int, float], truth: Mapping[int, float], begin: int = 1
) -> float | None:
    """Relative, of the losses from step `begin` on; None where a step is missing."""
    steps = [step for step in truth if step >= begin]
    if not steps or any(step not in found for step in steps):
        return None
    return max(abs(found[step] / truth[step] - 1) for step in steps)


def wait_for_step(command: Command, run: Path, step: int, *, deadline: float) -> bool:
    """Whether a run came to a step before `deadline`, by `time.monotonic()`, and before its end."""
    while time.monotonic() < deadline:
        if any(one["step"] >= step for one in records(run, "step")):
            return True
        if command.process.poll() is not None:
            return False
        time.sleep(LOOK_S)
    return False


def fast_folder(bench: Bench, need_bytes: float) -> Path:
    """A folder for what a run writes: in memory where there is plenty, for disks may be slow."""
    shared = Path("/dev/shm")
    if not bench.rehearses and shared.is_dir() and shutil.disk_usage(shared).free > 2 * need_bytes:
        folder = shared / f"gpu-proof-{os.getpid()}"
        folder.mkdir(exist_ok=True)
        return folder
    return bench.folder
