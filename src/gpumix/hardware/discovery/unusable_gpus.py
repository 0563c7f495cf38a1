"""Refusal of hosts with GPUs unusable by torch: a run on the CPU would be correct, but a thousand
times slower than expected. Users who want the CPU hide the GPUs."""

from __future__ import annotations

import os
from pathlib import Path

from gpumix.hardware.discovery.pci_gpus import PciGpu, describe_gpus
from gpumix.hardware.discovery.torch_build import (
    TOOLKITS,
    TorchBuild,
    suggest_cuda_wheel,
    suggest_toolkit_wheel,
)
from gpumix.schema.errors import MachineError

NEWER_DRIVER = "install a newer driver"
TRAIN_ON_CPU_FIX = "to train on the CPU all the same: export CUDA_VISIBLE_DEVICES="
_NVIDIA_MODULE = Path("/proc/driver/nvidia/version")
_KFD = Path("/dev/kfd")  # access to AMD GPUs
_DRI = Path("/dev/dri")  # access to Intel GPUs


def refuse_build(build: TorchBuild | None, *, driver: str, driver_cuda: str, host: str) -> None:
    """Check that torch can use the NVIDIA driver of a host.

    Args:
        driver: driver version; empty if unknown.
        driver_cuda: the newest CUDA supported by the driver; empty if unknown.

    Raises:
        MachineError: torch is for another maker or for CPUs, or too new for the driver.
    """
    if build is None:  # reported on import
        return
    if build.toolkit != "CUDA":
        raise MachineError(
            f"torch cannot use the NVIDIA GPUs of this host: it has no CUDA built in ({build})",
            code="torch-without-cuda",
            where=host,
            fix=f"{suggest_cuda_wheel(driver_cuda) or NEWER_DRIVER}; {TRAIN_ON_CPU_FIX}",
        )
    wheel = suggest_cuda_wheel(driver_cuda)
    older_torch = f", or a torch for it: {wheel}" if wheel else ""
    if driver_cuda and _major(driver_cuda) < _major(build.toolkit_version):
        raise MachineError(
            f"the NVIDIA driver is too old for this torch: driver {driver} is for CUDA "
            f"{driver_cuda} and older, {build}",
            code="nvidia-driver-too-old",
            where=host,
            fix=f"{NEWER_DRIVER}{older_torch}; {TRAIN_ON_CPU_FIX}",
        )


def refuse_cards(
    cards: tuple[PciGpu, ...], build: TorchBuild | None, *, host: str, torch_says: str = ""
) -> None:
    """Refuse a host with GPUs on the bus, but none visible to drivers and torch.

    Args:
        cards: the GPUs on its bus.
        torch_says: torch's reason for showing none, if asked.

    Raises:
        MachineError: there are GPUs.
    """
    if not cards:
        return
    maker = next((c.maker for c in cards if build and TOOLKITS[c.maker] == build.toolkit), "")
    fitting = bool(maker)
    maker = maker or cards[0].maker
    trouble, fix = _diagnose_driver(maker)
    if not fitting:
        trouble = "" if build is None else str(build)
        fix = (
            suggest_toolkit_wheel(TOOLKITS[maker])
            if not _diagnose_driver(maker)[0]
            else (f"{fix}, then {suggest_toolkit_wheel(TOOLKITS[maker])}")
        )
    raise MachineError(
        f"this host has {describe_gpus(cards)} that torch cannot use",
        code="torch-cannot-use-gpus",
        where=f"{host}, PCI {', '.join(card.address for card in cards[:4])}",
        why="; ".join(filter(None, (trouble, torch_says))),
        fix="; ".join(filter(None, (fix, TRAIN_ON_CPU_FIX))),
    )


def _diagnose_driver(maker: str) -> tuple[str, str]:
    """Return the visible problem of a maker's driver, and the fix; empty strings if there is
    none."""
    if maker == "NVIDIA":
        if _NVIDIA_MODULE.exists():
            return (
                "the NVIDIA driver is loaded, but its library libnvidia-ml.so.1 shows no GPU here",
                "in a container: docker run --gpus all (NVIDIA Container Toolkit); else run "
                "nvidia-smi, and install the driver's libraries again",
            )
        return "no NVIDIA driver is loaded", "install NVIDIA's driver, and restart"
    node = _KFD if maker == "AMD" else _DRI
    if not node.exists():
        return (
            (
                f"there is no {node}",
                "load the driver (modprobe amdgpu)"
                if maker == "AMD"
                else "load the driver (modprobe xe)",
            )
            if not _is_in_container()
            else (
                f"there is no {node} in this container",
                "docker run --device /dev/kfd --device /dev/dri"
                if maker == "AMD"
                else "docker run --device /dev/dri",
            )
        )
    if maker == "AMD" and not os.access(node, os.R_OK | os.W_OK):
        return f"this user may not open {node}", "sudo usermod -aG render,video $USER, log in again"
    return "", ""


def _is_in_container() -> bool:
    return Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()


def _major(version: str) -> int:
    digits = version.partition(".")[0]
    return int(digits) if digits.isdigit() else 0
