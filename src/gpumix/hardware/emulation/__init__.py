"""CPU processes emulating devices of given speed and memory. Slows compute, not results."""

from gpumix.hardware.emulation.device import EmulatedDevice
from gpumix.hardware.emulation.pacer import Pacer

__all__ = ["EmulatedDevice", "Pacer"]
