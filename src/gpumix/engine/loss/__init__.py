"""Reduction of losses: denominators, the rule of a model or a program, and chunked
cross-entropy.

May use `engine.cross_entropy`, `engine.batch`, `engine.model` and the head's shards.
"""
