"""A run under torchrun on four devices, then three, then two, then four again.

Four agents on this machine stand for hosts, each with a name, a device and copies in memory of its
own. One is killed with its rank, and its memory is gone; then another; then two new ones come. Each
time the others form anew and plan for the devices that are there. In the end the losses are those
of a run that nothing happened to, each step was done once, and with its samples.

    python benchmarks/elastic.py [--json]

Figures: `worst_relative_error` (of all losses), `steps_missing`, `steps_twice` (in the record of
the run), `samples_lost`, `samples_repeated`, `seconds_to_3`, `seconds_to_2`, `seconds_to_4` (from
the change to when all that are there go on), `restarts`, `resumed_from_memory` (of these; the
others went on from disk, or from nothing), `steps_repeated` (of the change with most; at least, as
the record is looked at ten times a second).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from common import TRAIN, Figures, environment, make_parser, print_figures, records, small_gpt2
from faulted.used import done_in, lost_and_repeated
from gpumix.hardware.host.environment import shared_memory_folder
from gpumix.schema.plan.plan import Plan
from gpumix.train.memory_checkpoint.memory_folder import MemoryFolder
from gpumix.train.run_log.run_id import read_run_id
from helpers.processes.ports import free_port

NAMES = ("host-0", "host-1", "host-2", "host-3")
STEPS = 600
# After so many steps: how many devices there are from then on.
CHANGES = ((20, 3), (60, 2), (100, 4))
# A host's name of its own; for users that are not root too, where the system lets them.
NAMED = ("unshare", "--uts", "--map-root-user", "sh", "-c", 'hostname "$0" && exec "$@"')
# How long torchrun waits for more hosts than it needs, and until it takes one for gone, in seconds.
PATIENCE = "last_call_timeout=3,keep_alive_interval=1"
SETTINGS = {"OMP_NUM_THREADS": "1"}
ALLOWED = ("--allow", "faulted")
GPT = small_gpt2(64, positions=32)


def main() -> None:
    parser = make_parser(__doc__)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        alone = _alone(Path(name) / "alone")
        figures = _elastic(Path(name) / "elastic", alone)
    print_figures(figures, as_json=arguments.json)


def _job(folder: Path) -> None:
    folder.mkdir()
    job = {
        "model": {"config": GPT},
        "data": {
            "factory": "faulted.traps:samples",
            "arguments": {"folder": str(folder), "length": 32},
            "validation_split": 0.0,
        },
        "sequence_length": 32,
        "global_batch_size": 24,
        "max_steps": STEPS,
        "cluster": [
            {"class": name, "emulate": f"{speed} GFLOP/s", "memory": "512 MiB", "host": host}
            for name, speed, host in zip(("fast", "fast", "slow", "slow"), (20, 20, 10, 10), NAMES)
        ],
        "techniques": {"max_pipeline_stages": 1, "tensor_parallel_size": [1], "leave_out": False},
        "advanced": {"profile_cache": str(folder.parent / "profiles"), "timeout": 30},
        "output_dir": "run",
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job), encoding="utf-8")


def _alone(folder: Path) -> dict[int, float]:
    """The losses by step of an undisturbed run."""
    _job(folder)
    command = [*TRAIN, *ALLOWED]
    subprocess.run(command, cwd=folder, env=environment(), check=True, stdout=sys.stderr)
    return {one["step"]: one["loss"] for one in records(folder / "run", "step")}


def _elastic(folder: Path, alone: dict[int, float]) -> Figures:
    _job(folder)
    port = free_port()
    agents = {name: _agent(folder, port, name) for name in NAMES}
    first = agents[NAMES[0]]
    took: dict[int, float] = {}
    repeated = 0
    try:
        for step, devices in CHANGES:
            _until(folder, lambda step=step: _last(folder) >= step, first)
            done, at = _last(folder), time.time()
            for name in NAMES[1:][::-1]:
                if name in agents and len(agents) > devices:
                    _lose(folder, name, agents.pop(name))
            for name in NAMES:
                if len(agents) < devices and name not in agents:
                    agents[name] = _agent(folder, port, name)
            _until(folder, lambda devices=devices, at=at: _begun(folder, devices, at), first)
            restarts = [one for one in records(folder / "run", "restart") if one["time"] > at]
            took[devices] = restarts[-1]["time"] - at
            repeated = max(repeated, done - restarts[0]["resumed_from"])
            print(f"{devices} devices after {took[devices]:.1f} s", file=sys.stderr, flush=True)
        code = first.wait(timeout=600)
        if code:
            raise SystemExit(f"the run failed:\n{(folder / f'said-{NAMES[0]}').read_text()}")
    finally:
        for agent in agents.values():
            _kill(agent)
    steps = [one["step"] for one in records(folder / "run", "step")]
    losses = {one["step"]: one["loss"] for one in records(folder / "run", "step")}
    lost, twice = lost_and_repeated(done_in(folder), done_in(folder.parent / "alone"))
    kept_in = [one["kept_in"] for one in records(folder / "run", "restart")]
    return {
        "worst_relative_error": max(abs(losses[n] / alone[n] - 1) for n in losses),
        "steps_missing": len(set(alone) - set(losses)),
        "steps_twice": len(steps) - len(set(steps)),
        "samples_lost": lost,
        "samples_repeated": twice,
        **{f"seconds_to_{name}": round(seconds, 1) for name, seconds in took.items()},
        "steps_repeated": repeated,
        "restarts": len(kept_in),
        "resumed_from_memory": kept_in.count("memory"),
    }


def _begun(folder: Path, devices: int, since: float) -> bool:
    """Whether a run has gone on, by a plan for so many devices."""
    plan = folder / "run" / "plan.json"
    since = max(since, plan.stat().st_mtime)
    began = any(one["time"] > since for one in records(folder / "run", "restart"))
    return began and len(Plan.load(plan).workers) == devices


def _lose(folder: Path, name: str, agent: subprocess.Popen[bytes]) -> None:
    """As a host goes, with what it has in memory."""
    _kill(agent)
    root = shared_memory_folder()
    if root is not None:
        output = folder / "run"
        shutil.rmtree(
            MemoryFolder(root, output, name, read_run_id(output)).folder, ignore_errors=True
        )


def _agent(folder: Path, port: int, name: str) -> subprocess.Popen[bytes]:
    command = [
        *NAMED, name, sys.executable, "-m", "torch.distributed.run", "--nnodes", f"2:{len(NAMES)}",
        "--nproc-per-node", "1", "--max-restarts", "20", "--rdzv-backend", "gpumix",
        "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "elastic",
        "--rdzv-conf", f"{PATIENCE},is_host={str(name == NAMES[0]).lower()}",
        "--monitor-interval", "0.2",
        "-m", "gpumix", "train", "job.yaml", *ALLOWED,
    ]  # fmt: skip
    with (folder / f"said-{name}").open("wb") as said:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=environment() | SETTINGS,
            stdout=said,
            stderr=subprocess.STDOUT,
        )


def _kill(agent: subprocess.Popen[bytes]) -> None:
    """As a host goes: an agent and all that it began, which have sessions of their own."""
    processes = [agent.pid]
    for process in processes:
        with contextlib.suppress(OSError):
            begun = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="ascii")
            processes += map(int, begun.split())
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    agent.wait()


def _last(folder: Path) -> int:
    """The last step that a run has done."""
    return max((one["step"] for one in records(folder / "run", "step")), default=0)


def _until(folder: Path, done: Callable[[], bool], agent: subprocess.Popen[bytes]) -> None:
    while not done():
        _check(agent, folder)
        time.sleep(0.1)


def _check(agent: subprocess.Popen[bytes], folder: Path) -> None:
    if agent.poll() is not None:
        raise SystemExit(f"the run ended:\n{(folder / f'said-{NAMES[0]}').read_text()}")


if __name__ == "__main__":
    main()
