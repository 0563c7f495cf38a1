"""Runs the examples as their readers do."""

from __future__ import annotations

import sys
from pathlib import Path

from helpers.paths import ROOT
from helpers.processes.commands import environment, run

EXAMPLES = ROOT / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node")
# torchrun takes a free port, and nothing is downloaded.
ENVIRONMENT = {"PET_STANDALONE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def python(
    *arguments: str | Path, cache: Path, timeout_s: float = 240.0, fresh: bool = False
) -> str:
    """What `python ARGUMENTS` prints to stdout, run in the project's folder; it must succeed.
    `fresh`: see `commands.run`.

    Timeouts are for a machine that has much else to do; alone every example is done in 30 s.
    """
    command = [sys.executable, *arguments]
    env = environment(cache) | ENVIRONMENT
    done = run(command, folder=ROOT, env=env, timeout_s=timeout_s, fresh=fresh)
    assert done.code == 0, done.err[-4000:]
    return done.out
