"""Runs commands as a reader of the examples does, in a session of their own that leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node")


def python(*arguments: str | Path, cache: Path, timeout_s: float = 240.0) -> str:
    """What `python ARGUMENTS` prints to stdout, run in the project's folder; it must succeed.

    Timeouts are for a machine that has much else to do; alone every example is done in 30 s.
    """
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | environment(cache),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        _end(process.pid)
        process.wait()
    assert process.returncode == 0, err[-4000:]
    return out


def environment(cache: Path) -> dict[str, str]:
    """Nothing is kept in the reader's cache; torchrun takes a free port; ranks talk on loopback."""
    return {
        "XDG_CACHE_HOME": str(cache),
        "PET_STANDALONE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _end(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
