"""GPUs visible to CUDA programs: `CUDA_VISIBLE_DEVICES`, interpreted as CUDA does.

CUDA silently accepts two cases that are errors here. CUDA numbers GPUs by speed unless
`CUDA_DEVICE_ORDER=PCI_BUS_ID`, and `nvidia-smi` by bus: on mixed hosts '0' may not be the GPU the
user means. And CUDA drops an entry that names no GPU, with all later entries.

GPUs in MIG mode are refused: a process can use only one instance, and instances of a GPU cannot
communicate through NCCL, so a plan over them would not run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from gpumix.hardware.host.environment import cuda_counts_by_bus, visible_cuda_devices
from gpumix.schema.cluster.cluster import DeviceClass
from gpumix.schema.errors import MachineError

_BRAND_WORDS = {
    "nvidia",
    "geforce",
    "tesla",
    "amd",
    "radeon",
    "instinct",
    "intel",
    "r",
    "tm",
    "graphics",
}


@dataclass(frozen=True)
class Gpu:
    """A GPU as described by driver or torch; `index` is the PCI bus order of `nvidia-smi`, or
    torch's order."""

    index: int
    uuid: str
    product: str
    memory_bytes: int
    driver: str
    compute_capability: str
    mig: bool = False
    gfx_target: str = ""
    xe_target: str = ""
    accelerator: Literal["cuda", "xpu"] = "cuda"
    driver_cuda: str = ""  # the newest CUDA supported by the driver

    @property
    def kind(self) -> tuple[object, ...]:
        """Properties shared by GPUs of one class."""
        told = (self.product, self.memory_bytes, self.driver, self.compute_capability)
        return *told, self.gfx_target, self.xe_target, self.accelerator

    def device_class(self, name: str) -> DeviceClass:
        """Return the device class of this GPU."""
        return DeviceClass(
            name=name,
            accelerator=self.accelerator,
            memory_bytes=self.memory_bytes,
            product=self.product,
            driver=self.driver,
            compute_capability=self.compute_capability,
            gfx_target=self.gfx_target,
            xe_target=self.xe_target,
        )


def make_class_name(product: str) -> str:
    """Return a class name for a product: 'NVIDIA GeForce RTX 3090' is 'rtx-3090'."""
    words = re.findall(r"[a-z0-9.]+", product.lower())
    return "-".join(w for w in words if w not in _BRAND_WORDS) or "gpu"


def select_visible_gpus(gpus: tuple[Gpu, ...], *, host: str) -> tuple[Gpu, ...]:
    """Return the GPUs visible to CUDA, in its order; all in bus order if `CUDA_VISIBLE_DEVICES` is
    unset.

    Raises:
        MachineError: an entry names no GPU or several, a GPU is named twice, a number is ambiguous
            because the products differ, or a visible GPU is in MIG mode.
    """
    entries = visible_cuda_devices()
    chosen = gpus if entries is None else _select_visible(gpus, entries, host=host)
    for gpu in chosen:
        if gpu.mig:
            raise _mig_error(f"{host}, GPU {gpu.index}")
    return chosen


def _select_visible(
    gpus: tuple[Gpu, ...], entries: tuple[str, ...], *, host: str
) -> tuple[Gpu, ...]:
    if not gpus:  # no driver: nothing to show, whatever the variable says
        return ()
    if "-1" in entries:  # the customary end of the list
        entries = entries[: entries.index("-1")]
    chosen = tuple(_find_named(gpus, entry, host=host) for entry in entries)
    if len(set(chosen)) < len(chosen):
        raise _visible_error(
            f"CUDA_VISIBLE_DEVICES={','.join(entries)} names a GPU twice",
            host,
            "visible-devices-twice",
        )
    by_number = any(entry.isdigit() for entry in entries)
    one_kind = len({gpu.kind for gpu in gpus}) == 1
    if by_number and not one_kind and len(chosen) < len(gpus) and not cuda_counts_by_bus():
        raise _ambiguous_error(entries, host)
    return chosen


def _find_named(gpus: tuple[Gpu, ...], entry: str, *, host: str) -> Gpu:
    """Return the GPU named by an entry: a number, or the unique start of a UUID."""
    if entry.startswith("MIG"):
        raise _mig_error(f"{host}, CUDA_VISIBLE_DEVICES")
    if entry.isdigit():
        matches = [gpu for gpu in gpus if gpu.index == int(entry)]
    else:
        matches = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
    if len(matches) != 1:
        number = "no GPU" if not matches else f"{len(matches)} GPUs"
        raise _visible_error(
            f"CUDA_VISIBLE_DEVICES names '{entry}', which is {number} here",
            host,
            "visible-devices-unmatched",
        )
    return matches[0]


def _visible_error(what: str, host: str, code: str) -> MachineError:
    return MachineError(
        what,
        code=code,
        where=host,
        fix="set CUDA_VISIBLE_DEVICES to numbers or UUIDs that `nvidia-smi -L` shows, or unset it",
    )


def _ambiguous_error(entries: tuple[str, ...], host: str) -> MachineError:
    return MachineError(
        f"it is unclear which GPUs CUDA_VISIBLE_DEVICES={','.join(entries)} means",
        code="visible-devices-ambiguous",
        where=host,
        why="the GPUs differ, and CUDA numbers them by speed while nvidia-smi goes by PCI bus",
        fix="`export CUDA_DEVICE_ORDER=PCI_BUS_ID` to number them as nvidia-smi does, or name "
        "them by UUID (`nvidia-smi -L`)",
    )


def _mig_error(where: str) -> MachineError:
    return MachineError(
        "GPUs in MIG mode are not supported",
        code="mig-unsupported",
        where=where,
        why="instances of one GPU cannot exchange tensors through NCCL",
        fix="hide the GPU with CUDA_VISIBLE_DEVICES, or leave MIG mode: `sudo nvidia-smi -mig 0`",
    )
