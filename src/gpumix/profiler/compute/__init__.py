"""Measurements of a device: layers, optimizers, copies, memory, and agreement of ways to compute.

May use `engine` and `hardware`.
"""
