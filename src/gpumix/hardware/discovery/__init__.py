"""Devices of a host and their health, by NVML, amdsmi, PCI and torch.

May use `schema`.
"""
