"""Devices of `gpumix demo`, unlike GPUs of this host or an emulated mixture, and a model to fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpumix.schema.cluster.cluster import Cluster
from gpumix.schema.errors import MachineError
from gpumix.schema.units import format_count

# Speeds 4 : 2 : 1 : 1, and the fast device is not the one with the most memory. The rates keep
# the emulation at a fraction of two ordinary CPU cores.
EMULATED_CLUSTER = [
    {"class": "fast", "emulate": "10 GFLOP/s", "memory": "64 MiB"},
    {"class": "medium", "emulate": "5 GFLOP/s", "memory": "128 MiB"},
    {"class": "slow", "emulate": "2.5 GFLOP/s", "memory": "48 MiB", "count": 2},
]
_EMULATION_NOTE = (
    "four unequal devices are emulated on its CPU: their speeds and memory are stated, and times "
    "follow from them; the training, and what processes tell each other, is real"
)
_SMALL = {"n_embd": 192, "n_layer": 6, "n_head": 6, "n_positions": 128}
_LARGE = {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 512}  # 86 million parameters


@dataclass(frozen=True)
class DemoDevices:
    """Devices of a demo, and the size of the model.

    Attributes:
        cluster: as in a job.
        said: text for the user on real and emulated parts.
    """

    cluster: Any
    said: str

    @property
    def emulated(self) -> bool:
        return self.cluster != "auto"

    @property
    def model_size(self) -> dict[str, int]:
        """Size keys of a GPT-2 config."""
        return _SMALL if self.emulated else _LARGE

    @property
    def sequence_length(self) -> int:
        return self.model_size["n_positions"]

    @property
    def global_batch(self) -> int:
        return 16 if self.emulated else 64

    @property
    def techniques(self) -> dict[str, Any]:
        """Keys of a job's `techniques`: all devices are used. Emulated ones also divide the state
        unevenly, and spend no time on measuring tensor parallelism."""
        emulated = {"state_on": "device", "tensor_parallel_size": 1, "max_pipeline_stages": 1}
        return {"leave_out": False} | (emulated if self.emulated else {})


def choose_demo_devices() -> DemoDevices:
    """Return the GPUs of this host, if of two classes or more, or an emulated mixture."""
    from gpumix.hardware.discovery.discover import discover_cluster, explain_cpu

    try:
        found = discover_cluster()
    except MachineError as error:  # the host's GPUs are not usable
        return DemoDevices(EMULATED_CLUSTER, f"{error}\n{_EMULATION_NOTE}")
    if not found.classes[0].is_gpu:
        return DemoDevices(EMULATED_CLUSTER, f"{explain_cpu()}: {_EMULATION_NOTE}")
    if len(found.classes) == 1:
        return DemoDevices(
            EMULATED_CLUSTER,
            f"{_describe_gpus(found)} on this host, nothing unequal to show: {_EMULATION_NOTE}. "
            "To train on them: gpumix train job.yaml",
        )
    return DemoDevices(
        "auto", f"on the GPUs of this host, nothing is emulated: {_describe_gpus(found)}"
    )


def _describe_gpus(cluster: Cluster) -> str:
    """Describe GPUs, as "2 x rtx-3090 and 1 x a100-sxm4-40gb", or "2 GPUs of class rtx-3090"."""
    numbers = {one.name: len(cluster.members(one.name)) for one in cluster.classes}
    if len(numbers) == 1:
        ((name, number),) = numbers.items()
        return f"{format_count(number, 'GPU')} of class {name}"
    return " and ".join(f"{number} x {name}" for name, number in numbers.items())
