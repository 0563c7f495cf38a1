"""Tensor parallelism: division of a unit's parameters by the plan of its model class.

May use `engine.comm` and `engine.sequence_parallel`.
"""
