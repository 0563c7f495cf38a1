"""GPUs found by torch: AMD and Intel GPUs, and NVIDIA GPUs without NVML.

Runs in a separate process: the query creates a GPU context, which the discovering process would
keep while ranks train.
"""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

from gpumix.hardware.discovery.cuda_visible_devices import Gpu
from gpumix.hardware.host.environment import DeviceChoice, device_choices
from gpumix.schema.errors import MachineError

_PATIENCE_S = 180.0
_DEVICE_NODES = (Path("/dev/nvidiactl"), Path("/dev/nvhost-gpu"), Path("/dev/dxg"))


def find_torch_gpus(host: str, toolkit: str) -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs in torch's order, and torch's reason for showing none.

    Raises:
        MachineError: torch fails, or a variable names GPUs that do not exist.
    """
    told = query_torch(host) if _has_gpu_context() else _query_in_subprocess(host)
    gpus = tuple(Gpu(**one) for one in told["gpus"])
    _refuse_dropped(device_choices(toolkit), len(gpus), host)
    return gpus, str(told["why"])


def query_torch(host: str) -> dict[str, Any]:
    """Return torch's GPUs in this process: `gpus` as fields of `Gpu`, `why` as reason for none."""
    from gpumix.hardware import runtime

    count = runtime.device_count()
    gpus = [
        {
            "index": index,
            "uuid": f"GPU-{told}"
            if _is_uuid(told := runtime.device_uuid(index))
            else f"{host}-gpu-{index}",
            "product": runtime.device_name(index),
            "memory_bytes": runtime.total_bytes(index),
            "driver": runtime.driver_version(index),
            "compute_capability": "{}.{}".format(*runtime.capability(index))
            if runtime.is_nvidia()
            else "",
            "gfx_target": runtime.gfx_target(index),
            "xe_target": runtime.xe_target(index),
            "accelerator": runtime.get_gpu_type(),
        }
        for index in range(count)
    ]
    return {"gpus": gpus, "why": "" if gpus else runtime.explain_no_gpu()}


def has_gpu_signs() -> bool:
    """Return True on signs of GPUs visible to torch, without starting a process: the driver's
    device node without NVML and PCI cards (Jetson, WSL), or GPUs of an already imported torch."""
    if any(node.exists() for node in _DEVICE_NODES):
        return True
    if "torch" not in sys.modules:
        return False
    from gpumix.hardware import runtime

    return runtime.is_available()


def _has_gpu_context() -> bool:
    """Return True if this process already has a GPU context."""
    if "torch" not in sys.modules:
        return False
    from gpumix.hardware import runtime

    return runtime.is_initialized()


def _is_uuid(text: str) -> bool:
    """Return True if the UUID is unique: some drivers report zeros, or nothing."""
    try:
        return uuid.UUID(text).int != 0
    except ValueError:
        return False


def _query_in_subprocess(host: str) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", __name__, host]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_PATIENCE_S
        )
    except subprocess.TimeoutExpired as error:
        raise MachineError(
            f"torch does not say within {_PATIENCE_S:.0f} s which GPUs there are",
            code="torch-gpu-query-timeout",
            where=host,
            fix="run rocm-smi, xpu-smi or nvidia-smi; a driver that hangs needs a restart",
        ) from error
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise MachineError(
            "torch fails where it is asked which GPUs there are",
            code="torch-gpu-query-failed",
            where=host,
            why=lines[-1] if lines else f"exit code {done.returncode}",
            fix=f"see {' '.join(command[:1])} -c 'import torch; print(torch.accelerator."
            "device_count())'",
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _refuse_dropped(choices: tuple[DeviceChoice, ...], seen: int, host: str) -> None:
    """Refuse variables naming missing GPUs: drivers silently drop invalid and all later entries."""
    values = {choice.entries for choice in choices if choice.numbers_all}
    if len(values) > 1:
        named = " and ".join(f"{c.name}={','.join(c.entries)}" for c in choices if c.numbers_all)
        raise MachineError(
            f"{named} disagree",
            code="visible-devices-disagree",
            where=host,
            fix="set one of them, and unset the other",
        )
    for choice in choices:
        if choice.hides_all or not choice.entries:
            continue
        if len(choice.entries) < seen or (choice.numbers_all and len(choice.entries) > seen):
            raise MachineError(
                f"{choice.name} names {len(choice.entries)} GPUs, and torch shows {seen}",
                code="visible-devices-count",
                where=host,
                why=f"{choice.name}={','.join(choice.entries)}",
                fix="name GPUs that rocm-smi (AMD), xpu-smi (Intel) or nvidia-smi -L shows, each "
                "once, or unset it",
            )


if __name__ == "__main__":
    sys.stdout.write(json.dumps(query_torch(sys.argv[1])) + "\n")
