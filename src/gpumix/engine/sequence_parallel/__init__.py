"""Sequence parallelism: activations between tensor-parallel regions, divided by position.

May use `engine.model`, `engine.comm` and `engine.cross_entropy`.
"""
