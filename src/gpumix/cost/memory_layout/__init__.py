"""Sizes that a step holds: measured curves, buffers that share memory, activations, head chunks.

May use `schema` only.
"""
