"""A run under torchrun on four devices, then three, then two, then four again.

Four agents on this machine stand for hosts of one emulated device each. One is killed with its
rank, then another; then two new ones come. Each time the others form anew and plan for the devices
that are there. In the end the losses are those of a run that nothing happened to, and each step was
done once.

    python benchmarks/elastic.py [--json]

Figures: `worst_relative_error` (of all losses), `steps_missing`, `steps_twice` (in the record of
the run), `seconds_to_3`, `seconds_to_2`, `seconds_to_4` (from the change to when the others go on).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from common import TEXT, TRAIN, Figures, print_figures, records, small_gpt2

HOSTS, STEPS = 4, 600
# After so many steps: what happens.
CHANGES = ((20, "3"), (60, "2"), (100, "4"))
# How long torchrun waits for more hosts than it needs, and until it takes one for gone, in seconds.
PATIENCE = "last_call_timeout=3,keep_alive_interval=1"
SETTINGS = {"OMP_NUM_THREADS": "1"}
GPT = small_gpt2(64, positions=32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        alone = _alone(Path(name) / "alone")
        figures = _elastic(Path(name) / "elastic", alone)
    print_figures(figures, as_json=arguments.json)


def _job(folder: Path) -> None:
    folder.mkdir()
    job = {
        "model": {"config": GPT},
        "data": {"text": [str(TEXT)], "pattern": "*.py"},
        "sequence_length": 32,
        "global_batch": 24,
        "steps": STEPS,
        "cluster": [
            {"class": "fast", "emulate": "20 GFLOP/s", "memory": "512 MiB", "count": 2},
            {"class": "slow", "emulate": "10 GFLOP/s", "memory": "512 MiB", "count": 2},
        ],
        "techniques": {"most_stages": 1, "tensor": [1], "leave_out": False},
        "profile": {"cache": str(folder.parent / "profiles")},
        "timeout": 30,
        "output": "run",
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job), encoding="utf-8")


def _alone(folder: Path) -> dict[int, float]:
    """The losses by step of an undisturbed run."""
    _job(folder)
    subprocess.run(TRAIN, cwd=folder, check=True, stdout=sys.stderr)
    return {one["step"]: one["loss"] for one in records(folder / "run", "step")}


def _elastic(folder: Path, alone: dict[int, float]) -> Figures:
    _job(folder)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    agents = [_agent(folder, port, number) for number in range(HOSTS)]
    took: dict[str, float] = {}
    try:
        for step, devices in CHANGES:
            _until(folder, step, agents[0])
            at, starts = time.time(), len(records(folder / "run", "restart"))
            if devices == "4":
                agents += [_agent(folder, port, HOSTS + n) for n in range(2)]
            else:
                _kill(agents.pop())
            while len(records(folder / "run", "restart")) == starts:
                _check(agents[0], folder)
                time.sleep(0.1)
            took[devices] = records(folder / "run", "restart")[-1]["time"] - at
            print(f"{devices} devices after {took[devices]:.1f} s", file=sys.stderr, flush=True)
        code = agents[0].wait(timeout=600)
        if code:
            raise SystemExit(f"the run failed:\n{(folder / 'said-0').read_text()}")
    finally:
        for agent in agents:
            _kill(agent)
    steps = [one["step"] for one in records(folder / "run", "step")]
    losses = {one["step"]: one["loss"] for one in records(folder / "run", "step")}
    return {
        "worst_relative_error": max(abs(losses[n] / alone[n] - 1) for n in losses),
        "steps_missing": len(set(alone) - set(losses)),
        "steps_twice": len(steps) - len(set(steps)),
        **{f"seconds_to_{name}": round(seconds, 1) for name, seconds in took.items()},
    }


def _agent(folder: Path, port: int, number: int) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", f"2:{HOSTS}",
        "--nproc-per-node", "1", "--max-restarts", "20", "--rdzv-backend", "gpumix",
        "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "elastic",
        "--rdzv-conf", f"{PATIENCE},is_host={str(number == 0).lower()}",
        "--monitor-interval", "0.2",
        "-m", "gpumix", "train", "job.yaml",
    ]  # fmt: skip
    with (folder / f"said-{number}").open("wb") as said:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | SETTINGS,
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


def _until(folder: Path, more: int, agent: subprocess.Popen[bytes]) -> None:
    """Until a run has done so many steps."""
    while max((one["step"] for one in records(folder / "run", "step")), default=0) < more:
        _check(agent, folder)
        time.sleep(0.1)


def _check(agent: subprocess.Popen[bytes], folder: Path) -> None:
    if agent.poll() is not None:
        raise SystemExit(f"the run ended:\n{(folder / 'said-0').read_text()}")


if __name__ == "__main__":
    main()
