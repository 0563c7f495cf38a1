"""NVIDIA's multi-process service (MPS), by which several processes compute on one GPU at once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MPS_FOLDER = Path("/tmp/gpu-proof-mps")
FOLDERS = ("/usr/local/nvidia/bin", "/usr/bin", "/usr/local/cuda/bin")
QUITS_S = 10.0


def mps_control() -> str | None:
    """The program that starts and ends the service, where it is installed."""
    folders = os.pathsep.join([os.environ.get("PATH", ""), *FOLDERS])
    return shutil.which("nvidia-cuda-mps-control", path=folders)


@contextmanager
def multi_process_service(*, wanted: bool) -> Iterator[dict[str, str]]:
    """The service, for ranks with the environment that this gives: an empty one where it is not
    there. It is ended afterwards, whatever happens."""
    control = mps_control() if wanted else None
    if control is None:
        yield {}
        return
    shutil.rmtree(MPS_FOLDER, ignore_errors=True)
    MPS_FOLDER.mkdir()
    own = {"CUDA_MPS_PIPE_DIRECTORY": str(MPS_FOLDER), "CUDA_MPS_LOG_DIRECTORY": str(MPS_FOLDER)}
    begun = subprocess.run([control, "-d"], env={**os.environ, **own}, timeout=QUITS_S)
    try:
        yield own if begun.returncode == 0 else {}
    finally:
        quit_service()


def quit_service() -> None:
    """End the service of an earlier stage, if there is one."""
    control = mps_control()
    if control is None or not MPS_FOLDER.is_dir():
        return
    own = {"CUDA_MPS_PIPE_DIRECTORY": str(MPS_FOLDER), "CUDA_MPS_LOG_DIRECTORY": str(MPS_FOLDER)}
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            [control], input="quit\n", text=True, env={**os.environ, **own}, timeout=QUITS_S
        )
    for log in MPS_FOLDER.glob("*.log"):
        with suppress(OSError):
            print(f"{log.name}: {log.read_text(errors='replace')[-1500:]}", file=sys.stderr)
    begun = time.monotonic()
    while (MPS_FOLDER / "control").exists() and time.monotonic() - begun < 2.0:
        time.sleep(0.1)
    shutil.rmtree(MPS_FOLDER, ignore_errors=True)
