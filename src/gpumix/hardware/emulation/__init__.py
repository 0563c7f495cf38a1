"""CPU processes that stand for devices of stated speed and memory. Slows compute, never results."""

from gpumix.hardware.emulation.device import EmulatedDevice
from gpumix.hardware.emulation.pacer import Pacer

__all__ = ["EmulatedDevice", "Pacer"]
