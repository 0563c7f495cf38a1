"""Discovery of devices, their common interface, and emulated devices.

`discover` needs no torch; `runtime`, `memory` and `emulation` import it.
"""
