"""How often one step makes the host wait for its device, on the CUDA device of the tests.

    python tests/cuda_device -- python benchmarks/compared/waits.py    # prints the number

Only waits in gpumix's own lines count; a model of `transformers` waits by itself for its masks.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]
DEVICE = BENCHMARKS.parent / "tests" / "cuda_device"
LIMIT_S = 300


def waits_on_device() -> tuple[int | None, str]:
    """The most waits of a step in any setting; None, and why, where the device cannot be made."""
    command = [sys.executable, str(DEVICE), "--", sys.executable, str(Path(__file__).resolve())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return None, f"the steps were not done in {LIMIT_S} s"
    last = (done.stdout.strip() or done.stderr.strip() or "no output").splitlines()[-1]
    return (int(last), "") if done.returncode == 0 else (None, last)


def _count() -> int:
    """In this process, which has the device."""
    sys.path[:0] = [str(BENCHMARKS), str(DEVICE.parent)]
    import torch

    import cuda_device
    import gpumix
    from compared.setting import Model, Setting
    from compared.systems import Gpumix

    ours, most = str(Path(gpumix.__file__).parent), 0
    model = Model(width=64, layers=4, vocabulary=256, sequence=16)
    for number, again in product((1, 4), (False, True)):
        setting = Setting(model, 1, samples=number, micro_batches=number, recompute=again)
        system = Gpumix(3).make(setting, torch.device("cuda", 0))
        for step in range(2):
            batch = {name: rows.cuda() for name, rows in setting.batch(step, 0).items()}
            cuda_device.reset_host_waits()
            system.step(batch)
        waits = cuda_device.host_waits()
        most = max(most, sum(n for place, n in waits.items() if place.startswith(ours)))
    return most


if __name__ == "__main__":
    print(_count())
