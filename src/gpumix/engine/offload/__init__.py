"""CPU offload: state and activations in host memory, and copy streams next to compute.

May use `hardware` only.
"""
