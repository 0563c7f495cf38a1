"""Discovery of devices, their common interface, and emulated devices.

`discovery`, `estimates` and `host` need no torch; `runtime`, `memory_limit` and `emulation` import
it.
"""
