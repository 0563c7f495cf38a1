"""A run under torchrun on four devices, then three, then two, then four again.

Four agents on this machine stand for hosts of one emulated device each. One is killed with its
rank, then another; then two new ones come. Each time the others form anew and plan for the devices
that are there. In the end the losses are those of a run that nothing happened to, and each step was
done once.

    python benchmarks/elastic.py [--json]

Figures: `worst_relative_error` (of all losses), `steps_missing`, `steps_twice` (in the record of
the run), `seconds_to_3`, `seconds_to_2`, `seconds_to_4` (from the change to the end of the first
step after it; of these `rendezvous_s` is what torchrun waits for hosts that are gone or may come),
`worst_steps_repeated`.
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

from common import Figures, print_figures, records, small_gpt2

HERE = Path(__file__).parent
HOSTS, STEPS = 4, 160
# After so many steps: what happens.
CHANGES = ((20, "3"), (50, "2"), (80, "4"))
LAST_CALL_S = 3  # how long torchrun waits for more hosts than it needs
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
        "data": {"text": [str(Path(os.__file__).parent / "asyncio")], "pattern": "*.py"},
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
    command = [sys.executable, "-m", "gpumix", "train", "job.yaml"]
    subprocess.run(command, cwd=folder, check=True, stdout=sys.stderr)
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
                os.killpg(agents.pop().pid, signal.SIGKILL)
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
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()
    steps = [one["step"] for one in records(folder / "run", "step")]
    losses = {one["step"]: one["loss"] for one in records(folder / "run", "step")}
    return {
        "worst_relative_error": max(abs(losses[n] / alone[n] - 1) for n in losses),
        "steps_missing": len(set(alone) - set(losses)),
        "steps_twice": len(steps) - len(set(steps)),
        **{f"seconds_to_{name}": round(seconds, 1) for name, seconds in took.items()},
        "last_call_s": LAST_CALL_S,
    }


def _agent(folder: Path, port: int, number: int) -> subprocess.Popen[bytes]:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", f"2:{HOSTS}",
        "--nproc-per-node", "1", "--max-restarts", "20", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "elastic",
        "--rdzv-conf", f"last_call_timeout={LAST_CALL_S}",
        "--local-addr", "127.0.0.1", "--monitor-interval", "0.2",
        "-m", "gpumix", "train", "job.yaml",
    ]  # fmt: skip
    settings = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with (folder / f"said-{number}").open("wb") as said:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | settings,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


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
