"""What is here: discovery of devices, their common interface, and emulated ones.

`discover` needs no torch; `runtime`, `memory` and `emulation` import it.
"""
