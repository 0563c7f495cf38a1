"""Emulated device: a CPU process with the speed and the memory of its device class."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from gpumix.hardware.emulation.link import EmulatedLink
from gpumix.hardware.emulation.pacer import Pacer
from gpumix.hardware.memory_limit import MemoryLimit, limit_memory
from gpumix.schema.cluster.cluster import DeviceClass
from gpumix.schema.errors import InputError


class EmulatedDevice:
    """An emulated device of `device_class`: this process, inside the `with` block.

    Torch uses one thread inside: an emulated device is one thread. Memory is counted from the first
    device of the process on; leaving the block lifts the cap, counting continues.

    Args:
        device_class: a class with `emulate_flops_per_s`.
        memory: cap allocations at the class's memory.
        pace: slow compute to the class's speed.

    Raises:
        InputError: the class is not an emulated one.

    Attributes:
        memory: the memory limit, None unless requested.
        pacer: the pacer, None unless requested.
        host_link: the link to the host, None if it has no stated rate, or nothing is paced.
    """

    def __init__(
        self, device_class: DeviceClass, *, memory: bool = True, pace: bool = True
    ) -> None:
        if device_class.emulate_flops_per_s is None:
            raise InputError(
                f"device class '{device_class.name}' is not an emulated one",
                fix="give it `emulate_flops_per_s` in the cluster file",
            )
        self.device_class = device_class
        self.memory: MemoryLimit | None = None
        self.pacer = Pacer(device_class.emulate_flops_per_s) if pace else None
        self.host_link: EmulatedLink | None = None
        rate = device_class.emulate_link_bytes_per_s
        if self.pacer is not None and rate is not None:
            self.host_link = EmulatedLink(rate, self.pacer.timeline)
        self._limits_memory = memory
        self._stack = ExitStack()

    def __enter__(self) -> EmulatedDevice:
        with ExitStack() as stack:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
            if self._limits_memory:
                owner = f"emulated device '{self.device_class.name}'"
                self.memory = limit_memory(self.device_class.memory_bytes, owner=owner)
                stack.callback(limit_memory, None)
            if self.pacer is not None:
                stack.enter_context(self.pacer)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
